"""The names of horovod.data: a base class for data loaders, and a mixin that loads batches in a thread.

Unlike in Horovod, an exception of the loader is raised in every later iteration too, `close_async_loader` cannot wait
forever for a full queue, and nothing is printed unless `debug_data_loader` is set.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

__all__ = ("AsyncDataLoaderMixin", "BaseDataLoader")

_POLL_SECONDS = 0.05


class BaseDataLoader:
    """A data loader. Subclasses define `__len__` and `_iterate`."""

    def __len__(self) -> int:
        """Return the number of batches."""
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        """Yield the batches of one epoch."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """Return the batch in the form in which the training loop gets it."""
        return batch


class AsyncDataLoaderMixin:
    """Loads batches ahead in a thread: class AsyncLoader(AsyncDataLoaderMixin, Loader), where Loader has `_iterate`.

    async_loader_queue_size: how many batches to load ahead; 0 loads without a thread. The thread goes on with the next
    epoch when one ends. debug_data_loader: print what the thread does. Other arguments are those of the loader.
    """

    _error: Exception | None = None
    """What the loader has raised in the thread, which has ended then."""

    if TYPE_CHECKING:
        # The loader has them.
        def _iterate(self) -> Iterator[Any]: ...
        def _process_batch(self, batch: Any) -> Any: ...

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        super().__init__(*args, **kwargs)
        if async_loader_queue_size > 0:
            self.finished_event = threading.Event()
            self.queue: queue.Queue[Any] = queue.Queue(async_loader_queue_size)
            self.thread = threading.Thread(target=self._async_worker, daemon=True)
            self.started = False

    def close_async_loader(self) -> None:
        """End the thread, and discard the batches that it has loaded."""
        if self.async_loader_queue_size > 0 and self.started:
            self.finished_event.set()
            while self.thread.is_alive():
                with contextlib.suppress(queue.Empty):
                    self.queue.get_nowait()
                self.thread.join(_POLL_SECONDS)
            self._report("is closed")

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loaded_ahead() if self.async_loader_queue_size > 0 else self._iterate():
            yield self._process_batch(batch)

    def _loaded_ahead(self) -> Iterator[Any]:
        """Yield batches of the thread, up to the end of an epoch or of the thread."""
        if not self.started:
            self.started = True
            self.thread.start()
        while self.thread.is_alive() or not self.queue.empty():
            try:
                batch = self.queue.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if batch is None:
                return
            yield batch
        if self._error is not None:
            raise self._error

    def _async_worker(self) -> None:
        try:
            while not self.finished_event.is_set():
                for batch in self._iterate():
                    self._put(batch)
                    if self.finished_event.is_set():
                        return
                self._report("has loaded an epoch")
                self._put(None)
        except Exception as error:  # the user's loader decides what it raises
            if not self.finished_event.is_set():
                self._error = error

    def _put(self, item: Any) -> None:
        while not self.finished_event.is_set():
            with contextlib.suppress(queue.Full):
                self.queue.put(item, timeout=_POLL_SECONDS)
                return

    def _report(self, text: str) -> None:
        if self.debug_data_loader:
            print(f"The data loader with a queue of {self.async_loader_queue_size} {text}.")

"""Checkpoints of sharded models: a folder for each, into which every rank writes its part.

    step-000000500/            plain DCP, which torch.distributed.checkpoint loads, and one file of ours:
        __0_0.distcp ...       what rank 0 has written of the models and optimizers
        .metadata              where each part is
        dualdist.pt            everything else in the state, the manifest, and the checksum of each file above

The folder gets its name when all ranks have written, so that a save that was killed is never loaded.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..checkpoint.catalog import Catalog
from ..checkpoint.contents import on_host
from ..checkpoint.format import (
    PIECE_BYTES,
    TEMPORARY_SUFFIX,
    Manifest,
    damaged,
    sync_folder,
    temporary_name,
    write_checkpoint,
)
from ..checkpoint.save_and_load import from_writer, outcomes, report_mismatches, reported
from ..core.backends.torch_groups import adopted_config, wrapped
from ..core.checks import path as checked_path
from ..core.collectives.objects import attempted
from ..core.world import current
from ..errors import CheckpointError, ConfigurationError, HorovodInternalError, logger

try:
    from . import torch_shards
except ImportError as error:
    raise ConfigurationError(
        f"`sharded` must be False with torch {torch.__version__}, but is True instead. Install torch 2.5 or newer."
    ) from error

REST = "dualdist.pt"
_CHECKSUMS = "dualdist.checksums"
"""The key in the file REST under which it has the checksums."""


class FolderCatalog(Catalog):
    """The checkpoints of a folder, each in a folder of its own."""

    suffix = ""
    sharded = True

    def open(self) -> None:
        # A writer that was killed while it saved a step again leaves complete checkpoints without their name.
        for hidden in self.folder.glob(f".step-*{TEMPORARY_SUFFIX}"):
            placed = self.folder / hidden.name.split(".")[1]
            if (hidden / REST).exists() and not placed.exists():
                os.rename(hidden, placed)
        super().open()

    def begin(self, step: int) -> Path:
        """Make a folder for the parts of the next checkpoint that `write` completes, and return it."""
        self._unfinished = temporary_name(self.path_of(step))
        try:
            self._unfinished.mkdir()
        except OSError as error:
            raise self.not_saved(step, f"{error}.") from error
        return self._unfinished

    def place(self, path: Path, values: Mapping[str, Any], manifest: Manifest) -> None:
        write_checkpoint(self._unfinished / REST, values, manifest)
        sync_folder(self._unfinished)
        replaced = self._hide(path) if path.exists() else None
        try:
            os.rename(self._unfinished, path)
        except OSError:
            if replaced is not None:
                os.rename(replaced, path)
            raise
        sync_folder(self.folder)
        if replaced is not None:
            self.remove(replaced)

    def file_of(self, path: Path) -> Path:
        return path / REST

    def remove(self, path: Path) -> None:
        try:
            # It disappears at once, also if this process is killed, and without REST it is not complete.
            hidden = path if path.name.endswith(TEMPORARY_SUFFIX) else self._hide(path)
            if hidden.is_symlink():  # to a folder that was moved elsewhere, and stays there
                hidden.unlink()
                return
            (hidden / REST).unlink(missing_ok=True)
            shutil.rmtree(hidden)
        except OSError as error:
            logger.warning("Could not remove the old checkpoint %s: %s.", path, error)

    def _hide(self, path: Path) -> Path:
        hidden = temporary_name(path)
        os.rename(path, hidden)
        return hidden


class Shards:
    """The models and optimizers of a state, of which each rank saves its part."""

    def __init__(self, state: Mapping[str, Any], catalog: FolderCatalog) -> None:
        """Collective over the world."""
        context = current()
        context.backend.open_process_group()
        self._catalog, self._state = catalog, state
        timeout = timedelta(seconds=context.settings.stall_timeout_seconds)
        # Of its own, since an asynchronous save communicates in a thread.
        self._group: Any = dist.new_group(backend=adopted_config()["cpu"], timeout=timeout)
        self._rank, self._size = context.world.rank, context.world.size

    def close(self) -> None:
        """Disconnect the ranks."""
        with contextlib.suppress(ValueError):  # torch does not know it any more: it was destroyed before
            dist.destroy_process_group(self._group)

    def write(self, step: int, *, asynchronous: bool) -> Callable[..., None]:
        """Begin to save, and return `_finish` for the parts, or for copies of them. Collective over the world."""
        folder = from_writer(lambda: self._catalog.begin(step))
        parts: torch_shards.Parts = {}
        groups: dict[str, Any] = {}

        def check() -> Any:
            if not folder.is_dir():
                raise CheckpointError(
                    f"`directory` must be on a file system that all ranks share, but rank {self._rank} does not see "
                    f"{folder}."
                )
            own, own_groups = torch_shards.parts_of(self._objects)
            parts.update(_portable(own, copies=asynchronous))
            groups.update(_portable(own_groups))
            return [[group["params"] for group in each] for each in own_groups.values()]

        try:
            first, *others = outcomes(check)
        except CheckpointError:
            if self._rank == 0:
                self._catalog.remove(folder)
            raise
        # By number, the groups of different ranks would replace each other.
        parts |= torch_shards.hyperparameters(groups, by_number=all(names == first for names in others))
        return functools.partial(self._finish, folder, parts)

    def _gather(self, value: Any) -> list[Any]:
        """Return each rank's `value`, in rank order. Collective. Raises HorovodInternalError if a rank has ended."""
        gathered: list[Any] = [None] * self._size
        with wrapped():
            dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def _finish(
        self, folder: Path, parts: torch_shards.Parts, values: Mapping[str, Any] | None, manifest: Manifest | None
    ) -> None:
        """Write the parts, and complete the checkpoint. Collective; it may run in another thread.

        values, manifest: of the writer, None elsewhere. Raises CheckpointError on every rank.
        """

        def finished() -> dict[str, int]:
            torch_shards.write_parts(folder, parts, self._group)
            return checksums(folder, self._own(os.listdir(folder)))

        def gather(value: Any) -> list[Any]:
            try:
                return self._gather(value)
            except HorovodInternalError as error:
                cause = current().channels[0].group.find_cause()
                raise HorovodInternalError(f"{folder} was not completed: {cause}. {self._catalog.newest()}") from error

        sums, failure = attempted(finished)
        gathered = gather((sums, reported(failure, self._rank)))
        if manifest is not None:
            whole = {name: crc for own, _ in gathered for name, crc in (own or {}).items()}
            if (problem := next((text for _, text in gathered if text), None)) is not None:
                failure = self._catalog.not_saved(manifest.step, problem)
            else:
                _, failure = attempted(lambda: self._catalog.write({**(values or {}), _CHECKSUMS: whole}, manifest))
            if failure is not None:
                self._catalog.remove(folder)
        text = gather(None if failure is None else str(failure))[0]
        if text is not None:
            raise CheckpointError(text) from failure

    def verify(self, folder: Path, values: dict[str, Any]) -> str | None:
        """Take the checksums out of `values`, and return what is wrong with the parts. Collective over the world."""
        expected = values.pop(_CHECKSUMS, {})

        def compare() -> None:
            own = self._own(expected)
            try:
                found = checksums(folder, own)
            except OSError as error:
                raise damaged(folder, f"rank {self._rank} cannot read {error.filename}: {error.strerror}") from error
            for name in own:
                if found[name] != expected[name]:
                    raise damaged(folder / name, "its checksum is not that of what was written")

        _, failure = attempted(compare)
        return next(filter(None, self._gather(reported(failure, self._rank))), None)

    def fit(self, folder: Path, *, strict: bool, partial: bool) -> Callable[[], None]:
        """Return what loads the parts of this rank from `folder`. Both are collective over the world.

        strict, partial: as for `load_into`. Raises CheckpointError on every rank if `folder` does not fit.
        """
        made: list[torch_shards.Loading] = []

        def look() -> list[str]:
            made.append(torch_shards.Loading(folder, self._objects, partial=partial))
            return made[0].names

        known = set().union(*outcomes(look))
        (loading,) = made
        torch_shards.read_parts(folder, loading.described, self._group)
        outcomes(lambda: report_mismatches(loading.compare(known), folder, strict=strict))

        def load() -> None:
            torch_shards.read_parts(folder, loading.parts, self._group)
            loading.finish()

        return load

    @staticmethod
    def is_foreign(path: str | os.PathLike[str]) -> bool:
        """Return whether another program has written the folder `path` by DCP."""
        folder = checked_path("path", path)
        return (folder / ".metadata").exists() and not (folder / REST).exists()

    @property
    def others(self) -> dict[str, Any]:
        """What is not saved in parts."""
        return {name: value for name, value in self._state.items() if not is_sharded(value)}

    @property
    def _objects(self) -> dict[str, Any]:
        return {name: value for name, value in self._state.items() if is_sharded(value)}

    def _own(self, names: Any) -> list[str]:
        """Return the names of the files that this rank has written, or reads when there were more ranks."""
        numbers = {name: int((re.match(r"__(\d+)_", name) or [0, 0])[1]) for name in names}
        return [name for name, number in numbers.items() if number % self._size == self._rank]


def is_sharded(value: Any) -> bool:
    """Return whether each rank saves its part of `value`."""
    return isinstance(value, torch.nn.Module | torch.optim.Optimizer)


def _portable(parts: Mapping[str, Any], *, copies: bool = False) -> dict[str, Any]:
    """Return copies of `parts`, but the tensors themselves unless `copies`.

    Raises TypeError if a part would not be loaded again.
    """

    # dcp.async_save of torch 2.6 does not copy tensors of the CPU. An error here must be agreed on before DCP connects.
    def portable(name: str, part: Any) -> Any:
        if not isinstance(part, torch.Tensor):
            return on_host(part, name)
        return part.detach().to("cpu", copy=True) if copies else part

    return {name: portable(name, part) for name, part in parts.items()}


def check_part_names(state: Mapping[str, Any]) -> None:
    """Raise ValueError if parts of two values in `state` may have the same name."""
    names = [name for name, value in state.items() if is_sharded(value)]
    for name in names:
        if longer := [other for other in names if other.startswith(f"{name}.")]:
            raise ValueError(
                f"`state` must not have the model or optimizer {longer[0]!r} beside {name!r}: the names of its parts "
                f"begin like those of {name!r}. Rename one, for example with _ for the dot."
            )


def checksums(folder: Path, names: list[str]) -> dict[str, int]:
    """Return the CRC-32 of the files `names`."""
    sums = {}
    for name in names:
        crc = 0
        with open(folder / name, "rb", buffering=0) as file:
            while piece := file.read(PIECE_BYTES):
                crc = zlib.crc32(piece, crc)
        sums[name] = crc
    return sums

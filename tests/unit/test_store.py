"""The store of the job, at several starts of one process."""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import pytest

from dualdist.backends.store import open_store, serve_store
from dualdist.types import Launch

SECONDS = 60.0


def test_a_start_does_not_wait_for_a_thread_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve_store("127.0.0.1", timedelta(seconds=SECONDS))
    agent = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(served.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    for name, value in agent.items():
        monkeypatch.setenv(name, value)
    launch = Launch("test", init_method="env://")
    first = open_store(launch, os.environ, SECONDS).store
    abandoned = threading.Thread(target=first.wait, args=(["late"], timedelta(seconds=SECONDS)))
    abandoned.start()
    assert open_store(launch, os.environ, SECONDS, "here").messages == ("here",)
    assert abandoned.is_alive()
    first.clone().set("late", "")
    abandoned.join()

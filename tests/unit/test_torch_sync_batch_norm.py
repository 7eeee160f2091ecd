"""The search for layers of torch.nn.SyncBatchNorm."""

from __future__ import annotations

import threading

import torch
from torch import nn

from dualdist.sync_batch_norm import layers_with


class Derived(nn.SyncBatchNorm):
    pass


def test_only_layers_that_hold_the_parameters_are_found() -> None:
    model = nn.Sequential(nn.SyncBatchNorm(2), Derived(2), nn.BatchNorm1d(2))
    others = nn.SyncBatchNorm(2)
    assert set(layers_with(list(model.parameters()))) == {model[0], model[1]}
    assert list(layers_with(list(others.parameters()))) == [others]
    assert not list(layers_with([torch.zeros(2)]))


def test_a_search_does_not_disturb_other_threads() -> None:
    """With gc.get_objects(), the tuple that the other thread was just making raised SystemError."""
    ended, errors = threading.Event(), []

    def make_tuples() -> None:
        try:
            while not ended.is_set():
                tuple(number for number in range(2000))
        except SystemError as error:
            errors.append(error)

    thread = threading.Thread(target=make_tuples)
    thread.start()
    try:
        for _ in range(3):
            list(layers_with([torch.zeros(2)]))
    finally:
        ended.set()
        thread.join()
    assert not errors

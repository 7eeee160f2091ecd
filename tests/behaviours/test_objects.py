"""Collectives of Python objects."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
import torch

import dualdist as hvd

from ..helpers.world import everywhere


def thing(rank: int) -> dict[str, Any]:
    """Return an object whose size differs from rank to rank."""
    return {"rank": rank, "text": "x" * 1000 * rank, "nested": [(rank, None), {rank}]}


@everywhere
def test_broadcast_gives_the_object_of_the_root() -> None:
    for root in range(hvd.size()):
        mine = thing(hvd.rank())
        result = hvd.broadcast_object(mine, root)
        assert result == thing(root)
        assert (result is mine) == (hvd.rank() == root)


@everywhere
def test_broadcast_ignores_the_types_elsewhere() -> None:
    assert hvd.broadcast_object("text" if hvd.rank() == 0 else None, name="mixed") == "text"


@everywhere
def test_allgather_is_in_rank_order() -> None:
    assert hvd.allgather_object(thing(hvd.rank())) == [thing(rank) for rank in range(hvd.size())]
    assert hvd.allgather_object(None) == [None] * hvd.size()


class Tagged(torch.Tensor):
    """As the images of torchvision."""


@everywhere
def test_of_a_tensor_only_what_is_seen_travels() -> None:
    """As a gradient, which is a part of its bucket."""
    whole = torch.arange(100_000.0)
    view, sparse = (
        whole[4:8],
        torch.sparse_coo_tensor(torch.tensor([[1, 2]]), whole[5:7], (4,), check_invariants=True),
    )
    tagged: Any = whole[:2].as_subclass(Tagged)
    tagged.tag = "first"
    sent = {
        "list": [view, view],
        "parameter": torch.nn.Parameter(view),
        "expanded": whole[:1].expand(3),
        "tagged": tagged,
        "sparse": sparse,
    }
    assert len(pickle.dumps(view)) > whole.nbytes
    for received in (*hvd.allgather_object(sent), hvd.scatter_object([sent] * hvd.size())):
        assert received["list"][0] is received["list"][1]
        assert received["list"][0].tolist() == received["parameter"].tolist() == [4.0, 5.0, 6.0, 7.0]
        assert received["parameter"].requires_grad and received["expanded"].tolist() == [0.0] * 3
        assert (type(received["tagged"]), received["tagged"].tag) == (Tagged, "first")
        assert received["sparse"].to_dense().tolist() == [0.0, 5.0, 6.0, 0.0]
        tensors = (*received["list"], received["parameter"], received["tagged"], received["sparse"]._values())
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)


@everywhere
def test_gather_gives_the_root_all_objects() -> None:
    for root in range(hvd.size()):
        result = hvd.gather_object(thing(hvd.rank()), root)
        assert result == ([thing(rank) for rank in range(hvd.size())] if hvd.rank() == root else None)


@everywhere
def test_scatter_gives_each_rank_its_object() -> None:
    for root in range(hvd.size()):
        given = [thing(rank) for rank in range(hvd.size())] if hvd.rank() == root else None
        assert hvd.scatter_object(given, root) == thing(hvd.rank())


@everywhere
def test_scatter_of_the_wrong_number_fails_everywhere() -> None:
    given = [1] * (hvd.size() + 1) if hvd.rank() == 0 else None
    error = ValueError if hvd.rank() == 0 else hvd.HorovodInternalError
    with pytest.raises(error, match="one object for each"):
        hvd.scatter_object(given)
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


@everywhere
def test_an_object_that_cannot_be_pickled_fails_everywhere() -> None:
    given = threading.Lock() if hvd.rank() == 0 else "fine"
    error = TypeError if hvd.rank() == 0 else hvd.HorovodInternalError
    with pytest.raises(error, match="pickle"):
        hvd.allgather_object(given)
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))

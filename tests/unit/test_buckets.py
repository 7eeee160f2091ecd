"""How gradients are laid out in flat buckets."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dualdist.arrival_order import overlap
from dualdist.core.gradients.buckets import (
    BUCKET_BYTES,
    CPU_BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    LAST_BUCKET_BYTES,
    Bucket,
    BucketMemory,
    TrackedParameter,
)
from dualdist.core.gradients.buckets import lay_out as lay_out_all


def params(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]


def lay_out(
    tensors: list[torch.Tensor], sparse: set[int], groups: list[list[int]] | None, **options: Any
) -> list[Bucket]:
    tracked = [TrackedParameter(str(number), tensor) for number, tensor in enumerate(tensors)]
    return lay_out_all(tracked, sparse, groups, **options)


def members(tensors: list[torch.Tensor], groups: list[list[int]] | None = None) -> list[list[int]]:
    return [[slot.param for slot in bucket.slots] for bucket in lay_out(tensors, set(), groups)]


def test_small_models_are_one_bucket_from_the_last_parameter_to_the_first() -> None:
    (bucket,) = lay_out(params((3, 4), (4,), (2,)), set(), None)
    assert [(slot.param, slot.start) for slot in bucket.slots] == [(2, 0), (1, 2), (0, 6)]
    assert bucket.numel == bucket.length == 18


@pytest.mark.parametrize(("device", "size"), [("meta", BUCKET_BYTES), ("cpu", CPU_BUCKET_BYTES)])
def test_the_first_bucket_is_small_and_the_others_large(device: str, size: int) -> None:
    quarter = FIRST_BUCKET_BYTES // 4 // 4
    per_bucket = size // FIRST_BUCKET_BYTES * 4
    tensors = [torch.empty(quarter, device=device) for _ in range(4 + per_bucket + 1)]
    assert [len(bucket) for bucket in members(tensors)] == [4, per_bucket, 1]
    assert [index for bucket in members(tensors) for index in bucket] == list(range(len(tensors)))[::-1]


def test_a_size_of_less_than_a_byte_gives_each_parameter_its_own_bucket() -> None:
    buckets = lay_out(params((1,), (2,), (3,)), set(), None, cap_mb=1e-9, as_ddp=True)
    assert [len(bucket.slots) for bucket in buckets] == [1, 1, 1]


def test_a_large_last_bucket_is_split() -> None:
    numel = LAST_BUCKET_BYTES // 4 // 4  # a quarter
    tensors = params(*[(numel,)] * 30)  # 1 MB in the first bucket, 6.5 MB after it
    assert [len(bucket) for bucket in members(tensors)] == [4, 22, 4]
    assert [len(bucket) for bucket in members(tensors[:15])] == [4, 11]  # a bucket for less is not worth it
    embedding = params((LAST_BUCKET_BYTES,))  # 4 MB, complete when backward ends
    assert [len(bucket) for bucket in members([*embedding, *tensors])] == [4, 26, 1]
    assert [len(bucket.slots) for bucket in lay_out(tensors, set(), None, as_ddp=True)] == [4, 26]


def test_dtypes_do_not_share_a_bucket() -> None:
    tensors = [*params((2,)), *params((2,), dtype=torch.float16), *params((2,))]
    assert members(tensors) == [[1], [2, 0]]


def test_groups_share_a_bucket_and_the_others_are_alone() -> None:
    tensors = params((1,), (1,), (1,), (1,))
    assert members(tensors, [[0, 2]]) == [[3], [1], [2, 0]]
    assert sorted(map(sorted, members(tensors, [[0, 1], [2, 3]]))) == [[0, 1], [2, 3]]
    mixed = [*params((1,)), *params((1,), dtype=torch.float64)]
    assert sorted(members(mixed, [[0, 1]])) == [[0], [1]]


def test_buckets_follow_the_order_of_arrival() -> None:
    half = params(*[(FIRST_BUCKET_BYTES // 8,)] * 4)
    tracked = [TrackedParameter("", tensor) for tensor in [*half, *params((2,), dtype=torch.float16)]]

    def found(order: list[int], groups: list[list[int]] | None = None) -> list[list[int]]:
        buckets = lay_out_all(tracked, set(), groups, 0.5, order, as_ddp=True)
        return [[slot.param for slot in bucket.slots] for bucket in buckets]

    assert found([]) == [[4], [3], [2], [1], [0]]
    assert found([2, 0, 4, 3, 1]) == [[2], [0], [4], [3], [1]]
    assert found([2, 0, 4, 3, 1], [[0, 1], [3, 4]]) == [[2], [4], [3], [0, 1]]


def test_overlap_is_the_mean_of_what_is_left_of_backward_over_the_bytes() -> None:
    tracked = [TrackedParameter("", tensor) for tensor in params((1,), (1,), (2,))]
    buckets = lay_out_all(tracked, set(), [[0], [1], [2]])
    assert overlap(buckets, [2, 1, 0]) == pytest.approx((2 * 2 / 3 + 1 / 3) / 4)
    assert overlap(buckets, [0, 1, 2]) == 0
    assert overlap(buckets, [2]) == 0, "those that do not arrive are sent at the end"


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_sparse_gradients_have_a_slot_but_no_room(dtype: torch.dtype) -> None:
    tensors = params((100, 4), (2,), dtype=dtype)
    (bucket,) = lay_out(tensors, {0}, None)
    numbers = 2 * dtype.itemsize // bucket.dtype.itemsize
    assert bucket.numel == bucket.length == numbers
    assert [slot.shape.numel() for slot in bucket.slots] == [numbers, 0]
    flat = torch.zeros(bucket.length, dtype=bucket.dtype)
    BucketMemory(bucket, flat, 1.0)


def test_views_have_the_memory_layout_of_their_parameter() -> None:
    tensors = [
        torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.empty(3, 2).t(),
        torch.empty(4, 6)[:, ::2],
        torch.empty(()),
        torch.empty(0, 3),
        torch.empty(2, dtype=torch.float32).expand(3, 2),
    ]
    (bucket,) = lay_out(tensors, set(), None)
    flat = torch.arange(float(bucket.length))
    seen = []
    for slot in bucket.slots:
        view, tensor = slot.view(flat), tensors[slot.param]
        assert view.shape == tensor.shape
        assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        seen += sorted(view.flatten().tolist())
    assert seen == list(range(bucket.numel)), "the views must fill the bucket without gaps or overlaps"
    by_param = {slot.param: slot for slot in bucket.slots}
    assert by_param[0].stride == tensors[0].stride() and by_param[1].stride == tensors[1].stride()
    assert by_param[2].stride == (3, 1), "a parameter with gaps is laid out without them"


def test_views_follow_a_flat_tensor_that_starts_elsewhere() -> None:
    (bucket,) = lay_out(params((2,), (3,)), set(), None)
    whole = torch.arange(20.0)
    views = [slot.view(whole[7:]).tolist() for slot in bucket.slots]
    assert views == [[7, 8, 9], [10, 11]]
    assert math.prod(bucket.slots[0].shape) == 3

"""Five steps with each framework give the weights of one process, on each backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

import dualdist
from tests.helpers import framework_training as frameworks

from ..helpers.requirements import need_modules

pytestmark = [pytest.mark.only_ci, pytest.mark.usefixtures("python")]

BACKENDS = ["torch", pytest.param("horovod", marks=pytest.mark.only_all)]
T = TypeVar("T")


def results(work: Callable[[], T], backend: str) -> list[T]:
    """Return what each of two ranks returns."""
    need_modules(backend)
    return dualdist.spawn(work, nprocs=2, backend=backend, timeout=100)


@pytest.mark.only_all(where=lambda package: package in ("fabric", "ignite"))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("package", ["accelerate", "fabric", "lightning", "ignite"])
def test_a_framework_trains_a_bare_and_a_wrapped_model_and_with_our_optimizer(package: str, backend: str) -> None:
    need_modules("lightning" if package == "fabric" else package)
    expected = pytest.approx(frameworks.alone(), rel=1e-9, abs=1e-12)
    for found in results(getattr(frameworks, f"with_{package}"), backend):
        assert found == dict.fromkeys(["framework", "wrapper", "optimizer"], expected)


@pytest.mark.only_all
@pytest.mark.parametrize("backend", BACKENDS)
def test_torchmetrics_combines_what_the_ranks_have_seen(backend: str) -> None:
    need_modules("torchmetrics")
    losses, model = [], frameworks.network()
    optimizer = frameworks.sgd(model)
    for batch in frameworks.whole_batches():
        losses.append(frameworks.loss_of(model(batch[0]), batch[1]).item())
        frameworks.train(model, optimizer, [batch])
    expected = [*frameworks.weights(model), sum(losses) / len(losses)]
    for found in results(frameworks.with_torchmetrics, backend):
        assert found == pytest.approx(expected, rel=1e-6)  # torchmetrics adds up in float32


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sharded_model_trains_beside_a_wrapped_one(backend: str) -> None:
    expected = pytest.approx(2 * frameworks.alone(), rel=1e-9, abs=1e-12)
    for found in results(frameworks.with_fully_shard, backend):
        assert found == expected

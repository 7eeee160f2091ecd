"""How the flagship example trains with its flags: as plain PyTorch does, on both backends, in both styles."""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ..helpers.rounding import change_at_random, largest_change
from ..helpers.script_launch import launch
from ..helpers.world import ROOT

pytestmark = pytest.mark.only_ci

FLAGS = "--epochs 2 --warmup-epochs 0 --sync-bn --accumulate 3 --clip-norm 1 --ema 0.5 --tta"
RUNS = {
    "optimizer": "--style optimizer",
    "ddp": "--style ddp --save-every 1 --checkpoint-dir {folder}/saved",
    "optimizer bf16": "--style optimizer --amp bf16",
    "ddp fp16": "--style ddp --amp fp16",
}
IMAGES, VALIDATED, BATCH, PIXELS = 260, 121, 64, 8 * 8
"""How many are trained on: per epoch 4 batches of 64 on both ranks together, so two steps, of 3 batches and of 1."""

SCRIPT = f"""\
import functools, json, runpy, sys, torch
sys.path.insert(0, "examples")
import data
torch.compile = functools.partial(torch.compile, backend="aot_eager")  # all but the C++ compiler, which takes minutes
full = data.digits(None)
train, val = torch.utils.data.Subset(full.train, range({IMAGES})), torch.utils.data.Subset(full.val, range({VALIDATED}))
data.DATA["digits"] = lambda folder: full._replace(train=train, val=val)
for options in json.loads(sys.argv[1]):  # in one launch: importing torch takes most of the time
    sys.argv = ["train.py", *options.split()]
    runpy.run_path("examples/train.py", run_name="__main__")
"""
VALUES = ("train_loss", "val_loss", "val_accuracy", "ema_loss", "ema_accuracy")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where each backend's metrics and checkpoints are."""
    folders = {}
    for launcher, backend in (("torchrun", "torch"), ("torchrun-horovod", "horovod")):
        folder = folders[backend] = tmp_path_factory.mktemp(backend)
        (folder / "script.py").write_text(SCRIPT)
        runs = [
            f"{FLAGS} {options.format(folder=folder)} --metrics {folder}/{name.replace(' ', '-')}.json"
            for name, options in RUNS.items()
        ]
        ended = launch(launcher, str(folder / "script.py"), json.dumps(runs))
        assert ended.code == 0
        assert "Warning" not in ended.output
    return folders


def epochs(folder: Path, name: str) -> Any:
    """Return the results of a run, by epoch."""
    return json.loads((folder / f"{name.replace(' ', '-')}.json").read_text())["epochs"]


Results = list[dict[str, float]]
"""By epoch, and by VALUES."""


def assert_close(ours: Results, theirs: Results, bound: Results) -> None:
    assert len(ours) == len(theirs) == 2
    for our, their, most in zip(ours, theirs, bound, strict=True):
        for name in VALUES:
            assert abs(our[name] - their[name]) <= most[name], (name, ours, theirs)


@pytest.fixture(scope="module")
def plain() -> Results:
    return train_plainly()


@pytest.fixture(scope="module")
def bound(plain: Results) -> Results:
    """The largest differences that rounding explains. The longest sums are over the pixels of a batch."""
    most = largest_change(BATCH * PIXELS, torch.float32)
    changed = [train_plainly(most, seed) for seed in range(8)]
    return [
        {name: max(abs(run[epoch][name] - values[name]) for run in changed) for name in VALUES}
        for epoch, values in enumerate(plain)
    ]


def train_plainly(most: float = 0.0, seed: int = 0) -> Results:
    """Do what FLAGS ask for in plain PyTorch: one process, whose batches hold the images of both ranks.

    most, seed: of random changes; see helpers/rounding.py.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        example = importlib.import_module("data")
    data = example.digits(Path())
    images, labels = (tensor[:IMAGES] for tensor in data.train.tensors)
    torch.manual_seed(0)
    model = example.build_model("cnn", data)
    decayed = [param for param in model.parameters() if param.ndim > 1]
    others = [param for param in model.parameters() if param.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 5e-4}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    change_at_random([model], [optimizer], most, seed)
    ema, results = None, Results()
    for epoch in range(2):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        batches, losses = iter(order.split(BATCH)[:4]), []  # an incomplete batch is left out
        model.train()
        while window := list(itertools.islice(batches, 3)):
            optimizer.zero_grad()
            for batch in window:
                loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
                (loss / len(window)).backward()
                losses.append(loss.item())
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            ema = copy.deepcopy(model) if ema is None else ema
            for mean, new in zip(ema.state_dict().values(), model.state_dict().values(), strict=True):
                mean.copy_((mean + new) / 2)
        values = (sum(losses) / len(losses), *validate(model, data), *validate(ema, data))
        results.append(dict(zip(VALUES, values, strict=True)))
    return results


@torch.no_grad()
def validate(model: Any, data: Any) -> tuple[float, float]:
    """Return the loss and the accuracy over all validation images, each seen in three ways."""
    images, labels = (tensor[:VALIDATED] for tensor in data.val.tensors)
    left, right = (torch.full_like(images, -1) for _ in range(2))
    left[..., :-1], right[..., 1:] = images[..., 1:], images[..., :-1]
    model.eval()
    outputs = sum(model(view).double() for view in (images, left, right)) / 3
    accuracy = (outputs.argmax(dim=1) == labels).double().mean().item()
    return nn.functional.cross_entropy(outputs, labels).item(), accuracy


@pytest.mark.parametrize("backend", ["torch", "horovod"])
@pytest.mark.parametrize("style", ["optimizer", "ddp"])
def test_both_styles_train_as_plain_pytorch(
    backend: str, style: str, folders: dict[str, Path], plain: Results, bound: Results
) -> None:
    assert_close(epochs(folders[backend], style), plain, bound)


@pytest.mark.parametrize("name", RUNS)
def test_both_backends_train_the_same_model(name: str, folders: dict[str, Path]) -> None:
    """Exactly: the sum of two ranks' numbers has one order."""
    ours, theirs = (
        [[values[value] for value in VALUES] for values in epochs(folders[backend], name)]
        for backend in ("torch", "horovod")
    )
    assert ours == theirs


@pytest.mark.parametrize("name", ["optimizer bf16", "ddp fp16"])
def test_mixed_precision_trains_nearly_the_same(name: str, folders: dict[str, Path], plain: Results) -> None:
    """Nearly: bf16 keeps 8 bits of each number."""
    for ours, theirs in zip(epochs(folders["torch"], name), plain, strict=True):
        assert ours["train_loss"] != theirs["train_loss"]
        assert math.isclose(ours["train_loss"], theirs["train_loss"], rel_tol=0.01)


def test_one_process_goes_on_in_mid_epoch_where_two_were(
    folders: dict[str, Path], tmp_path: Path, bound: Results
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    saved = folders["torch"] / "saved" / "step-000000003.pt"
    files = f"--metrics {tmp_path}/resumed.json --checkpoint-dir {tmp_path}/saved --resume {saved}"
    runs = [f"{FLAGS} --style ddp --batch-size 64 --compile {files}"]
    output = launch("python", str(tmp_path / "script.py"), json.dumps(runs)).check()
    assert "resuming after step 3" in output
    resumed, whole = epochs(tmp_path, "resumed"), epochs(folders["torch"], "ddp")
    for ours, theirs in zip(resumed, whole, strict=True):
        ours["train_loss"] = theirs["train_loss"]  # it is the mean of the steps since the resume alone
    assert_close(resumed, whole, bound)

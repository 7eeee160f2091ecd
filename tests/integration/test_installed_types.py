"""The types that a user's script sees: mypy --strict beside the installed wheel, not beside the source tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..helpers.world import ROOT

pytestmark = pytest.mark.timeout(300)  # mypy reads all of torch when its cache is empty

GOOD = """\
import torch
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import dualdist as hvd
from dualdist.checkpoint import CheckpointManager

hvd.init()
rank: int = hvd.rank()
device: torch.device = hvd.device()
dataset = TensorDataset(torch.ones(8, 2), torch.zeros(8, 1))
sampler = hvd.DistributedSampler(dataset, seed=7)
weighted = hvd.samplers.DistributedSamplerWrapper(WeightedRandomSampler([1.0] * 8, num_samples=8), seed=7)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)

model = torch.nn.Linear(2, 1).to(device)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
optimizer.set_backward_passes_per_step(1)
synchronized: hvd.SynchronizedOptimizer = optimizer
plain: torch.optim.Optimizer = optimizer
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
wrapped = hvd.DistributedDataParallel(torch.nn.Linear(2, 1))
with wrapped.no_sync():
    wrapped(torch.ones(1, 2)).sum().backward()

state = {"model": model, "optimizer": optimizer, "sampler": sampler, "epoch": 0}
with CheckpointManager("checkpoints", state, keep=1, best=("loss", "min")) as manager:
    manager.restore_latest()
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        sampler.advance(len(inputs))
        manager.step()
    mean: torch.Tensor = hvd.allreduce(loss.detach(), op=hvd.Average)
    manager.save({"loss": mean.item()})
hvd.checkpoint.save("one.pt", state)
hvd.shutdown()
"""

WRONG = {
    "hvd.init(backend=1)": "[arg-type]",
    "rank: str = hvd.rank()": "[assignment]",
    "hvd.allreduce([1.0, 2.0])": "[arg-type]",
    "hvd.allreduce(torch.ones(2), operation=hvd.Sum)": "[call-arg]",
    "hvd.DistributedDataParallel(torch.ones(2))": "[arg-type]",
    "hvd.DistributedOptimizer(torch.optim.SGD([torch.ones(2)])).synchronise()": "[attr-defined]",
    'hvd.DistributedSampler([1, 2], pad="no")': "[arg-type]",
    'hvd.checkpoint.save("one.pt")': "[call-arg]",
    "hvd.all_reduce(torch.ones(2))": "[attr-defined]",
}
"""Each statement, and the kind of error that mypy reports for it."""


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and with the other packages of this one."""

    python: Path
    site_packages: Path
    mypy_cache: Path

    def run(self, *arguments: str, folder: Path) -> tuple[int, str]:
        """Run Python in `folder`, which is empty of sources of ours; return its exit code and output."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [str(self.python), *arguments]
        ended = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True)
        return ended.returncode, ended.stdout + ended.stderr

    def check(self, script: str, folder: Path) -> tuple[int, list[str]]:
        """Type-check `script`; return mypy's exit code and its lines."""
        (folder / "script.py").write_text(script)
        # torch has no types for Tensor.backward.
        options = ("--strict", "--untyped-calls-exclude=torch", "--config-file=", "--no-pretty")
        code, output = self.run(
            "-m", "mypy", *options, f"--cache-dir={self.mypy_cache}", "script.py", folder=folder
        )
        return code, output.splitlines()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    sources = folder / "sources"  # a copy: setuptools leaves build/ behind, and takes old files from it
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "dualdist", sources / "dualdist", ignore=ignored)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(sources)]
    subprocess.run(build, check=True, timeout=120)
    (wheel,) = folder.glob("dualdist-*.whl")

    venv.create(folder / "env", with_pip=False)
    (site_packages,) = folder.glob("env/lib/python*/site-packages")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site_packages), str(wheel)], check=True)
    (site_packages / "others.pth").write_text(sysconfig.get_path("purelib"))  # torch, mypy; behind the wheel
    python = folder / "env" / "bin" / "python"
    assert pytestconfig.cache is not None
    return Installed(python, site_packages, pytestconfig.cache.mkdir("mypy"))


def test_the_installed_package_is_the_wheel_and_says_that_it_has_types(
    installed: Installed, tmp_path: Path
) -> None:
    code, output = installed.run("-c", "import dualdist; print(dualdist.__file__)", folder=tmp_path)
    assert (code, output.strip()) == (0, str(installed.site_packages / "dualdist" / "__init__.py"))
    assert (installed.site_packages / "dualdist" / "py.typed").exists()


def test_a_right_script_passes_strict_checks_and_runs(installed: Installed, tmp_path: Path) -> None:
    code, lines = installed.check(GOOD, tmp_path)
    assert code == 0, lines
    code, output = installed.run("script.py", folder=tmp_path)
    assert code == 0, output


def test_each_wrong_statement_is_an_error(installed: Installed, tmp_path: Path) -> None:
    code, lines = installed.check("\n".join(["import torch", "import dualdist as hvd", *WRONG]), tmp_path)
    errors = [line for line in lines if ": error: " in line]
    assert code == 1
    assert len(errors) == len(WRONG), lines
    for number, (kind, line) in enumerate(zip(WRONG.values(), errors, strict=True), 3):
        assert line.startswith(f"script.py:{number}: error: ") and line.endswith(kind), line

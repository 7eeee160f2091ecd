"""What a user has installed: the source distribution, the wheel that is built from it, its commands, and its types.

Nothing is imported from the source tree. The types are checked with mypy --strict.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import dualdist

from ..helpers.world import ROOT

pytestmark = [pytest.mark.only_all, pytest.mark.timeout(300)]  # mypy reads all of torch without a cache

_WRITTEN = ("__pycache__", "build", "dist", "runs")
"""Folders that builds and runs leave behind."""

OTHERS = sysconfig.get_path("purelib")
"""The folder of torch and the other packages of this environment."""

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


def is_source(path: Path) -> bool:
    """Return whether a file or folder belongs to the sources, by its path below ROOT."""
    parts = path.relative_to(ROOT).parts
    return not any(part in _WRITTEN or part.startswith(".") or part.endswith(".egg-info") for part in parts)


def sources_in(folder: str) -> set[str]:
    """Return the paths below ROOT of the source files in a folder."""
    files = (path for path in (ROOT / folder).rglob("*") if is_source(path) and path.is_file())
    return {str(file.relative_to(ROOT)) for file in files}


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and with the other packages of this one."""

    source_distribution: Path
    wheel: Path
    bin: Path
    mypy_cache: Path

    def run(self, *command: str, folder: Path) -> tuple[int, str]:
        """Run a command of the environment in `folder`, without sources of ours; return its exit code and output."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = (str(self.bin / command[0]), *command[1:])
        ended = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True)
        return ended.returncode, ended.stdout + ended.stderr

    def check(self, script: str, folder: Path) -> tuple[int, list[str]]:
        """Type-check `script`; return mypy's exit code and its lines."""
        (folder / "script.py").write_text(script)
        # torch has no types for Tensor.backward.
        options = ("--strict", "--untyped-calls-exclude=torch", "--config-file=", "--no-pretty")
        cache = f"--cache-dir={self.mypy_cache}"
        code, output = self.run("python", "-m", "mypy", *options, cache, "script.py", folder=folder)
        return code, output.splitlines()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Installed:
    """The wheel in an empty environment, built without a network from the source distribution."""
    folder = tmp_path_factory.mktemp("installed")
    sources = folder / "sources"  # a copy: setuptools leaves build/ behind, and takes old files from it
    shutil.copytree(
        ROOT, sources, ignore=lambda parent, names: [name for name in names if not is_source(Path(parent, name))]
    )
    distribute = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", distribute, folder], cwd=sources, check=True, capture_output=True)
    (source_distribution,) = folder.glob("dualdist-*.tar.gz")

    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    build = [*pip, "wheel", *offline, f"--wheel-dir={folder}", str(source_distribution)]
    subprocess.run(build, check=True, timeout=120)
    (wheel,) = folder.glob("dualdist-*.whl")
    install = [*pip, "--python", str(python), "install", "--no-index", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, timeout=120)
    (site_packages,) = folder.glob("env/lib/python*/site-packages")
    (site_packages / "others.pth").write_text(OTHERS)  # torch, mypy; behind the wheel
    assert pytestconfig.cache is not None
    return Installed(source_distribution, wheel, python.parent, pytestconfig.cache.mkdir("mypy"))


def test_the_source_distribution_has_what_the_tests_and_pages_need(installed: Installed) -> None:
    with tarfile.open(installed.source_distribution) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("benchmarks", "ci", "docs", "dualdist", "examples", "tests"):
        assert sources_in(folder) - names == set()
    assert names >= {path.name for path in ROOT.glob("*.md")} | {"LICENSE", "mkdocs.yml", "pyproject.toml", "setup.cfg"}


def test_the_wheel_has_the_files_of_the_package_and_nothing_else(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == sources_in("dualdist")
    assert {"dualdist/py.typed", "dualdist/horovod/install.sh"} <= names


def test_the_installed_package_is_the_wheel_and_knows_its_version(installed: Installed, tmp_path: Path) -> None:
    show = "import importlib.metadata as m; print(dualdist.__file__, dualdist.__version__, m.version('dualdist'))"
    code, output = installed.run("python", "-c", f"import dualdist; {show}", folder=tmp_path)
    file, *versions = output.split()
    assert code == 0 and file.startswith(str(installed.bin.parent))
    assert versions == [dualdist.__version__] * 2
    assert f"dualdist-{dualdist.__version__}" in installed.wheel.name


def test_the_commands_run_from_another_folder(installed: Installed, tmp_path: Path) -> None:
    code, output = installed.run("dualdist", "--help", folder=tmp_path)
    assert code == 0 and "install-horovod build Horovod" in output
    code, output = installed.run("dualdist", "install-horovod", "--help", folder=tmp_path)
    assert code == 0 and "HOROVOD_WITHOUT_MPI=1" in output
    code, output = installed.run("python", "-m", "dualdist", "doctor", folder=tmp_path)
    assert code == 0, output
    assert re.search(rf"^  dualdist +{re.escape(dualdist.__version__)}$", output, re.MULTILINE), output
    assert re.search(r"^  torch\+gloo +yes$", output, re.MULTILINE), output


def test_exec_runs_a_script_from_another_folder(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE')))")
    assert installed.run("dualdist", "exec", "script.py", folder=tmp_path) == (0, "0 1\n")


def test_help_shows_the_public_functions(installed: Installed, tmp_path: Path) -> None:
    code, output = installed.run("python", "-c", "import dualdist; help(dualdist)", folder=tmp_path)
    assert code == 0, output
    assert output.startswith("Help on package dualdist:")
    documented = set(re.findall(r"^    (?:class )?(\w+)\(", output, re.MULTILINE))
    assert documented >= {"init", "allreduce", "broadcast_parameters", "DistributedOptimizer", "ProcessSet"}


def test_the_launcher_part_runs_where_torch_is_not_installed(installed: Installed, tmp_path: Path) -> None:
    alone = f"import sys; sys.path.remove({OTHERS!r}); import dualdist.core.launch; from dualdist.cli import main; "
    run = "sys.exit(main(['exec', '--', 'sh', '-c', 'echo rank $RANK']))"
    assert installed.run("python", "-c", alone + run, folder=tmp_path) == (0, "rank 0\n")
    code, output = installed.run("python", "-c", f"{alone}import torch", folder=tmp_path)
    assert code == 1 and "No module named 'torch'" in output


def test_a_right_script_passes_strict_checks_and_runs(installed: Installed, tmp_path: Path) -> None:
    code, lines = installed.check(GOOD, tmp_path)
    assert code == 0, lines
    code, output = installed.run("python", "script.py", folder=tmp_path)
    assert code == 0, output


def test_each_wrong_statement_is_an_error(installed: Installed, tmp_path: Path) -> None:
    code, lines = installed.check("\n".join(["import torch", "import dualdist as hvd", *WRONG]), tmp_path)
    errors = [line for line in lines if ": error: " in line]
    assert code == 1
    assert len(errors) == len(WRONG), lines
    for number, (kind, line) in enumerate(zip(WRONG.values(), errors, strict=True), 3):
        assert line.startswith(f"script.py:{number}: error: ") and line.endswith(kind), line

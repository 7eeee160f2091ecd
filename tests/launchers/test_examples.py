"""The examples in their smallest sizes: each runs on two processes, and says what it did."""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path

import pytest

from ..helpers.script_launch import Script, launch
from ..helpers.world import ROOT

SCRIPT = """\
import contextlib, io, json, runpy, sys
sys.path.insert(0, "examples")
for options in json.loads(sys.argv[1]):  # in one launch: importing torchvision takes most of the time
    sys.argv, said = options.split(), io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(f"examples/{sys.argv[0]}", run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code or 0
    if said.getvalue() or isinstance(code, str):  # not of the other rank, which says nothing
        print(json.dumps([code, said.getvalue()]) + "\\n", end="", flush=True)
"""

WITH_IMAGES = {
    "mnist": "mnist.py --data-dir {folder}/mnist --epochs 1 --log-interval 1",
    "mnist offline": "mnist.py --data-dir {folder}/nothing --epochs 6 --batch-size 32 --lr 0.05",
    "cifar10": "cifar10.py --synthetic --images 16 --batch-size 4 --epochs 1",
    "cifar10 offline": "cifar10.py --data-dir {folder}/nothing",
    "imagenet": "imagenet.py --synthetic --model resnet18 --bf16 --channels-last --checkpoint-dir {folder} --epochs 2",
    "imagenet resumed": "imagenet.py --synthetic --model resnet18 --checkpoint-dir {folder} --epochs 3",
    "benchmark": "synthetic_benchmark.py --batch-size 1 --num-batches-per-iter 1 --num-iters 2 --fp16-allreduce",
}
WITHOUT_IMAGES = {
    "transformer": "transformer.py --steps 20 --batch-size 8 --log-interval 10 --bf16",
    "trainer": "trainer.py 2 1 --snapshot {folder}/snapshot.pt",
    "trainer resumed": "trainer.py 3 2 --snapshot {folder}/snapshot.pt",
}
Said = dict[str, tuple[int | str, str]]
"""Name of a run -> exit code and output of rank 0."""


def write_mnist(folder: Path) -> None:
    """Write 32 images to train on and 8 to test on, in the format of MNIST."""
    folder.mkdir(parents=True)
    for part, count in (("train", 32), ("t10k", 8)):
        images = struct.pack(">4i", 2051, count, 28, 28) + bytes(count * 28 * 28)
        labels = struct.pack(">2i", 2049, count) + bytes(number % 10 for number in range(count))
        (folder / f"{part}-images-idx3-ubyte").write_bytes(images)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(labels)


@pytest.fixture(scope="module", params=["torchrun", pytest.param("mpirun", marks=pytest.mark.only_all)])
def launcher(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def said_with_images(launcher: str, tmp_path_factory: pytest.TempPathFactory) -> Said:
    folder = tmp_path_factory.mktemp("examples")
    write_mnist(folder / "mnist" / "MNIST" / "raw")
    return run_all(WITH_IMAGES, launcher, folder)


@pytest.fixture(scope="module")
def said_without_images(launcher: str, tmp_path_factory: pytest.TempPathFactory) -> Said:
    return run_all(WITHOUT_IMAGES, launcher, tmp_path_factory.mktemp("examples"))


def run_all(options_of: dict[str, str], launcher: str, folder: Path) -> Said:
    """Run all in one launch, in order."""
    (folder / "script.py").write_text(SCRIPT)
    runs = [options.format(folder=folder) for options in options_of.values()]
    no_network = {**dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:0"), "no_proxy": ""}
    output = launch(launcher, str(folder / "script.py"), json.dumps(runs), environment=no_network).check()
    lines = [json.loads(line) for line in output.splitlines() if re.match(r'\[(\d|")', line)]
    return dict(zip(options_of, lines, strict=True))


def numbers(text: str, pattern: str) -> list[tuple[float, ...]]:
    return [tuple(map(float, found)) for found in re.findall(pattern, text)]


@pytest.mark.only_ci
def test_mnist_counts_the_images_of_each_process(said_with_images: Said) -> None:
    code, text = said_with_images["mnist"]
    assert code == 0
    assert re.match(r"Train Epoch: 1 \[0/16 \(0%\)\]\tLoss: \d\.\d{6}\nTest set: Average loss: \d", text)


@pytest.mark.only_ci
def test_mnist_without_a_network_says_why_and_learns_other_digits(said_with_images: Said) -> None:
    code, text = said_with_images["mnist offline"]
    assert code == 0
    first, second = text.splitlines()[:2]
    assert first.startswith("MNIST cannot be downloaded to ") and "Connection refused" in first
    assert first.endswith(". Copy MNIST/raw there from a machine with a network.")
    assert second == "Learning scikit-learn's digits instead."
    tests = numbers(text, r"Average loss: (\S+), Accuracy: (\S+)%")
    assert len(tests) == 6
    assert tests[-1][0] < tests[0][0] and tests[-1][1] > 70


@pytest.mark.only_ci
def test_cifar10_trains_on_random_images(said_with_images: Said) -> None:
    code, text = said_with_images["cifar10"]
    assert code == 0
    assert len(numbers(text, r"epoch 1: loss (\S+), test loss (\S+), accuracy (0\.\d+)\n")) == 1


@pytest.mark.only_ci
def test_a_failed_download_ends_with_the_reason_and_the_remedy(said_with_images: Said) -> None:
    code, text = said_with_images["cifar10 offline"]
    assert text == "" and isinstance(code, str)
    assert code.startswith("CIFAR10 cannot be downloaded to ") and "Connection refused" in code
    assert code.endswith("Copy cifar-10-batches-py there from a machine with a network. Or use --synthetic.")


@pytest.mark.only_ci
def test_imagenet_resumes_after_its_last_epoch(said_with_images: Said) -> None:
    pattern = r"epoch (\d): loss (\d+\.\d+), accuracy (\S+) \((\S+) with averaged weights\)"
    (first, text), (second, more) = said_with_images["imagenet"], said_with_images["imagenet resumed"]
    assert (first, second) == (0, 0)
    assert [epoch for epoch, *_ in numbers(text, pattern)] == [1, 2]
    assert [epoch for epoch, *_ in numbers(more, pattern)] == [3]


def test_the_transformer_learns_and_writes(said_without_images: Said) -> None:
    code, text = said_without_images["transformer"]
    assert code == 0
    losses = numbers(text, r"step (\d+): loss (\S+) on 2 processes")
    assert [step for step, _ in losses] == [10, 20]
    ((after, bits),) = numbers(text, r"validation loss (\S+), (\S+) bits per byte")
    assert after < 5.0 < math.log(256)  # the loss of a model that has learned nothing
    assert bits == pytest.approx(after / math.log(2), abs=0.01)
    assert text.partition("per byte\n")[2].startswith("The statement")


def test_the_trainer_resumes_from_its_snapshot(said_without_images: Said) -> None:
    pattern = r"Epoch (\d) \| Batchsize: 32 \| Steps: 32 \| Loss: (\S+)"
    (first, text), (second, more) = said_without_images["trainer"], said_without_images["trainer resumed"]
    assert (first, second) == (0, 0)
    losses = [*numbers(text, pattern), *numbers(more, pattern)]
    assert [epoch for epoch, _ in losses] == [1, 2, 3]
    assert losses[0][1] > losses[1][1] > losses[2][1]
    assert text.count("Training snapshot saved") == 2
    assert more.startswith("Resuming training from snapshot at epoch 2\n")


@pytest.mark.only_ci
def test_the_benchmark_says_what_horovods_says(said_with_images: Said) -> None:
    code, text = said_with_images["benchmark"]
    assert code == 0
    rate, spread = r"\d+\.\d", r"\+-\d+\.\d"
    expected = (
        "Model: resnet18",
        "Batch size: 1",
        "Number of CPUs: 2",
        r"Running warmup\.\.\.",
        r"Running benchmark\.\.\.",
        f"Iter #0: {rate} img/sec per CPU",
        f"Iter #1: {rate} img/sec per CPU",
        rf"Img/sec per CPU: {rate} {spread}",
        rf"Total img/sec on 2 CPU\(s\): {rate} {spread}",
    )
    assert re.fullmatch("\n".join(expected) + "\n", text), text


WITH_OPTIONS = "cifar10 fsdp imagenet mnist synthetic_benchmark train trainer transformer".split()
HIDDEN = """\
import sys
for name in ("matplotlib", "sklearn", "tensorboard", "torchvision", "tqdm"):
    for loaded in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[loaded]
    sys.modules[name] = None
"""


def test_help_needs_no_optional_package(script: Script) -> None:
    with_options = {file.stem for file in (ROOT / "examples").glob("*.py") if "parse_args()" in file.read_text()}
    assert with_options == set(WITH_OPTIONS)
    path = script(HIDDEN + SCRIPT)
    ended = launch("python", path, json.dumps([f"{name}.py --help" for name in WITH_OPTIONS]))
    said = [json.loads(line) for line in ended.output.splitlines()]
    for name, (code, text) in zip(WITH_OPTIONS, said, strict=True):
        assert code == 0 and "--help" in text, (name, code, text)

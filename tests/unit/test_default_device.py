"""Tensors of the package's own are where it says, whatever the default device of the script is."""

from __future__ import annotations

import ast
from pathlib import Path

from torch.utils import _device

import dualdist

PACKAGE = Path(dualdist.__file__).parent
CONSTRUCTORS = {function.__name__ for function in _device._device_constructors()}


def test_each_new_tensor_names_its_device() -> None:
    """A script may call torch.set_default_device("cuda"): then `torch.tensor(1)` is there."""
    calls = [
        (path, node)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("torch.") in CONSTRUCTORS
    ]
    made = [(path, node) for path, node in calls if ast.unparse(node.func).startswith("torch.")]
    assert made
    without = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for path, node in made
        if not any(keyword.arg == "device" for keyword in node.keywords)
    ]
    assert without == []

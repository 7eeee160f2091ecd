"""Which modules may import what: engines in backends/ and native/ alone, no torch in launch/."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import dualdist

PACKAGE = Path(dualdist.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def imported(module: Path) -> set[str]:
    """Return the absolute names that `module` imports, and those inside the package relative to it."""
    names = set()
    for node in ast.walk(ast.parse((PACKAGE / module).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = [*module.parts[: len(module.parts) - node.level], *(node.module or "").split(".")]
            names.add(".".join(origin) if node.level else node.module or "")
    return names


def starts(names: set[str], package: str) -> bool:
    return any(name == package or name.startswith(package + ".") for name in names)


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_module_imports_what_its_place_allows(module: Path) -> None:
    names = imported(module)
    if module.parts[0] != "native":
        assert not starts(names, "native")
    if module.parts[0] not in ("backends", "native"):
        assert not starts(names, "horovod") and not starts(names, "torch.distributed")
    if module.parts[0] == "launch":
        assert not starts(names, "torch")
    if str(module) in ("types.py", "errors.py"):
        assert not any(starts(names, package) for package in ("torch", "numpy", "context", "backends"))
    if module.parts[0] == "backends":
        assert not starts(names, "context") and not starts(names, "collectives")

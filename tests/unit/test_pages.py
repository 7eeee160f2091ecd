"""README.md and docs/: their links and references lead somewhere, and no variable or public name is missing."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dualdist
from dualdist.core.launch.launchers import LAUNCHERS

from ..helpers.public_functions import COLLECTIVES

PACKAGE = Path(dualdist.__file__).parent
ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
ENVIRONMENT = (ROOT / "docs" / "environment.md").read_text()


def strings(module: Path) -> Iterator[str]:
    """Yield the strings of a module except those of `__all__`, which are names in Python."""
    tree = ast.parse(module.read_text())
    for statement in tree.body:
        is_all = isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__"
        for node in [] if is_all else ast.walk(statement):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def variables(text: str) -> set[str]:
    """Return the names of dualdist's and Horovod's environment variables."""
    return set(re.findall(r"\b(?:DUALDIST|HOROVOD)_[A-Z_]*[A-Z]\b", text))


SHOWN_BY_HELP = PACKAGE / "horovod" / "install.py"
"""Its variables are in its --help."""
IN_CODE = variables(
    "\n".join(text for module in PACKAGE.rglob("*.py") if module != SHOWN_BY_HELP for text in strings(module))
)


def test_every_variable_in_the_code_is_on_the_page() -> None:
    assert variables(ENVIRONMENT) == IN_CODE


def test_every_variable_of_dualdist_on_a_page_is_in_the_code() -> None:
    named = {name for page in PAGES for name in variables(page.read_text())}
    assert {name for name in named - IN_CODE if name.startswith("DUALDIST_")} == set()


def test_every_variable_of_the_launchers_is_on_the_page() -> None:
    rows = [(row.rank, row.size, row.local_rank, row.local_size, *row.markers) for row in LAUNCHERS]
    rows += [(*row.starts_mpi, *row.elastic, *row.restarts) for row in LAUNCHERS]
    names = {name.partition("=")[0] for row in rows for name in row if name}
    assert {name for name in names if f"`{name}`" not in ENVIRONMENT} == set()


def test_every_file_on_the_page_is_in_the_package() -> None:
    paths = re.findall(r"`([a-z_]+/[a-z_/]*\.py)`", ENVIRONMENT)
    assert len(paths) > 10
    assert [path for path in paths if not (PACKAGE / path).exists()] == []


def test_the_imports_that_replace_those_of_horovod_work() -> None:
    page = (ROOT / "docs" / "horovod.md").read_text()
    imports = re.findall(r"`(from (?:horovod|dualdist)[\w.]* import [\w, ]+)`", page)
    assert len(imports) >= 20
    for horovods, ours in zip(imports[::2], imports[1::2], strict=True):
        assert horovods.split()[3:] == ours.split()[3:]
        exec(ours, {})


def headings(page: Path) -> set[str]:
    """Return the names by which links lead to the headings of a page."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_and_tests_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        if ":" not in link:
            assert target.exists(), link
            assert not heading or heading in headings(target), link
    for reference in re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", text):
        path, _, name = reference.partition("::")
        assert (ROOT / path).exists(), reference
        assert not name or f"def {name}(" in (ROOT / path).read_text(), reference


MODULES = "checkpoint compat.data elastic errors lr metrics samplers seeding"
"""Public modules below dualdist."""
ENTRIES = [
    name
    for page in ROOT.glob("docs/reference*.md")
    for name in re.findall(r"^(?:::: | +heading: )(\S+)$", page.read_text(), re.MULTILINE)
]


def public_names() -> dict[str, Any]:
    """Return everything public by its shortest name."""
    found = {f"dualdist.{name}": getattr(dualdist, name) for name in dualdist.__all__}
    for path in MODULES.split():
        module = pkgutil.resolve_name(f"dualdist.{path}")
        for name in module.__all__:
            value = getattr(module, name)
            is_ours = getattr(value, "__module__", "dualdist").startswith("dualdist")
            if is_ours and value is not getattr(dualdist, name, None):
                found[f"{module.__name__}.{name}"] = value
    return found


PUBLIC = public_names()
FUNCTIONS = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}
DOCSTRINGS = {name: inspect.getdoc(function) or "" for name, function in FUNCTIONS.items()}


def test_names_said_to_be_in_a_file_are_defined_there() -> None:
    found = [named for page in PAGES for named in re.findall(r"`([\w.]+)` in\s+`([\w/]+\.py)`", page.read_text())]
    assert len(found) > 30
    wrong = []
    for name, path in found:
        files = [file for file in (ROOT / path, PACKAGE / path, PACKAGE / "core" / path) if file.exists()]
        last = re.escape(name.rpartition(".")[2])
        is_there = rf"(?m)\b(def|class) {last}\b|^\s*(self\.)?{last}\b[^\n]*=|\b{last}: "  # or a parameter
        if not path.startswith(("tests/", "torch/")) and not any(
            re.search(is_there, file.read_text()) for file in files
        ):
            wrong.append((name, path))
    assert wrong == []


def test_each_public_name_has_one_entry_in_the_reference() -> None:
    assert len(PUBLIC) > 130
    assert {name: ENTRIES.count(name) for name in PUBLIC if ENTRIES.count(name) != 1} == {}


def test_each_entry_of_the_reference_is_there_once() -> None:
    assert [name for name, count in Counter(ENTRIES).items() if count > 1] == []
    for name in ENTRIES:
        assert pkgutil.resolve_name(name) is not None, name


def test_each_public_function_says_whether_other_ranks_take_part() -> None:
    assert len(FUNCTIONS) > 80
    missing = [name for name in FUNCTIONS if not re.search(r"\bCollective\b|\bLocal\.", DOCSTRINGS[name])]
    assert missing == []
    assert [name for name in COLLECTIVES if "Collective" not in DOCSTRINGS[f"dualdist.{name}"]] == []


def test_each_function_of_tensors_says_their_shapes_and_its_errors() -> None:
    of_tensors = [
        name
        for name, function in FUNCTIONS.items()
        for parameter in inspect.signature(function).parameters.values()
        if str(parameter.annotation).startswith(("torch.Tensor", "Sequence[torch.Tensor]"))
    ]
    assert len(of_tensors) > 25
    shape, errors = r"\(n, \.\.\.\)|\b[Ss]hapes?\b", r"\bRaises\b|\bsame .*\berrors\."
    for rule in (shape, errors):
        assert [name for name in of_tensors if not re.search(rule, DOCSTRINGS[name])] == []

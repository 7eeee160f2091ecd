"""Who may import whom: the core none of the rest, its rooms in one order, no cycles; and where backends are named."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import dualdist
from dualdist.core.launch import launchers
from dualdist.core.types import Settings

PACKAGE = Path(dualdist.__file__).parent

CORE = (
    {"core.training"},
    {"core.gradients"},
    {"core.lifecycle"},
    {"core.collectives"},
    {"core.world"},
    {"core.agreement"},
    {"core.backends"},
    {"core.meeting"},
    {"core.launch"},
    {f"core.{name}" for name in "accelerator checks compiling process".split()},
    {"core", "core.types", "errors"},
)
"""The rooms of the core, from the top to the bottom: a module imports from its own room and from those further down."""

BETWEEN_OTHERS = {
    "__main__": {"cli"},
    "checkpoint": {"rooted_collectives"},  # the states of all ranks are gathered on the writer
    "cli": {"doctor", "exec", "horovod", "migrate", "observation", "parity", "processes"},  # its commands
    "comm_hooks": {"devices"},  # hooks run on streams of their own
    "compat": {"copies", "elastic", "horovod", "sync_batch_norm"},  # Horovod's names, also while it is installed
    "doctor": {"devices", "exec", "mpi", "processes"},  # --world starts MPI, and shows the NUMA nodes of devices
    "elastic": {"checkpoint", "samplers"},
    "exec": {"compat", "copies", "slurm"},  # the option --compat, the form of lists of cores
    "horovod": {"copies", "mpi"},  # on the transport mpi, ranks meet and end as MPI's launcher expects it
    "migrate": {"compat", "elastic"},  # the table of Horovod's names, and where dualdist has them
    # Names of weights, scripts of Horovod, places and figures, the form of -np.
    "parity": {"checkpoint", "compat", "observation", "processes"},
    "processes": {"copies", "other_launchers", "slurm"},  # their variables, the form of lists of hosts
    "sharding": {"checkpoint"},
}
"""A folder or file outside of the core -> the others of them that it imports, or names in a string."""

WITHOUT_TORCH = set("core core.launch core.meeting processes core.checks core.process core.types errors".split())

BACKENDS_AND_TRANSPORTS = {"torch", "horovod", "local", "nccl", "xccl", "gloo", "mpi"}
LAUNCHERS = {"python", "init", "env", "spawn"} | {row.name for row in launchers.LAUNCHERS}


def modules_of(package: Path) -> dict[str, Path]:
    """Return the modules of `package` by their names inside it, such as 'backends.base' and 'backends'."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)
        found[name] = path
    return found


MODULES = modules_of(PACKAGE)


@functools.cache
def parsed(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports_of(name: str, modules: dict[str, Path]) -> tuple[set[str], set[str]]:
    """Return the modules of the package that module `name` imports, and the absolute names of all others."""
    inside: set[str] = set()
    outside: set[str] = set()
    path = modules[name]
    package = name.split(".") if path.name == "__init__.py" and name != "__init__" else name.split(".")[:-1]
    for node in parsed(path):
        if isinstance(node, ast.Import):
            outside |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            outside.add(node.module or "")
        elif isinstance(node, ast.ImportFrom):
            origin = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
            for alias in node.names:
                target = ".".join([*origin, alias.name])
                inside.add(target if target in modules else ".".join(origin) or "__init__")
    return inside | (named_in_strings(path, modules) - {name} if name != "__init__" else set()), outside


def named_in_strings(path: Path, modules: dict[str, Path]) -> set[str]:
    """Return the modules of the package that strings name, as dualdist.x.y or dualdist.x.y:z. Names of calls do not."""
    nodes = parsed(path)
    of_calls = {id(node.value) for node in nodes if isinstance(node, ast.keyword) and node.arg == "name"}
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in of_calls]
    found = [re.fullmatch(r"dualdist\.([\w.]+)(:\w+)?", text) for text in texts if isinstance(text, str)]
    return {match[1] for match in found if match is not None and match[1] in modules}


def points_of(path: Path) -> Iterator[str]:
    """Yield the extension points that a module asks for, * for what follows from a variable."""
    for node in parsed(path):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("needed", "extension"):
            point = node.args[0]
            parts = point.values if isinstance(point, ast.JoinedStr) else [point]
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts)


def room_of(name: str) -> str:
    """Return the room of a module: its folder below core, or its folder or file beside core."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "core" else parts[0]


def is_core(name: str) -> bool:
    return name == "errors" or name.split(".")[0] == "core"


def height(name: str) -> int:
    return next(len(CORE) - number for number, rooms in enumerate(CORE) if room_of(name) in rooms)


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the modules that can reach themselves, those of one cycle together (each cycle once)."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        waiting = list(graph[start])
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += graph.get(name, ())
        reached[start] = seen
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in graph
        if name in reached[name]
    }
    return sorted(map(list, groups))


def compared_names(path: Path) -> Iterator[str]:
    """Yield the names of backends, transports and launchers with which a module compares, as 'line: name'."""
    for node in parsed(path):
        operands: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            operands = [node.value]
        for operand in operands:
            parts = operand.elts if isinstance(operand, ast.Tuple | ast.List | ast.Set) else [operand]
            for part in parts:
                if isinstance(part, ast.Constant) and part.value in BACKENDS_AND_TRANSPORTS | LAUNCHERS:
                    yield f"{node.lineno if isinstance(node, ast.expr) else part.lineno}: {part.value}"


def starts(names: set[str], package: str) -> bool:
    return any(name == package or name.startswith(package + ".") for name in names)


def test_a_module_imports_from_its_room_and_those_below() -> None:
    between_others: dict[str, set[str]] = {}
    for name in MODULES:
        inside, outside = imports_of(name, MODULES)
        room = room_of(name)
        for other in inside - {"core", "__init__"}:
            if is_core(name):
                assert is_core(other) and height(name) >= height(other), f"{name} imports {other}"
            elif not is_core(other) and room_of(other) != room:
                between_others.setdefault(room, set()).add(room_of(other))
        if room not in ("core.backends", "devices", "horovod", "mpi", "sharding", "exec", "torch_ddp", "built"):
            assert not starts(outside, "horovod") and not starts(outside, "torch.distributed"), name
        if room in WITHOUT_TORCH:
            assert not starts(outside, "torch"), name
        if room == "elastic":
            assert {other for other in inside if starts({other}, "checkpoint")} <= {"checkpoint.for_elastic"}
    assert between_others == BETWEEN_OTHERS


def test_a_kind_of_calls_is_defined_where_they_are_made() -> None:
    for name, path in MODULES.items():
        nodes = [node for node in parsed(path) if isinstance(node, ast.Name)]
        read = {node.id for node in nodes if isinstance(node.ctx, ast.Load)}
        rows = re.findall(r"^(\w+) = Kind\(", path.read_text(), re.MULTILINE)
        assert read.issuperset(rows), name


def test_the_core_names_no_part_beside_it_but_asks_at_points() -> None:
    points = set(re.findall(r'^        "(\w+)": "dualdist\.', MODULES["__init__"].read_text(), re.MULTILINE))
    asked = {point for name in MODULES if name != "core" for point in points_of(MODULES[name])}
    assert asked - {"*_backend"} == {point for point in points if not point.endswith("_backend")}
    loaders = [name for name in MODULES if "import_module(f" in MODULES[name].read_text()]
    assert loaders == ["__init__"], "name the whole module: then the checks see it"
    own = {"stall_warn_seconds", "stall_timeout_seconds", "start_timeout_seconds", "env"}
    assert {field.name for field in dataclasses.fields(Settings)} == own, "each part reads its own settings"


def test_no_module_imports_itself_through_others() -> None:
    assert not cycles({name: imports_of(name, MODULES)[0] for name in MODULES})


def test_only_backends_and_launch_compare_with_names_of_backends_and_launchers() -> None:
    """In compat, "horovod" is a module. Backends compare with no names of launchers."""
    for name, path in MODULES.items():
        room, found = room_of(name), list(compared_names(path))
        if room in ("core.backends", "horovod"):
            found = [text for text in found if text.split(": ")[1] in LAUNCHERS]
        assert not found or room in ("core.launch", "compat"), f"{name}: {found}"


def test_the_checks_find_what_they_look_for(tmp_path: Path) -> None:
    for name, text in {
        "core/launch/detect.py": "from ..collectives.reduce import scale_\n",
        "core/collectives/reduce.py": "from .gather import allgather\nimport torch.distributed as dist\n",
        "core/collectives/gather.py": "def later():\n    from .reduce import scale_\n",
        "core/collectives/__init__.py": "",
        "core/world/context.py": "if launcher != 'python' or backend in ('torch', 'x'):\n    pass\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    modules = modules_of(tmp_path)
    assert imports_of("core.launch.detect", modules)[0] == {"core.collectives.reduce"}
    assert height("core.collectives.reduce") > height("core.launch.detect")
    assert starts(imports_of("core.collectives.reduce", modules)[1], "torch.distributed")
    graph = {name: imports_of(name, modules)[0] for name in modules}
    assert cycles(graph) == [["core.collectives.gather", "core.collectives.reduce"]]
    assert list(compared_names(modules["core.world.context"])) == ["1: python", "1: torch"]

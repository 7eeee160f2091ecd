"""Say what a script of Horovod, of torch's DDP or of mpi4py with DDP needs to run with dualdist. Nothing is run.

    dualdist migrate train.py              # line by line
    dualdist migrate --diff train.py       # the changes that can be made mechanically, as a unified diff
    dualdist migrate --write train.py      # make them in place; comments and formatting stay

Give all files of a job that start or use its processes: torch's DDP is replaced only where every init_process_group is.
If the script needs what a launcher knows (RANK, --local_rank), or starts its own processes, hvd.init() is the first
call, and a rank or a size that the script computes is compared with the launcher's.
A notebook (.ipynb) is read as one script of its code cells; all but these stays.

  change      can be made mechanically: --write makes it
  by hand     must be changed or decided by you
  not needed  may be removed
  differs     behaves differently afterwards

The exit code is 0 if nothing is left to change, 1 if something is (a change that is not written, or one by hand), and 2
if a file cannot be read, parsed or written. A file that cannot be read or parsed leaves all files as they are.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import importlib.util
import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import dualdist

from ..compat import MODULES
from ..core.backends import TRANSPORTS
from .source import HIDDEN, SET_BY_INIT, SOURCE_RULE, VARIABLES, Edit, Finding, Source, lines_of, usable

_COMPAT = "`python -m dualdist.compat` runs the script as it is"
_OF_HOROVOD = {
    "broadcast_optimizer_state": "makes no step; Horovod's makes one with gradients of zero, which shows with Adam and "
    "weight decay",
    "DistributedOptimizer": "returns the given optimizer with its state; Horovod's is a new one without it",
    "SyncBatchNorm": "works on CPUs too; Horovod's works on CUDA only",
    "elastic.run": "survives a dead process under torchrun, which starts all again, and on Horovod under horovodrun",
    "run": "starts no MPI and no elastic job",
}
"""Function of Horovod -> what is different in dualdist's."""
_ADASUM = "Adasum runs between all ranks, not only between hosts: leave local_size() out of the learning rate"
_SYNCHRONIZE = "gradients are complete after the last of backward_passes_per_step passes: remove the call"
_PRIVATE = ("_parameter_names", "_handles", "_requires_update", "_allreduce_delay")
"""Attributes of Horovod's optimizers that scripts read."""
_NOT_PUBLIC = ("horovod.common.basics", "horovod.common.util", "horovod.runner.elastic.worker")
"""Modules of Horovod whose functions have no public counterpart with the same parameters."""

_OF_TORCH = {
    "init_process_group": ("init", "joins the world, under every launcher, and opens torch's default group"),
    "destroy_process_group": ("shutdown", "leaves the world"),
    "DistributedDataParallel": ("DistributedDataParallel", "has the arguments of torch's"),
    "DistributedSampler": ("DistributedSampler", "gives the same indices, and can resume in mid-epoch"),
    "convert_sync_batchnorm": ("SyncBatchNorm.convert_sync_batchnorm", "works on CPUs and over Horovod, too"),
}
"""torch's function -> the name of dualdist's, and what it does."""
_OF_DDP = (
    "torch.save(model.state_dict(), ...) writes names without `module.`; load_state_dict accepts both",
    "backward() decides whether gradients are averaged, not forward(); a forward in evaluation copies no buffers",
)
_EXEC = (
    "not changed: {}. Write hvd.init(), which gets rank and size from the launcher, or start this file as it is by "
    "`dualdist exec`"
)
_MPI = "COMM_WORLD has size 1 under launchers without MPI: use hvd.rank(), hvd.broadcast_object() etc. after hvd.init()"
_BY_HAND = {"apex.parallel.DistributedDataParallel": "use hvd.DistributedDataParallel()", "mpi4py.MPI.COMM_WORLD": _MPI}
"""Name of another package -> what takes its place."""
_ALONE = (
    "hvd.init() would leave each of these processes alone: call the function once, with hvd.local_rank(), and start "
    "the script by a launcher; or use hvd.spawn(function, args, nprocs=)"
)
_OPTION = "only torch.distributed.launch passes --local_rank"
_COUNT = "as many processes as the launcher has started on this host"
_INIT = ("backend", "init_method", "timeout", "world_size", "rank")
_SPAWN = ("fn", "args", "nprocs", "join", "daemon", "start_method")
"""The parameters of torch's init_process_group, and of its spawn."""

_TRANSPORTS = [name for name, transport in TRANSPORTS.items() if not transport.needs_mpi]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dualdist migrate`."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="scripts and notebooks of one job")
    parser.add_argument("--diff", action="store_true", help="show the changes as a unified diff")
    parser.add_argument("--write", action="store_true", help="make the changes in place")


def execute(args: argparse.Namespace) -> int:
    """Print the findings or the diff, write with --write, and return the exit code.

    Raises ConfigurationError if a file cannot be used.
    """
    sources = [Source(path) for path in dict.fromkeys(args.files)]
    job = Job(sources)
    reports = {source: job.findings(source) for source in sources}
    texts = {source: _changed(source, found) for source, found in reports.items()}
    for source, found in reports.items():
        if args.diff:
            _print_diff(source, texts[source])
        else:
            lines = [f"{source.place(finding.line)}: {finding.kind}: {finding.text}" for finding in found]
            print("\n".join(lines or [f"{source.path}: nothing to change"]))
    for source in sources if args.write else ():
        if texts[source] != source.raw:
            with usable(source.path, "writable"):  # in place, so that mode and links stay
                Path(source.path).write_bytes(texts[source].encode(source.encoding))
    left = {"by hand"} if args.write else {"by hand", "change"}
    return int(any(finding.kind in left for finding in itertools.chain(*reports.values())))


def _changed(source: Source, findings: Sequence[Finding]) -> str:
    text = source.text
    edits = dict.fromkeys(edit for finding in findings for edit in finding.edits)
    # Those of one place keep their order.
    for start, end, new in sorted(edits, key=lambda edit: edit[:2])[::-1]:
        text = text[:start] + new + text[end:]
    with usable(source.path, SOURCE_RULE):
        ast.parse(text, source.path)
    return source.notebook.changed(text) if source.notebook else text


def _print_diff(source: Source, text: str) -> None:
    # In the file's own encoding, so that `patch` can use it. As GNU diff, which ends a name with spaces by a tab.
    encoding = source.encoding.removesuffix("-sig")
    before, after = ([line.encode(encoding) for line in lines_of(whole)] for whole in (source.raw, text))
    names = [os.fsencode(f"{side}/{source.path}" + "\t" * (" " in source.path)) for side in "ab"]
    lines = difflib.diff_bytes(difflib.unified_diff, before, after, names[0], names[1])
    sys.stdout.flush()
    for line in lines:
        sys.stdout.buffer.write(line if line[-1:] in b"\r\n" else line + b"\n\\ No newline at end of file\n")
    sys.stdout.buffer.flush()


# Horovod's names in dualdist


def _home(module: str, name: str = "") -> str:
    """Return the module of dualdist that has `name` of Horovod's `module`; "" if none has."""
    if module not in MODULES or module in _NOT_PUBLIC:
        return ""
    homes = ["dualdist.elastic", "dualdist"] if "elastic" in module else ["dualdist"]
    homes = ["dualdist.compat.data"] if module.startswith("horovod.data") else homes
    return next((home for home in homes if not name or name in _public(home)), "")


@functools.cache
def _public(module: str) -> tuple[str, ...]:
    """Return `__all__` of a module of dualdist, read from its source, because importing it would import torch."""
    if module == "dualdist":
        return dualdist.__all__
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    (names,) = re.findall(r"^__all__ = (\([^)]*\))", Path(spec.origin).read_text(), re.MULTILINE)
    return tuple(ast.literal_eval(names))


def _horovod(source: Source) -> Iterator[Finding]:
    """Yield what there is to say about imports of Horovod, and about the names that are imported."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from (_import(source, node, alias) for alias in node.names if _is_horovod(alias.name))
        elif isinstance(node, ast.ImportFrom) and not node.level and _is_horovod(node.module or ""):
            yield _import_from(source, node, node.module or "")
        elif isinstance(node, ast.Constant) and re.fullmatch(r"horovod(\.\w+)+", str(node.value)):
            yield Finding(node.lineno, "by hand", f"{node.value!r}: if it is imported, import dualdist")
    for number, line in enumerate(source.lines if source.notebook else (), 1):
        if HIDDEN in line and re.search(r"\bhorovod\.|import\s+horovod", line):
            yield Finding(number, "by hand", "not read, because the line or its cell is not Python")
    used = {node: path for node in source.nodes if _is_horovod(path := source.dotted(node))}
    made = [source.parents[call] for call in source.calls("horovod", "DistributedOptimizer")]
    optimizers = {ast.unparse(target) for node in made for target in getattr(node, "targets", ())}
    for node, path in used.items():
        module = path
        while module not in MODULES:
            module = module.rpartition(".")[0]
        name = path[len(module) + 1 :]
        if "." in name or (not name and isinstance(source.parents[node], ast.Attribute)):
            continue  # more or less than the name of a function or class
        yield from _use(source, node, module, name)
        rule = f"elastic.{name}" if "elastic" in module else name
        if rule in _OF_HOROVOD:
            yield Finding(node.lineno, "differs", f"{rule}() {_OF_HOROVOD[rule]}")
        elif name == "nccl_built" and any(other.endswith(".Adasum") for other in used.values()):
            yield Finding(node.lineno, "by hand", _ADASUM)
    for node in source.nodes if optimizers else ():
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in optimizers:
            if node.attr in ("synchronize", "skip_synchronize"):
                yield Finding(node.lineno, "not needed", f"{node.attr}(): {_SYNCHRONIZE}")
            elif node.attr in _PRIVATE:
                yield Finding(node.lineno, "by hand", f"dualdist's optimizers have no {node.attr}; {_COMPAT}")


def _is_horovod(path: str) -> bool:
    return f"{path}.".startswith("horovod.")


def _import(source: Source, node: ast.Import, alias: ast.alias) -> Finding:
    home, start = _home(alias.name), source.span(alias)[0]
    if not home:
        return Finding(node.lineno, "by hand", f"dualdist has no public module in place of {alias.name}")
    if not source.text.startswith(alias.name, start) or not (alias.asname or source.meaning("horovod")):
        text = f"import {home}; the name `horovod` has another meaning in this file, too"
        return Finding(node.lineno, "by hand", text)
    text = f"import {home} instead of {alias.name}"
    if isinstance(source.parents[node], ast.Try):
        text += ", which fails only where dualdist is not installed"
    return Finding(node.lineno, "change", text, ((start, start + len(alias.name), home),))


def _import_from(source: Source, node: ast.ImportFrom, module: str) -> Finding:
    names, (start, end) = [alias.name for alias in node.names], source.span(node)
    if len(names) == 1 and _home(f"{module}.{names[0]}") == "dualdist":  # `from horovod import torch as hvd`
        text = f"import dualdist as {node.names[0].asname or names[0]}"
        return Finding(node.lineno, "change", text, ((start, end, text),))
    homes = [_home(module, name) for name in names]
    found = re.compile(rf"from[ \t]+({re.escape(module)})(?=\s)").match(source.text, start)
    if "" in homes or len(set(homes)) > 1 or found is None:
        each = zip(homes, names, strict=True)
        there = [f"`from {home} import {name}`" if home else f"no {module}.{name}" for home, name in each]
        text = "; ".join(there) if names != ["*"] else "functions of the same names: replace * by those in use"
        return Finding(node.lineno, "by hand", f"dualdist has {text}. {_COMPAT}")
    text = f"import from {homes[0]} instead of {module}"
    return Finding(node.lineno, "change", text, ((*found.span(1), homes[0]),))


def _use(source: Source, node: Any, module: str, name: str) -> Iterator[Finding]:
    """Yield the change of a use of Horovod's MODULE.NAME, or of the module, through a module that is imported."""
    root = next(part for part in ast.walk(node) if isinstance(part, ast.Name))
    imported = source.meaning(root.id)
    is_renamed = imported == root.id  # `import horovod.torch`, which becomes `import dualdist`
    if imported not in MODULES or not (name or is_renamed or node is not root):
        return
    start, base = ("dualdist", "dualdist") if is_renamed else (root.id, _home(imported))
    home, written = _home(module, name), ast.unparse(node)
    if not base or not home or not f"{home}.".startswith(f"{base}."):
        yield Finding(node.lineno, "by hand", f"dualdist has no public {written}; {_COMPAT}")
    elif (new := ".".join(filter(None, [start + home[len(base) :], name]))) != written:
        yield source.change(node, new, f"write {new} instead of {written}")


# torch.distributed, mpi4py, and the variables of launchers


def _starts_processes(source: Source, function: Any) -> bool:
    """Return whether this may be a function of torch or multiprocessing that starts processes without a launcher."""
    name = str(getattr(function, "attr", "") or getattr(function, "id", ""))
    root = function
    while isinstance(root, ast.Attribute) and isinstance(root.value, ast.Call):
        root = root.value.func  # of get_context("spawn").Process
    path = source.dotted(root)
    is_known = re.match(r"(torch|multiprocessing)\.", path) or (not path and name == "Process")  # of a context
    return bool(is_known and re.fullmatch("spawn|start_processes|Process", name))


class Job:
    """What the files of a job say together.

    starts: a call that starts processes -> what takes its place; "" if that is not certain. arguments: a call of
    init_process_group -> those of hvd.init(); None if they are not certain. is_first: whether hvd.init() must be the
    first call, not in place of init_process_group. is_joined: whether the world is joined before any function runs.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.has_horovod = any(_is_horovod(name) for source in sources for name in source.packages)
        self.uses_hvd = self.has_horovod or any("dualdist" in source.packages for source in sources)
        calls = [(source, node) for source in sources for node in source.nodes if isinstance(node, ast.Call)]
        starts = [(source, node) for source, node in calls if _starts_processes(source, node.func)]
        self.starts = {node: _called_once(source, node) for source, node in starts}
        inits = [(source, call) for source in sources for call in source.calls("torch", "init_process_group")]
        self.arguments = {call: _init_arguments(source, call) for source, call in inits}
        self._in_arguments = {node for call in self.arguments for node in ast.walk(call)}
        self._after = {source.function(call): call.lineno for source, call in inits}
        computes = any(arguments and arguments[1] for arguments in self.arguments.values())
        self.is_first = computes or any(self.starts.values()) or any(map(self._needs_launcher, sources))
        self.started = _started(sources) if self.is_first else []
        is_certain = bool(inits) and None not in self.arguments.values() and "" not in self.starts.values()
        self.replaces = is_certain and bool(self.started or not self.is_first)
        joins = [source.function(call) is source.tree for source in sources for call in source.joins]
        self.is_joined = any(joins) or (self.replaces and self.is_first)

    def _needs_launcher(self, source: Source) -> bool:
        """Return whether a file reads what a launcher has set, and perhaps before init_process_group."""
        reads = [node for node, name, is_set in source.accesses if VARIABLES[name][0] and not is_set]
        early = [node for node in reads if node.lineno <= self._after.get(source.function(node), node.lineno)]
        return bool({*early, *source.options} - self._in_arguments)

    def findings(self, source: Source) -> list[Finding]:
        """Return what there is to say about one of the files, in the order of its lines."""
        found = [*_horovod(source)]
        if not self.uses_hvd and not self.arguments:
            text = "no file calls init_process_group(): give all files of the job"
            for name in ("DistributedDataParallel", "DistributedSampler"):
                found += [Finding(call.lineno, "by hand", text) for call in source.calls("torch", name)]
        else:
            found += [*self._replacements(source), *self._torch(source), *self._variables(source)]
        return sorted(dict.fromkeys(found), key=lambda finding: finding.line)

    def _replacements(self, source: Source) -> Iterator[Finding]:
        """Yield the changes from torch's functions to dualdist's."""
        module = source.module
        edited: set[Any] = set()
        for torchs, (name, text) in _OF_TORCH.items():
            if not self.replaces and (self.arguments or torchs != "DistributedDataParallel"):
                continue
            for call in source.calls("torch", torchs):
                count = len([*call.args, *call.keywords])
                if count > {"shutdown": 0, "SyncBatchNorm.convert_sync_batchnorm": 1}.get(name, count):
                    continue  # of a group
                new, node = f"{module}.{name}", call.func
                if arguments := self.arguments.get(call):
                    kept, numbers, lost = arguments
                    kept, lost = ("", _listed(lost, kept)) if self.is_first else (kept, lost)
                    new, node = f"{new}({_listed(kept, numbers)})", call
                    if lost:
                        advice = "hvd.init() chooses the transport, and the first one takes transport= and timeout="
                        yield Finding(call.lineno, "differs", f"{lost} goes: {advice}")
                yield source.change(node, new, f"{module}.{name}() {text}")
                edited |= set(ast.walk(node))
                if name == "DistributedDataParallel":
                    yield from (Finding(call.lineno, "differs", difference) for difference in _OF_DDP)
                    for key in call.keywords:
                        if key.arg in ("find_unused_parameters", "static_graph"):
                            yield Finding(key.lineno, "not needed", f"{key.arg} has no effect")
        for node in source.nodes if self.replaces else ():
            if self.starts.get(node):
                text = "the launcher starts the processes, as in `dualdist run -np 2 python train.py`"
                yield source.change(node, self.starts[node], text)
                edited |= {*ast.walk(node.func)}
                yield from _counts(source, node)
            elif node in source.options:
                yield _local_rank_default(source, node)
        yield from self._first_lines(source, bool(edited))
        loads = {node.id for node in source.nodes if isinstance(node, ast.Name) and node not in edited}
        for name in sorted({node.id for node in edited if isinstance(node, ast.Name)} - loads):
            for node, meaning in source.bindings[name] if source.meaning(name).startswith("torch") else ():
                yield Finding(node.lineno, "not needed", f"the import of {meaning}: nothing else uses it")

    def _first_lines(self, source: Source, is_edited: bool) -> Iterator[Finding]:
        """Yield the imports that the changes need, and the first call of a file that is started."""
        is_started = self.replaces and source in self.started
        body = [node for node in source.tree.body if not re.match(r"from __future__|['\"]", ast.unparse(node))]
        torch = [node for node in body if re.match(r"(import|from) torch\b", ast.unparse(node))]
        if is_started or (is_edited and not source.imports_dualdist):
            text = "import dualdist as hvd" if source.module == "hvd" else "import dualdist"
            yield _inserted(source, [*([] if is_started else torch), *body][0], text, f"add `{text}`")
        if self.replaces and source.options and source.meaning("os") != "os":
            yield _inserted(source, body[0], "import os", "add `import os`")
        if is_started:
            text = f"{source.module}.init()"
            # Processes of data loaders may import this file, too.
            line = f'if __name__ == "__main__":\n    {text}' if _guard(source) else text
            why = f"{text} is the first call: what follows needs what the launcher knows"
            yield _inserted(source, body[0], line, why)

    def _torch(self, source: Source) -> Iterator[Finding]:
        """Yield what there is to say about processes and groups, except for the changes."""
        left: dict[Any, str] = {}
        if not self.replaces:
            why = "what starts it is to be changed by hand, or not among the files"
            if None in self.arguments.values():
                why = "its arguments, here or in another file, are not certain"
            left |= dict.fromkeys(source.options if self.uses_hvd else (), f"{_OPTION}: use hvd.local_rank()")
            left |= dict.fromkeys(self.arguments, _EXEC.format(why))
            left |= dict.fromkeys(self.starts if self.arguments else (), _ALONE)
        for node in source.nodes:
            path = source.dotted(node)
            if path == "torch.distributed.is_initialized" and self.has_horovod:
                text = "is_initialized() is True after hvd.init(); with Horovod it is not"
                yield Finding(node.lineno, "differs", text)
            elif advice := left.get(node) or _BY_HAND.get(path):
                yield Finding(node.lineno, "by hand", advice)

    def _variables(self, source: Source) -> Iterator[Finding]:
        """Yield what there is to say about the environment variables that launchers set."""
        has_init = self.uses_hvd or self.replaces
        joins = [*source.joins, *(source.calls("torch", "init_process_group") if self.replaces else [])]
        joins.sort(key=lambda call: -call.lineno)
        after = {source.function(call): call.lineno for call in joins}
        if self.is_joined:
            after = {source.tree: after.get(source.tree, 0)}
        is_torchs_too = any(name in SET_BY_INIT for _, name, _ in source.accesses)
        for node, name, is_set in source.accesses:
            if self.replaces and node in self._in_arguments:
                continue
            (number, launcher), is_torchs = VARIABLES[name], name in SET_BY_INIT
            whole = source.parents[source.parents[node]]
            is_int = isinstance(whole, ast.Call) and ast.unparse(whole.func) == "int" and len(whole.args) == 1
            is_tested = isinstance(source.parents[node], ast.Compare) and is_torchs_too
            if is_set and is_torchs:
                text = f"setting {name}: hvd.init() sets it, and `dualdist exec` before the script starts"
                edits = _removal(source, node, joins) if self.replaces else ()
                yield Finding(node.lineno, "change" if edits else "not needed", text, edits)
            elif is_set:
                text = f"{name} is set here: {launcher} sets it, and dualdist reads it"
                yield Finding(node.lineno, "by hand", text)
            elif self.replaces and self.is_first and (is_torchs or is_tested):
                continue
            elif self.replaces and self.is_first and number and not self.starts and is_int:
                text = f"{source.module}.{number}()"
                yield source.change(whole, text, f"{text} instead of {name}, which only {launcher} sets")
            elif has_init and not is_tested and (not is_torchs or node.lineno <= after.get(source.function(node), 0)):
                uses = [f"use hvd.{number}()"] * bool(number)
                uses += ["read it after hvd.init(), which sets it"] * is_torchs
                text = f"{name} is a variable of {launcher}: {' or '.join(uses)}"
                yield Finding(node.lineno, "by hand", text)
            elif not has_init and not is_torchs:
                text = f"reading {name}: `dualdist exec` sets torchrun's variables under every launcher"
                yield Finding(node.lineno, "not needed", text)


def _given(call: Any, names: Sequence[str]) -> dict[str | None, Any]:
    """Return the arguments of a call by the names of the parameters; of `**` by None."""
    return dict(zip(names, call.args, strict=False)) | {key.arg: key.value for key in call.keywords}


def _is_plain(source: Source, call: Any, given: Mapping[str | None, Any]) -> bool:
    """Return whether a call is a statement that can be replaced: no comment is in it, and no `*` or `**`."""
    text, count = source.segment(call), len([*call.args, *call.keywords])
    is_unpacked = None in given or any(isinstance(value, ast.Starred) for value in given.values())
    is_statement = isinstance(source.parents[call], ast.Expr) and not ("#" in text and "\n" in text)
    return is_statement and not is_unpacked and len(given) == count


def _called_once(source: Source, call: Any) -> str:
    """Return the call that takes the place of mp.spawn() where a launcher starts the processes; "" if unsure."""
    given, path = _given(call, _SPAWN), source.dotted(call.func)
    is_torchs = path.startswith("torch.") and given.keys() <= set(_SPAWN)
    waits = getattr(given.get("join"), "value", True) is True
    if not (is_torchs and waits and "fn" in given and _is_plain(source, call, given)):
        return ""
    args, function = given.get("args"), source.segment(given["fn"])
    items = [f"*{source.segment(args)}"] if args else []
    if isinstance(args, ast.Tuple | ast.List):
        items = [source.segment(item) for item in args.elts]
    function = function if isinstance(given["fn"], ast.Name | ast.Attribute) else f"({function})"
    return f"{function}({_listed(f'{source.module}.local_rank()', *items)})"


def _counts(source: Source, call: Any) -> Iterator[Finding]:
    """Yield the changes of what a variable or an attribute gets that is the number of processes to start."""
    count = _given(call, _SPAWN).get("nprocs", call)
    for node in source.nodes:
        if isinstance(node, ast.Assign) and [*map(ast.unparse, node.targets)] == [ast.unparse(count)]:
            if isinstance(count, ast.Attribute) or source.function(node) is source.function(call):
                yield source.change(node.value, f"{source.module}.local_size()", _COUNT)


def _local_rank_default(source: Source, call: Any) -> Finding:
    keys = {key.arg: key for key in call.keywords}
    value = source.segment(keys["default"].value) if "default" in keys else "0"
    start, end = source.span(keys.get("default") or keys.get("required") or [*call.args, *call.keywords][-1])
    new = f'default=int(os.environ.get("LOCAL_RANK", {value}))'
    edit = (start, end, new) if {"default", "required"} & keys.keys() else (end, end, f", {new}")
    return Finding(call.lineno, "change", f"{_OPTION}: LOCAL_RANK is its default", (edit,))


def _listed(*arguments: str) -> str:
    return ", ".join(filter(None, arguments))


def _init_arguments(source: Source, call: Any) -> tuple[str, str, str] | None:
    """Return the arguments of hvd.init() in place of those of init_process_group(); None if that is not certain.

    After these: a rank and a size that the script computes, because a second hvd.init() compares them with those of
    the launcher, and what is lost.
    """
    given = _given(call, _INIT)
    if not _is_plain(source, call, given) or not given.keys() <= {*_INIT, "device_id", "group_name"}:
        return None
    numbers = {name: given[name] for name in ("rank", "world_size") if name in given}
    known = {name: _is_number(source, node, name.removeprefix("world_")) for name, node in numbers.items()}
    computed = [f"{name}={source.segment(node)}" for name, node in numbers.items() if not known[name]]
    # Given rank and size, the method is only where the processes meet.
    methods = source.values(given["init_method"]) if "init_method" in given else []
    is_found = len(numbers) == 2 or all(getattr(method, "value", 0) == "env://" for method in methods)
    block: Any = call
    while source.parents[block] is not source.tree:
        block = source.parents[block]
    # After the first hvd.init(), the call would be passed over, and with it the comparison.
    if not is_found or (computed and "is_initialized" in source.segment(block)):
        return None
    timeout = [f"timeout={source.segment(node)}" for name, node in given.items() if name == "timeout"]
    backend = _transport(source, given.get("backend"))
    lost = source.segment(given["backend"]) if "backend" in given and not backend else ""
    return _listed(backend, *timeout), _listed(*computed), lost


def _transport(source: Source, backend: Any) -> str:
    """Return the argument of hvd.init() for a backend of torch; "" if it is absent, or not among the transports."""
    member = re.fullmatch(r"torch\.distributed\.(?:\w+\.)?Backend\.(\w+)", source.dotted(backend))
    names = [member[1].lower()] if member else [getattr(value, "value", 0) for value in source.values(backend)]
    if not set(names) <= set(_TRANSPORTS):
        return ""
    return f'transport="{names[0]}"' if member else f"transport={source.segment(backend)}"


def _is_number(source: Source, node: Any, number: str) -> bool:
    """Return whether an expression surely is this number of the process (rank, size), as the launcher reports it."""
    for value in source.values(node):
        text = ast.unparse(value)
        read = re.fullmatch(r"(?:int\()?os\.(?:environ|environ.get|getenv)[\[(]'(\w+)'(?:, '?\d'?)?[])]\)?", text)
        of_mpi = re.fullmatch(rf"(.+)\.(?:Get_{number}\(\)|{number})", text)
        comms = source.values(ast.parse(of_mpi[1], mode="eval").body) if of_mpi else []
        is_comm = bool(comms) and all(source.dotted(comm) == "mpi4py.MPI.COMM_WORLD" for comm in comms)
        if not is_comm and (read is None or VARIABLES.get(read[1], ("",))[0] != number):
            return False
    return True


def _removal(source: Source, node: Any, inits: Sequence[Any]) -> tuple[Edit, ...]:
    """Return the edit that removes the statement which sets a variable, if an init follows in the same block."""
    access = source.parents[node]
    statement = source.parents[access]
    blocks = [part for part in vars(source.parents[statement]).values() if isinstance(part, list)]
    follow = [after for block in blocks if statement in block for after in block[block.index(statement) :]]
    first, end = source.span(statement)
    line = source.starts[statement.lineno - 1]
    rest = re.compile(r"[ \t]*(?=#|(\r\n|\r|\n))").match(source.text, end)
    is_alone = not source.text[line:first].strip() and "#" not in source.text[first:end]
    is_only_this = getattr(statement, "targets", [access]) == [access] and is_alone
    if not rest or not is_only_this or not any(source.parents[call] in follow for call in inits):
        return ()
    return ((line, rest.end() + len(rest[1]), "") if rest[1] else (first, rest.end(), ""),)


def _guard(source: Source) -> Any:
    """Return the block of a file that runs only if the file is started; None if there is none."""
    blocks = [node for node in source.tree.body if isinstance(node, ast.If)]
    return next((block for block in blocks if "__name__" in ast.unparse(block.test)), None)


def _started(sources: Sequence[Source]) -> list[Source]:
    """Return the files that are started: those with a block for it, else those that run code and are not imported."""
    used = {part for source in sources for part in source.imported}
    unused = [source for source in sources if Path(source.path).stem not in used]
    runs = ast.Expr | ast.For | ast.While | ast.With
    running = [source for source in unused if any(isinstance(node, runs) for node in source.tree.body[1:])]
    return [source for source in sources if _guard(source)] or running


def _inserted(source: Source, node: Any, text: str, why: str) -> Finding:
    line = min(each.lineno for each in [node, *getattr(node, "decorator_list", ())])
    start, ending = source.starts[line - 1], re.search(r"[\r\n]+\Z", source.lines[line - 1])
    end = ending[0] if ending else "\n"
    return Finding(line, "change", why, ((start, start, text.replace("\n", end) + end),))

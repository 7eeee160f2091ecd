"""Launch detection: which launcher started this process, as which rank, and what the user has set. Imports no torch.

`detect` is a pure function of the environment. One launcher can start another (a Slurm step that runs torchrun), so an
environment may hold the variables of several. The innermost launcher wins: the one that may run inside all others that
report another rank or size. A process without a launcher trains alone only if it carries no mark of one. The table of
launchers is in launchers.py, other_launchers.py adds to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ...errors import ConfigurationError
from .. import extension
from ..checks import configuration, integer, text, wrong
from ..types import NEVER_SECONDS, Launch, Settings, World
from .launchers import DUALDIST_RUN as DUALDIST_RUN
from .launchers import ELASTIC_DIR as ELASTIC_DIR
from .launchers import LAUNCHERS, NUMBERS, OUTERMOST, SITE, Launcher
from .launchers import SPAWN as SPAWN

_wrong = functools.partial(wrong, error=ConfigurationError)
_BY_HAND = ("env", SITE)
"""Launchers whose variables a script or a site can set under another launcher."""


_Found = dict[Launcher, Launch | ConfigurationError]
"""The launchers whose variables are set, with the Launch that they describe, or what is wrong with them."""


def detect(env: Mapping[str, str], mpi_size: Callable[[], int] | None = None) -> Launch:
    """Return this process's place in the world according to `env`. Plain python is a world of one.

    mpi_size: returns the size of MPI's world. Called only where a launcher sets the rank but not the size (PMIx).
    An allocation or a batch script (SLURM_* outside a step) does not count as a launcher.
    Raises ConfigurationError when a launcher's variables are incomplete, are not numbers or contradict each other, when
    two launchers disagree although neither can have started the other, and when a process that has no launcher, or is
    alone under one, carries the mark of another.
    """
    env = without_copies(env)
    if _is_said_to_be_alone(env):
        return _world_of_one("DUALDIST_LAUNCHER=python")
    find_site = extension("site_launcher") if any([name.endswith("_FROM") for name in env]) else None
    site = None if find_site is None else find_site(env)
    known = (*LAUNCHERS, site) if site else LAUNCHERS
    found = _candidates(known, env)
    if not found:
        return _plain_python(env)
    for row, launch in found.items():
        if isinstance(launch, Launch) and not _disagreeing(row, found, env):
            if launch.size == 1 and row in LAUNCHERS and launch.launcher not in OUTERMOST:
                _check_marks(row, env)
            return _located(launch, row, env)
    for row, problem in found.items():
        if isinstance(problem, ConfigurationError):
            if row.asks_mpi and mpi_size and env.get(row.rank) and not _disagreeing(row, found, env):
                return _located(_read(row, env, mpi_size()), row, env)
            raise problem
    raise _conflict(found, env)


def _is_said_to_be_alone(env: Mapping[str, str]) -> bool:
    said = env.get("DUALDIST_LAUNCHER", "")
    if said not in ("", "python", *OUTERMOST):
        fix = "Unset it to let the launcher's variables decide."
        raise _wrong("DUALDIST_LAUNCHER", "'python' where it is set by hand", said, fix)
    return said == "python"


def _candidates(rows: tuple[Launcher, ...], env: Mapping[str, str]) -> _Found:
    """Return the launchers of `rows` that `env` has a marker of, without those whose variables others have set."""
    found: _Found = {}
    for row in rows:
        if _is_marked(row, env):
            try:
                found[row] = _read(row, env)
            except ConfigurationError as error:
                # Its traceback refers to the frames of `init`, and these to the world.
                found[row] = error.with_traceback(None)
    return {row: launch for row, launch in found.items() if not _is_set_by_another(row, found, env)}


def _is_set_by_another(row: Launcher, found: _Found, env: Mapping[str, str]) -> bool:
    """Return whether another launcher has set the variables of `row` beside its own."""
    fields = ["rank", "size"] if row.size else ["rank"]
    own = [env.get(getattr(row, field)) for field in fields]
    for other in [other for other in found if other.name in row.set_too_by]:
        has_namespace = env.get("PMIX_NAMESPACE", "").startswith(other.pmix_namespace)
        theirs = [env.get(getattr(other, field) or "") for field in fields]
        if all(own) and own == theirs and (has_namespace or row.rank != "PMIX_RANK"):
            return True
    return False


def _disagreeing(row: Launcher, found: _Found, env: Mapping[str, str]) -> list[Launcher]:
    """Return the launchers that report other numbers and cannot have started that of `row`."""
    allowed = (row.name, *row.inside)
    return [other for other in found if other.name not in allowed and not _agree(other, row, found, env)]


def _agree(other: Launcher, row: Launcher, found: _Found, env: Mapping[str, str]) -> bool:
    launch, theirs = found[row], found[other]
    if isinstance(launch, ConfigurationError):
        return False
    if isinstance(theirs, Launch):
        return (launch.rank, launch.size) == (theirs.rank, theirs.size)
    # A size that is set by hand completes a rank of PMIx.
    return launch.launcher in _BY_HAND and other.asks_mpi and env.get(other.rank) == str(launch.rank)


def _conflict(found: _Found, env: Mapping[str, str]) -> ConfigurationError:
    first = next(iter(found))
    launches = [launch for row in (first, *_disagreeing(first, found, env)) if isinstance(launch := found[row], Launch)]
    described = [f"{one.describe('rank')} and {one.describe('size')} of {one.launcher}" for one in launches[:2]]
    return ConfigurationError(
        f"Rank and size must be the same from every launcher, but are {', and '.join(described)} instead. "
        "Unset the variables of the launcher that did not start this process."
    )


def _is_marked(row: Launcher, env: Mapping[str, str]) -> bool:
    """Return whether `env` has a marker of the launcher."""
    if row.name == "env":
        # torchrun sets the same variables.
        return bool(env.get("RANK") and env.get("WORLD_SIZE")) and not env.get("TORCHELASTIC_RUN_ID")
    return any(_is_set(env, marker) for marker in row.markers)


def _is_set(env: Mapping[str, str], marker: str) -> bool:
    name, _, value = marker.partition("=")
    return bool(env.get(name)) and value in ("", env[name])


def _read(launcher: Launcher, env: Mapping[str, str], mpi_size: int | None = None) -> Launch:
    """Return what the launcher's variables say. mpi_size: the size of MPI's world, for want of a variable."""
    names = {field: getattr(launcher, field) for field in NUMBERS}
    values = {field: _number(env, name, launcher) for field, name in names.items()}
    rank, size = values["rank"], values["size"]
    if mpi_size is not None and size is None:
        size, names["size"] = mpi_size, "MPI"
    if rank is None or size is None or (mpi_size is not None and size < 2):
        raise _incomplete(launcher, env, mpi_size)
    if size < 1:
        raise _wrong(names["size"], "at least 1", size, "Set it to the number of processes.")
    if not 0 <= rank < size:
        rule = f"at least 0 and less than {names['size']}={size}"
        raise _wrong(names["rank"], rule, rank, "Give every process its own rank.")
    local_rank, local_size = values["local_rank"], values["local_size"]
    if local_size is None and _number(env, launcher.node_count, launcher) == 1:
        local_size, names["local_size"] = size, names["size"]
    # Slurm's list of sizes may be that of another part of a heterogeneous job.
    bound = local_size if launcher.node is None else None
    if bound is not None and not 1 <= bound <= size:
        rule = f"at least 1 and at most {names['size']}={size}"
        raise _wrong(names["local_size"], rule, bound, _who_sets_it(launcher))
    if local_rank is not None and bound is not None and local_rank >= bound:
        rule = f"less than {names['local_size']}={local_size}"
        raise _wrong(names["local_rank"], rule, local_rank, _who_sets_it(launcher))
    return Launch(
        launcher=launcher.name,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        sources=MappingProxyType({field: name for field, name in names.items() if name}),
        elastic=any(_is_set(env, marker) for marker in launcher.elastic),
        restarts=any(is_on(env, name) for name in launcher.restarts),
        starts_mpi=any(env.get(name) for name in launcher.starts_mpi),
        starts_horovod=launcher.starts_horovod,
    )


def _incomplete(launcher: Launcher, env: Mapping[str, str], mpi_size: int | None) -> ConfigurationError:
    present = next(name for name in launcher.markers if env.get(name.partition("=")[0]))
    if launcher.asks_mpi and env.get(launcher.rank):
        reported = "MPI was not asked" if mpi_size is None else f"MPI reports {mpi_size or 'nothing'}"
        return ConfigurationError(
            f"The world size must be known beside {launcher.rank}={env[launcher.rank]}, but {launcher.name} sets no "
            f"variable with it and {reported}. Install an mpi4py that this launcher can start (`dualdist exec` needs "
            "PMIx instead), set DUALDIST_RANK_FROM and DUALDIST_SIZE_FROM to the names of variables with rank "
            "and size, or set DUALDIST_LAUNCHER=python to run a single process."
        )
    missing = launcher.size if env.get(launcher.rank) else launcher.rank
    return ConfigurationError(
        f"`{missing}` must be set beside {present}, but is absent. "
        f"Set both for every process, or unset {present} to run a single process."
    )


def _located(launch: Launch, launcher: Launcher, env: Mapping[str, str]) -> Launch:
    """Return `launch` with the address where its processes meet, if the environment names it."""
    if env.get("MASTER_ADDR") and (port := env.get("MASTER_PORT")):
        if not port.isdecimal() or int(port) >= 1 << 16:
            raise _wrong("MASTER_PORT", "a port, less than 65536", port, "Set it to that of rank 0.")
        return dataclasses.replace(launch, init_method="env://")
    if launcher.init_method == "env://" and launch.size > 1:
        raise ConfigurationError(
            f"`MASTER_ADDR` and `MASTER_PORT` must be set beside {launcher.size}={launch.size}, but are absent. "
            "Set both to the address of rank 0, or start with torchrun."
        )
    return dataclasses.replace(launch, init_method=launcher.init_method)


def _plain_python(env: Mapping[str, str]) -> Launch:
    """Return a world of one. Raises ConfigurationError when `env` gives the size of a larger world, but no rank."""
    size = env.get("WORLD_SIZE", "")
    if size not in ("", "0", "1"):
        raise ConfigurationError(
            f"`RANK` must be set beside WORLD_SIZE={size}, but is absent. "
            "Set both for every process, or unset WORLD_SIZE to run a single process."
        )
    # Kubeflow Trainer sets PET_NNODES for torchrun alone.
    if env.get("PET_NNODES", "") not in ("", "1"):
        raise ConfigurationError(
            f"`torchrun` must be the command where PET_NNODES={env['PET_NNODES']} is set, but is absent. "
            "Start the script with torchrun, which reads PET_*, or unset it to run a single process."
        )
    _check_marks(None, env)
    # Without others, this variable starts no process.
    tasks = env.get("SLURM_NTASKS", "")
    return _world_of_one("plain python", (f"SLURM_NTASKS={tasks}",) if tasks not in ("", "0", "1") else ())


def _check_marks(row: Launcher | None, env: Mapping[str, str]) -> None:
    """Raise ConfigurationError when `env`, taken for a world of one, has the mark of another launcher than `row`."""
    if (check := extension("marks")) is not None:
        check(row, env)


def _world_of_one(source: str, ignored: tuple[str, ...] = ()) -> Launch:
    sources = MappingProxyType({"rank": source, "size": source})
    return Launch("python", sources=sources, by_launcher=False, ignored=ignored)


def _number(env: Mapping[str, str], name: str | None, launcher: Launcher) -> int | None:
    """Return the number in the variable `name`, None when it has none."""
    text = env.get(name, "") if name else ""
    if launcher.node is not None and name == launcher.local_size:
        entry_of = extension("slurm_entry")
        text = "" if entry_of is None else entry_of(text, env.get(launcher.node, ""))
    if not text:
        return None
    if text.isdecimal():
        return int(text)
    raise _wrong(str(name), "a whole number of at least 0", text, _who_sets_it(launcher))


def _who_sets_it(launcher: Launcher) -> str:
    """Return the sentence of an error that says where to correct a variable of `launcher`."""
    if launcher.name in _BY_HAND:
        return "Correct it where your job sets it."
    return f"It is set by {launcher.name}; look at what overwrites it."


# A launch that the arguments of `init` describe, alone or on top of what the environment says.

_ARGUMENTS = {"rank": "rank", "size": "world_size", "init_method": "init_method"}
"""Field of Launch -> argument of `init`."""


def launch_from(given: Mapping[str, Any], env: Mapping[str, str], mpi_size: Callable[[], int] | None = None) -> Launch:
    """Return the launch that `env` describes, with the fields of Launch in `given` in their place (None: not given).

    mpi_size: as in `detect`.
    Rank and world size together need no launcher. Raises ConfigurationError if arguments are missing or contradict.
    """
    with configuration():
        given = _checked({field: value for field, value in given.items() if value is not None})
    if not given:
        return detect(env, mpi_size)
    alone = given.keys() >= {"rank", "size"}
    detected = Launch("init") if alone else detect(env, mpi_size)
    if detected.launcher == "python" and given.get("init_method") != "env://":
        missing = [name for field, name in _ARGUMENTS.items() if field not in given]
        raise ConfigurationError(
            f"`{missing[0]}` must be given together with {', '.join(_ARGUMENTS[field] for field in given)}, but is "
            "None instead, and no launcher started this process. Give rank, world_size and init_method, or none."
        )
    if not (alone or "init_method" in given):
        _check_agreement(given, detected)
    sources = dict(detected.sources) | {field: f"init({_ARGUMENTS[field]}=)" for field in given}
    launch = dataclasses.replace(detected, **given, sources=MappingProxyType(sources))
    if launch.size > 1 and launch.init_method is None and alone:
        raise ConfigurationError(
            "`init_method` must be given together with rank and world_size, but is None instead. Use "
            "'tcp://host:port', 'file:///path' or 'env://', as in torch.distributed."
        )
    if not 0 <= launch.rank < launch.size:
        rule = f"at least 0 and less than world_size={launch.size}"
        raise _wrong("rank", rule, launch.rank, "Give every process its own rank.")
    return launch


def _check_agreement(given: Mapping[str, Any], detected: Launch) -> None:
    """Raise ConfigurationError if `given` contradicts the launcher: then two processes may have the same rank."""
    for field in ("rank", "size"):
        if field in given and given[field] != getattr(detected, field):
            raise ConfigurationError(
                f"`{_ARGUMENTS[field]}` must be the {detected.describe(field)} that {detected.launcher} has set, but "
                f"is {given[field]} instead. Leave it out, or give rank, world_size and init_method."
            )


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """Return `given` with integers as int. Raises TypeError or ValueError."""
    if "init_method" in given:
        fix = "Use 'tcp://host:port', 'file:///path' or 'env://', as in torch.distributed."
        method = text("init_method", given["init_method"], fix)
        if not method.startswith(("tcp://", "file://", "env://")):
            raise wrong("init_method", "an address", method, fix)
    least = {"rank": 0, "size": 1}
    numbers = {field: integer(_ARGUMENTS[field], given[field], least=least[field]) for field in least if field in given}
    return {**given, **numbers}


# Where the ranks run: Horovod's six numbers of each rank.

Place = tuple[str, int | None]
"""(host name, local rank from the launcher or None)."""


def is_one_host(launch: Launch) -> bool:
    """Return whether all processes of `launch` are known to be on one host."""
    return launch.size in (1, launch.local_size)


def nodes(places: Sequence[Place]) -> list[str]:
    """Return the name of every rank's node. `places[r]` is where rank r runs.

    Ranks of one host with the same local rank count as different nodes: a launcher can run several agents on a host.
    """
    claims: Counter[Place] = Counter()
    names = []
    for host, local_rank in places:
        again = claims[host, local_rank] if local_rank is not None else 0
        claims[host, local_rank] += 1
        names.append(f"{host}.{again}" if again else host)
    return names


def topology(places: Sequence[Place]) -> list[World]:
    """Return every rank's World.

    cross_rank is a rank's position among the ranks with the same local_rank (horovod/runner/common/util/hosts.py:107).
    """
    members: dict[str, list[int]] = defaultdict(list)
    for rank, node in enumerate(nodes(places)):
        members[node].append(rank)
    local: dict[int, tuple[int, int]] = {}
    for ranks in members.values():
        # A stable sort: ranks without a local rank stay in rank order.
        order = sorted(ranks, key=lambda rank: places[rank][1] or 0)
        local.update({rank: (number, len(ranks)) for number, rank in enumerate(order)})
    columns: dict[int, list[int]] = defaultdict(list)
    for rank in range(len(places)):
        columns[local[rank][0]].append(rank)
    return [
        World(rank, len(places), *local[rank], columns[local[rank][0]].index(rank), len(columns[local[rank][0]]))
        for rank in range(len(places))
    ]


RENDEZVOUS = "DUALDIST_RENDEZVOUS"
"""The variable with the address of the server of `dualdist run`."""
SECRET = "DUALDIST_SECRET"


def secret_in(env: Mapping[str, str]) -> bytes:
    """Return the job's secret. Raises ConfigurationError when DUALDIST_SECRET is not hexadecimal."""
    try:
        return bytes.fromhex(env.get(SECRET, ""))
    except ValueError:
        raise ConfigurationError(
            f"`{SECRET}` must be hexadecimal digits, but is not. Make one with `openssl rand -hex 32`."
        ) from None


def without_copies(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` without what dualdist has set for other programs (copies.py)."""
    copies = extension("copies") if "DUALDIST_COPIES" in env else None
    hidden = () if copies is None else copies.names_of_copies(env)
    return {name: value for name, value in env.items() if name not in hidden}


@contextlib.contextmanager
def temporary_environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set `variables` (None: unset) in the `with` block, for C++ that reads them, then restore the old values."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# What the user sets through environment variables.


def read_settings(env: Mapping[str, str]) -> Settings:
    """Return what `env` sets. Raises ConfigurationError for a value that is not a number as it must be."""
    warn = _stall_seconds(env, "DUALDIST_STALL_WARN_SECONDS", "HOROVOD_STALL_CHECK_TIME_SECONDS")
    timeout = _stall_seconds(env, "DUALDIST_STALL_TIMEOUT_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
    return Settings(
        warn or Settings.stall_warn_seconds,
        timeout or Settings.stall_timeout_seconds,
        number_in(env, "DUALDIST_START_TIMEOUT_SECONDS", Settings.start_timeout_seconds),
        env,
    )


def _stall_seconds(env: Mapping[str, str], name: str, horovods: str) -> float:
    """Return the value of `name`, else that of Horovod's variable `horovods`, else 0.

    Horovod's values are those of horovod/common/utils/env_parser.cc:120. Its shutdown time is 0 for never.
    """
    if name in env:
        return number_in(env, name)
    if is_on(env, "HOROVOD_STALL_CHECK_DISABLE"):
        return NEVER_SECONDS
    return number_in(env, horovods, rule="non-negative") if env.get(horovods) else 0.0


def is_on(env: Mapping[str, str], name: str, default: bool = False) -> bool:
    """Return whether the variable `name` is not 0. If it is empty or absent, return `default`."""
    return env[name] != "0" if env.get(name) else default


def number_in(
    env: Mapping[str, str],
    name: str,
    default: float = math.nan,
    rule: str = "positive",
    unit: str = "seconds",
    most: float = 1e308,
) -> float:
    """Return the number in the variable `name`, else `default`. Raises ConfigurationError if it breaks `rule`."""
    text = env.get(name, default)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    is_number = 0 <= number <= most  # false for NaN
    if not is_number or (number == 0 and rule == "positive"):
        raise ConfigurationError(f"`{name}` must be a {rule}, finite number of {unit}, but is {text!r} instead.")
    return number

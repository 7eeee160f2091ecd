"""`dualdist exec`: scripts for torchrun under every launcher."""

from __future__ import annotations

import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ..helpers.forks import BIN, DUALDIST
from ..helpers.namespace_hosts import OPEN_MPI, Network, mpirun
from ..helpers.requirements import need_modules, need_programs
from ..helpers.script_launch import Ended, Script, finish
from ..helpers.slurm_cluster import Slurm
from ..helpers.torchrun_script import METHOD
from ..helpers.torchrun_script import __file__ as SCRIPT
from ..helpers.world import MPIRUN
from .test_mpis import debians_mpich

EXEC = (*DUALDIST, "exec")
WORLDS = {
    1: [[1, 0, 1, 0, 1, 0]],
    2: [[3, 0, 2, 0, 2, 0], [3, 1, 2, 1, 2, 0]],
    3: [[6, 0, 3, 0, 2, 0], [6, 1, 3, 1, 2, 0], [6, 2, 3, 0, 1, 1]],
}
"""The sum, and torchrun's numbers, of each process: on one node, and for three processes on two."""
_MPIRUN = tuple(part.format(size=2) for part in MPIRUN)
_STEP = ("srun", "-N", "2", "-n", "3")
_PMIX = (*_MPIRUN, "env", "-u", "OMPI_COMM_WORLD_RANK", "-u", "OMPI_COMM_WORLD_SIZE")
_OF_FLUX = 'for i in 0 1; do FLUX_TASK_RANK=$i FLUX_TASK_LOCAL_ID=$i "$@" & done; wait'
_OF_PALS = 'for i in 0 1; do PMI_RANK=$i PALS_RANKID=$i PALS_LOCAL_RANKID=$i "$@" & done; wait'

LAUNCHERS: dict[str, tuple[str, ...]] = {
    "python": (),
    "mpirun": _MPIRUN,
    "PMIx": _PMIX,
    "mpiexec of MPICH": ("mpiexec.hydra", "-np", "2"),
    "torchrun": (f"{BIN}/torchrun", "--standalone", "--nproc-per-node", "2", "--no-python"),
    "horovodrun": (f"{BIN}/horovodrun", "--gloo", "-np", "2"),
    "dualdist run": (sys.executable, "-m", "dualdist", "run", "-np", "2"),
    # Only their variables, since neither can be installed here.
    "flux's variables": ("env", "FLUX_JOB_SIZE=2", "FLUX_JOB_NNODES=1", "sh", "-c", _OF_FLUX, "sh"),
    "PALS' variables": ("env", "PMI_SIZE=2", "PALS_LOCAL_SIZE=2", "sh", "-c", _OF_PALS, "sh"),
}


def check(ended: Ended, size: int, *arguments: str) -> None:
    """See that each process of torchrun_script.py has printed its numbers. Launchers put text before lines."""
    found = [json.loads(text) for text in re.findall(r"\[\d+, \d.*\]\]$", ended.check(), re.MULTILINE)]
    expected = [[*numbers, [*arguments]] for numbers in WORLDS[size]]
    assert sorted(found, key=lambda line: int(line[1])) == expected


@pytest.mark.only_ci(where=lambda name: name not in ("python", "mpirun", "torchrun"))
@pytest.mark.only_ci(where=lambda program, name: program != EXEC and name != "mpirun")
@pytest.mark.parametrize("name", LAUNCHERS)
@pytest.mark.parametrize(
    ("program", "arguments"), [(EXEC, ("a b", "$HOME")), ((sys.executable,), (METHOD,))], ids=["dualdist exec", METHOD]
)
def test_a_script_finds_all_processes_under_every_launcher(
    program: tuple[str, ...], arguments: tuple[str, ...], name: str
) -> None:
    launcher = LAUNCHERS[name]
    need_programs(*launcher[:1])
    ended = finish([*launcher, *program, SCRIPT, *arguments], forks=name != "mpiexec of MPICH")
    check(ended, 2 if launcher else 1, *arguments)


@pytest.mark.only_ci
@pytest.mark.parametrize(
    ("before", "arguments"),
    [
        ((*EXEC, "-m", "tests.helpers.torchrun_script"), ()),
        ((sys.executable, SCRIPT), (METHOD,)),
        ((*EXEC, SCRIPT), (METHOD,)),
    ],
    ids=["dualdist exec", METHOD, f"{METHOD} in dualdist exec"],
)
def test_a_script_finds_the_processes_of_two_nodes_of_slurm(
    before: tuple[str, ...], arguments: tuple[str, ...], slurm: Slurm
) -> None:
    """Both nodes are this host, so their first processes have the same local rank."""
    check(slurm.finish(*_STEP, *before, *arguments), 3, *arguments)


@pytest.mark.only_ci
@pytest.mark.parametrize("kind", ["pmi2", "pmix"])
def test_a_step_of_slurm_leaves_mpi_to_the_script(slurm: Slurm, kind: str, tmp_path: Path) -> None:
    need_modules("mpi4py")
    if kind == "pmi2":  # Debian's Open MPI has PMIx alone
        library = {"LD_LIBRARY_PATH": str(debians_mpich(tmp_path)), "MPI4PY_MPIABI": "mpich"}
    else:
        library = {**OPEN_MPI, "OMPI_MCA_btl_tcp_if_include": "lo"}
    command = (*_STEP, f"--mpi={kind}", *EXEC, SCRIPT, "mpi")
    check(slurm.finish(*command, environment=library, forks=False), 3, "mpi")


def test_a_rank_that_is_not_the_launchers_is_refused() -> None:
    method = "init_method='dualdist://', rank=1, world_size=1"
    source = f"import dualdist.exec.rendezvous, torch; torch.distributed.init_process_group('gloo', {method})"
    ended = finish([sys.executable, "-c", source])
    assert ended.code == 1
    assert "`rank` must be absent or the launcher's, 0, where init_method is 'dualdist://'" in ended.output


@pytest.mark.parametrize(
    "variables",
    [
        {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "999"},
        {"PMIX_RANK": "0", "PMIX_NAMESPACE": "x", "PMIX_SERVER_URI2": "x.0;tcp4://127.0.0.1:9"},
    ],
    ids=["PMI-1", "PMIx"],
)
def test_a_process_manager_that_is_not_there_is_an_error(variables: dict[str, str]) -> None:
    need_programs("mpirun")  # with PMIx
    ended = finish([*EXEC, "--", "true"], variables, forks=False)
    assert ended.code == 2
    assert ended.output.startswith("dualdist exec: The process manager must be reachable")


def test_processes_that_have_started_mpi_can_meet() -> None:
    need_modules("mpi4py")
    source = (
        "from mpi4py import MPI; import os; from dualdist.exec import export_environment as export; "
        "export(); os.write(1, b'rank %d\\n' % int(os.environ['RANK']))"
    )
    output = finish([*_PMIX, sys.executable, "-c", source], forks=False).check()
    assert sorted(re.findall(r"rank \d", output)) == ["rank 0", "rank 1"]


@pytest.mark.only_ci(where=lambda join: "import init" in join)
@pytest.mark.parametrize(
    ("launcher", "join", "count"),
    [
        ("dualdist run", "from dualdist.exec import export_environment as join", 1),
        ("dualdist run", "from dualdist import init as join", 1),
        ("mpirun", "from dualdist.exec import export_environment as join", 0),
    ],
)
def test_a_world_of_mpi4py_that_is_smaller_than_the_launchers_is_named(launcher: str, join: str, count: int) -> None:
    need_modules("mpi4py")
    source = f"from mpi4py import MPI; {join}; join(); join()"
    output = finish([*LAUNCHERS[launcher], sys.executable, "-c", source], forks=False).check()
    assert output.count(f"mpi4py's world has size 1, but {launcher} has set size 2") == count


@pytest.mark.only_ci
def test_init_without_mpi4py_warns_of_too_many_threads() -> None:
    need_programs("mpiexec.hydra")
    source = (
        "import sys, torch, dualdist as hvd; sys.modules['mpi4py'] = None; torch.set_num_threads(1000); "
        "hvd.init(backend='torch', transport='gloo')"
    )
    unset = ("env", "-u", "MPI_LOCALNRANKS", "-u", "OMP_NUM_THREADS")  # nothing shows that there is one host
    output = finish(["mpiexec.hydra", "-np", "2", *unset, sys.executable, "-c", source], forks=False).check()
    assert output.count("2 processes with 1000 threads each") == 1


HOSTS = "alpha:2,beta:1"
ON_TWO_HOSTS = {
    "mpirun": mpirun(HOSTS, "DUALDIST_START_TIMEOUT_SECONDS"),
    "mpiexec": ("mpiexec.hydra", "-launcher", "ssh", "-iface", "net0", "-hosts", HOSTS, "-np", "3"),
}


@pytest.mark.only_ci
@pytest.mark.parametrize(
    ("launcher", "before", "arguments"),
    [
        ("mpirun", EXEC, ()),
        ("mpirun", EXEC, ("mpi",)),
        ("mpiexec", EXEC, ()),
        ("mpiexec", EXEC, ("mpi",)),
        ("mpiexec", (sys.executable,), (METHOD,)),
    ],
    ids=["mpirun", "mpirun-mpi4py", "mpiexec", "mpiexec-mpi4py", f"mpiexec-{METHOD}"],
)
def test_a_script_finds_the_processes_of_two_hosts(
    launcher: str, before: tuple[str, ...], arguments: tuple[str, ...], network: Network, tmp_path: Path
) -> None:
    start, environment = ON_TWO_HOSTS[launcher], {}
    need_programs(start[0])
    if arguments == ("mpi",):
        need_modules("mpi4py")
        if launcher == "mpiexec":
            environment = {"LD_LIBRARY_PATH": str(debians_mpich(tmp_path)), "MPI4PY_MPIABI": "mpich"}
    forks = launcher == "mpirun" and not arguments
    ended = network.finish(*start, *before, SCRIPT, *arguments, environment=environment, forks=forks)
    check(ended, 3, *arguments)


_WITHOUT_MPI4PY = """
import os, torch
import sys; sys.modules["mpi4py"] = None
import dualdist as hvd
for backend in ("torch", "torch", "horovod", "horovod"):
    hvd.init(backend=backend, transport="gloo")
    total = hvd.allreduce(torch.tensor(hvd.rank() + 1), op=hvd.Sum)
    os.write(1, f"{hvd.backend_name()} {hvd.local_size()} {total}\\n".encode())
    hvd.shutdown()
"""


@pytest.mark.only_ci
@pytest.mark.parametrize("launcher", ["mpirun", "mpiexec", "dualdist exec"])
def test_init_on_two_hosts_needs_no_mpi4py(network: Network, launcher: str) -> None:
    need_modules("horovod")
    before = (*ON_TWO_HOSTS["mpiexec"], *EXEC, "--") if launcher == "dualdist exec" else ON_TWO_HOSTS[launcher]
    need_programs(before[0])
    output = network.finish(*before, sys.executable, "-c", _WITHOUT_MPI4PY, forks=launcher == "mpirun").check()
    found = sorted(re.findall(r"(?:torch|horovod) \d \d", output))
    assert found == [f"{backend} {size} 6" for backend in ("horovod", "torch") for size in (1, 1, 2, 2, 2, 2)]


_ENDS_LATER = """
import os, pathlib, sys
from dualdist.exec import export_environment
export_environment()
folder, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])
other = folder / "rank1"
if rank == 1:
    (folder / "new").write_text(str(os.getpid()))
    (folder / "new").rename(other)
while rank == 0:
    os.write(2, b".")  # the launcher looks for processes that have ended
    try:
        os.kill(int(other.read_text()), 0)
    except FileNotFoundError:
        pass
    except ProcessLookupError:
        break
os.write(1, f"rank {rank} ended\\n".encode())
"""


@pytest.mark.only_ci
@pytest.mark.parametrize("before", [(sys.executable,), (*EXEC, "--", sys.executable)], ids=["python", "dualdist exec"])
@pytest.mark.parametrize("launcher", ["mpiexec", "mpirun"])
def test_a_process_may_end_later_than_the_others_of_its_host(
    network: Network, tmp_path: Path, launcher: str, before: tuple[str, ...]
) -> None:
    start = ON_TWO_HOSTS[launcher]
    need_programs(start[0])
    output = network.finish(*start, *before, "-c", _ENDS_LATER, str(tmp_path), forks=False).check()
    assert sorted(re.findall(r"rank (\d) ended", output)) == ["0", "1", "2"]


@pytest.mark.only_ci
def test_mpiexec_of_mpich_kills_the_others_of_a_host_when_one_ends_in_the_middle_of_mpi(
    network: Network, tmp_path: Path
) -> None:
    need_programs("mpiexec.hydra")
    os.mkfifo(tmp_path / "pipe")
    starts_mpi = "echo cmd=init pmi_version=1 pmi_subversion=1 >&$PMI_FD; read answer <&$PMI_FD; echo $answer"
    waits = f"cat {tmp_path}/pipe; echo not killed"
    script = f"case $RANK in 0) {waits};; 1) {starts_mpi};; esac"
    start = (*ON_TWO_HOSTS["mpiexec"], *EXEC, "--", "bash", "-c", script)
    ended = network.finish(*start, forks=False)
    assert "cmd=response_to_init" in ended.output
    assert "not killed" not in ended.output  # nor is it, for ever, when hydra sees no end


@pytest.mark.only_ci
def test_a_process_that_mpiexec_of_mpich_waits_for_is_an_error(network: Network, tmp_path: Path) -> None:
    need_programs("mpiexec.hydra")
    os.mkfifo(tmp_path / "pipe")
    # mpiexec waits for its last process, which reads until the others have ended.
    waits = f'if [ $PMI_RANK = 2 ]; then exec cat {tmp_path}/pipe; fi; exec "$@" 9> {tmp_path}/pipe'
    command = (*ON_TWO_HOSTS["mpiexec"], "sh", "-c", waits, "sh", *EXEC, "--", "true")
    ended = network.finish(*command, environment={"DUALDIST_START_TIMEOUT_SECONDS": "3"}, forks=False)
    assert ended.code != 0
    # The first rank to give up ends the job.
    assert re.search(r"Rank [01] waited 3 s for the other processes, of which some did not arrive\.", ended.output)


_CONNECTIONS = """
import contextlib, os, re, socket
host, port = re.search(r"tcp4://([\\d.]+):(\\d+)", os.environ["PMIX_SERVER_URI2"]).groups()
places = []
for name in os.listdir("/proc/self/fd"):
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
        places.append(connection.getpeername())
os.write(1, f"connected {places.count((host, int(port)))}\\n".encode())
"""


_TWICE = ("bash", "-c", '"$@"; "$@"', "bash")
_SHOWS = ("sh", "-c", 'echo "rank $RANK in $TORCHELASTIC_RUN_ID"')


def _worlds(output: str) -> list[list[str]]:
    """Return the ranks of each world, of which `_SHOWS` has printed them."""
    found = re.findall(r"rank (\d) in (\w{16})$", output, re.MULTILINE)
    return [sorted(rank for rank, other in found if other == run) for run in dict(map(reversed, found))]


@pytest.mark.only_ci
@pytest.mark.parametrize("kind", ["pmi2", "pmix"])
def test_programs_meet_in_turn_in_a_step_of_slurm(slurm: Slurm, kind: str) -> None:
    ended = slurm.finish(*_STEP, f"--mpi={kind}", *_TWICE, *EXEC, "--", *_SHOWS)
    assert _worlds(ended.check()) == [["0", "1", "2"]] * 2


@pytest.mark.only_ci
@pytest.mark.parametrize("launcher", ["mpirun", "mpiexec"])
def test_programs_meet_in_turn_in_one_place_of_a_job_and_inside_each_other(network: Network, launcher: str) -> None:
    start = ON_TWO_HOSTS[launcher]
    need_programs(start[0])
    command = (*start, *_TWICE, *EXEC, "--", *_TWICE, *EXEC, "--", *_SHOWS)
    assert _worlds(network.finish(*command, forks=launcher == "mpirun").check()) == [["0", "1", "2"]] * 4


@pytest.mark.parametrize("launcher", ["mpirun", pytest.param("mpiexec of MPICH", marks=pytest.mark.only_ci)])
def test_processes_of_a_host_meet_whose_temporary_folders_are_their_own(launcher: str, tmp_path: Path) -> None:
    need_programs(*LAUNCHERS[launcher][:1])
    alone = ("sh", "-c", f'TMPDIR=$(mktemp -d {tmp_path}/XXXXXX) exec "$@"', "sh")
    command = (*LAUNCHERS[launcher], *alone, *EXEC, "--", "sh", "-c", "echo rank $RANK of $WORLD_SIZE")
    output = finish(command, forks=False).check()
    assert sorted(re.findall(r"rank \d of \d", output)) == ["rank 0 of 2", "rank 1 of 2"]


@pytest.mark.only_ci
def test_the_server_of_pmix_loses_no_process_that_starts_mpi_later(network: Network) -> None:
    # Open MPI's server sometimes expects too few processes in MPI_Init if it has lost one before.
    start = (*ON_TWO_HOSTS["mpirun"], *EXEC, "--", sys.executable, "-c", _CONNECTIONS)
    output = network.finish(*start, forks=False).check()
    assert output.count("connected 1\n") == 3


_WITHOUT_RANK_2 = """
from tests.helpers.faulty_doctor import Path, arrive_in_turn, main, os, signal, sys
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
arrive_in_turn(rank, 1, Path(sys.argv[1])) if rank < 2 else signal.pause()
sys.exit(main(["exec", "--", "true"]))
"""


@pytest.mark.only_ci
def test_a_missing_process_on_another_host_is_named(network: Network, tmp_path: Path) -> None:
    need_modules("mpi4py")
    command = (*ON_TWO_HOSTS["mpirun"], sys.executable, "-c", _WITHOUT_RANK_2, str(tmp_path))
    ended = network.finish(*command, environment={"DUALDIST_START_TIMEOUT_SECONDS": "1"})
    assert ended.code == 2
    assert "Rank 0 waited 1 s for rank 2, which did not arrive" in ended.output


@pytest.mark.parametrize("launcher", ["mpirun", "dualdist run", "python"])
def test_the_exit_code_is_that_of_the_script(launcher: str) -> None:
    need_programs(*LAUNCHERS[launcher][:1])
    ended = finish([*LAUNCHERS[launcher], *EXEC, "--", "sh", "-c", "exit 7"])
    assert ended.code == 7


@pytest.mark.parametrize(
    "before",
    [EXEC, (*EXEC, "--", sys.executable), (*EXEC, "--"), (*LAUNCHERS["dualdist run"], sys.executable)],
    ids=["script", "command", "shebang", "run"],
)
def test_a_process_that_is_killed_loses_no_line_and_no_stack(before: tuple[str, ...], tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(f"#!{sys.executable}\nimport os\nprint('a line')\nos.kill(os.getpid(), 6)\n")
    script.chmod(0o755)
    variables = {"PYTHONUNBUFFERED": "", "PYTHONFAULTHANDLER": ""}
    ended = finish([*before, str(script)], variables, forks=False)
    assert ended.code != 0
    assert "a line\n" in ended.output
    assert (f'File "{script}", line 4 in <module>' in ended.output) == (before[: len(EXEC)] == EXEC)


@pytest.mark.parametrize(("threads", "handling", "expected"), [("5", "", "5 1"), ("", "3", "1 3")])
def test_variables_of_the_user_stay_unless_they_are_empty(threads: str, handling: str, expected: str) -> None:
    need_programs("mpirun")
    names = ("OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
    command = [*_MPIRUN, *EXEC, "--", "sh", "-c", f"echo found ${names[0]} ${names[1]}"]
    output = finish(command, dict(zip(names, (threads, handling), strict=True)), forks=False).check()
    assert output.count(f"found {expected}\n") == 2


def test_a_script_that_calls_init_finds_its_launcher() -> None:
    need_modules("mpi4py")
    source = "import dualdist as hvd; hvd.init(); print(f'{hvd.launcher_name()} {hvd.size()}\\n', end='')"
    output = finish([*_MPIRUN, *EXEC, "--", sys.executable, "-c", source]).check()
    assert len(re.findall(r"mpirun 2$", output, re.MULTILINE)) == 2


@pytest.mark.only_ci
def test_a_horovod_script_runs_with_compat(script: Script) -> None:
    path = script(
        "import torch\nimport horovod.torch as hvd\nhvd.init()\n"
        "total = int(hvd.allreduce(torch.tensor(hvd.rank() + 1), op=hvd.Sum))\n"
        "print(f'sum {hvd.__name__} {total}\\n', end='')\n"
    )
    output = finish([*LAUNCHERS["dualdist run"], *EXEC, "--compat", path]).check()
    assert output.count("sum horovod.torch 3\n") == 2


@pytest.mark.only_ci
@pytest.mark.parametrize(("launcher", "before"), [("mpirun", EXEC), ("PALS' variables", (sys.executable,))])
def test_a_trainer_of_lightning_joins_all_processes(launcher: str, before: tuple[str, ...], script: Script) -> None:
    need_modules("lightning")
    need_programs(*LAUNCHERS[launcher][:1])
    path = script(
        ("" if before == EXEC else "import dualdist.exec\ndualdist.exec.export_environment()\n")
        + "from os import environ, write\n"
        "from lightning.pytorch import Trainer\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "devices, nodes = int(environ['LOCAL_WORLD_SIZE']), int(environ['GROUP_WORLD_SIZE'])\n"
        "trainer = Trainer(devices=devices, num_nodes=nodes, accelerator='cpu', fast_dev_run=2)\n"
        "trainer.fit(model := BoringModel())\n"
        "write(1, f'rank {trainer.global_rank} of {trainer.world_size}: {model.layer.weight.sum()}\\n'.encode())\n"
    )
    output = finish([*LAUNCHERS[launcher], *before, path]).check()
    found = re.findall(r"rank (\d) of 2: (\S+)", output)
    assert sorted(rank for rank, _ in found) == ["0", "1"]
    assert len({weights for _, weights in found}) == 1  # they start with other ones


@pytest.mark.only_ci
@pytest.mark.parametrize("launcher", ["mpirun", "mpiexec of MPICH"])
def test_jobs_that_start_at_the_same_time_do_not_meet(launcher: str) -> None:
    need_programs(*LAUNCHERS[launcher][:1])
    shows = ("sh", "-c", 'echo "$RANK $MASTER_PORT $TORCHELASTIC_RUN_ID"')
    command = ("env", "SLURM_JOB_ID=5", *LAUNCHERS[launcher], *EXEC, "--", *shows)  # an allocation's
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(finish, command, forks=launcher == "mpirun") for _ in range(4)]
    worlds = set()
    for job in jobs:
        output = job.result().check()
        ranks = sorted(re.findall(r"(\d) (\d+) (\w{16})$", output, re.MULTILINE))
        assert [rank for rank, *_ in ranks] == ["0", "1"]
        assert len({tuple(place) for _, *place in ranks}) == 1
        worlds.add(tuple(ranks[0][1:]))
    assert len({run for _, run in worlds}) == 4


@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_each_process_sees_one_gpu_of_its_own(launcher: str) -> None:
    need_programs(*LAUNCHERS[launcher][:1])
    shows = ("sh", "-c", "echo $RANK sees $CUDA_VISIBLE_DEVICES.")
    command = (*LAUNCHERS[launcher], *EXEC, "--bind", "gpu", "--", *shows)
    output = finish(command, {"CUDA_VISIBLE_DEVICES": "MIG-3,MIG-5"}).check()
    assert sorted(re.findall(r"\d sees [^.]*", output)) == ["0 sees MIG-3", "1 sees MIG-5"]


def test_too_few_gpus_are_an_error_on_all_ranks() -> None:
    command = (*LAUNCHERS["dualdist run"][:-1], "3", *EXEC, "--bind", "gpu", "--", "echo", "started")
    ended = finish(command, {"CUDA_VISIBLE_DEVICES": "MIG-3,MIG-5,-1"})
    assert ended.code == 2
    assert "has 2 for 3 processes (CUDA_VISIBLE_DEVICES=MIG-3,MIG-5,-1)" in ended.output
    assert "started" not in ended.output


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        ((), "A script must be given", 2),
        (("--",), "A script must be given", 2),
        (("-m", "--", "true"), "which -m and --compat do not change", 2),
        (("python", "train.py"), "but 'python' is none on", 2),
        (("-c", "pass"), "dualdist exec -- python -O train.py", 2),
        (("-mtimeit",), "-m MODULE [ARG ...]", 2),
        (("-u", "-m", "no_such_module"), "No module named no_such_module", 1),
        (("--", "no-such-command"), "'no-such-command' cannot be started: No such file", 127),
        (("--", "/"), "'/' cannot be started: Permission denied", 126),
    ],
)
def test_what_cannot_be_started_is_an_error(arguments: tuple[str, ...], said: str, code: int) -> None:
    ended = finish([*EXEC, *arguments], forks=False)
    assert (ended.code, said in ended.output) == (code, True)

"""`dualdist run` with real processes: their environment, and how a job ends, here and over ssh."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dualdist.core.launch import detect
from dualdist.processes import job

from ..helpers.run_command import FAMILY, STUBBORN, Families, Run, python
from ..helpers.world import ROOT

RUN = (sys.executable, "-m", "dualdist", "run")
STALE = {
    "RANK": "7",
    "WORLD_SIZE": "9",
    "LOCAL_RANK": "7",
    "MASTER_ADDR": "nowhere",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "x",
    "OMPI_COMM_WORLD_SIZE": "9",
    "PMIX_RANK": "7",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "7",
    "HOROVOD_RANK": "7",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "nowhere",
    "HOROVOD_CONTROLLER": "mpi",
    "DUALDIST_LAUNCHER": "spawn",
    "DUALDIST_RANK": "5",
}
"""Variables that outer launchers may have set."""


def environments() -> Iterator[bytes]:
    """Yield the environment of each process of this machine."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            yield file.read_bytes()


def test_processes_get_their_own_numbers_and_no_variables_of_outer_launchers(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in STALE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KEPT", "yes")
    ended = run("-np", "3", *python("import json, os; print(json.dumps(dict(os.environ)))"))
    assert ended.code == 0
    for rank in range(3):
        env = json.loads(ended.written(rank))
        launch = detect(env)
        assert (launch.launcher, launch.rank, launch.size) == ("dualdist run", rank, 3)
        assert (launch.local_rank, launch.local_size, launch.init_method) == (rank, 3, None)
        assert env["KEPT"] == "yes" and env["DUALDIST_RENDEZVOUS"].startswith("127.0.0.1:")
        assert {name for name, value in STALE.items() if env.get(name) == value} == set()
        assert not {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "SLURM_STEP_ID"} & env.keys()
        assert [env[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == [str(rank), str(rank), "3"]


def test_cores_are_shared_as_threads_unless_the_user_sets_their_number(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    show = python("import os; print(os.environ['OMP_NUM_THREADS'])")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert run("-np", "1", "--verbose", *show).written(0) == b"5\n"
    monkeypatch.delenv("OMP_NUM_THREADS")
    shared = max(1, len(os.sched_getaffinity(0)) // 2)
    ended = run("-np", "2", "--verbose", *show)
    assert (ended.written(0), ended.written(1)) == (b"%d\n" % shared,) * 2
    assert f"OMP_NUM_THREADS={shared}" in ended.errors
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    ended = run("-np", "2", *show)
    assert (ended.written(0), ended.errors) == (b"%d\n" % shared, "")


def test_options_set_the_variables_of_the_processes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    names = ("DUALDIST_BACKEND", "DUALDIST_TRANSPORT", "DUALDIST_INTERFACE", "A", "NCCL_IB_DISABLE")
    options = "-np 1 --backend torch --gloo --network-interface lo --env A=b=c --tcp --"
    ended = run(*options.split(), *python(f"import os; print([os.environ.get(name) for name in {names}])"))
    assert ended.written(0) == b"['torch', 'gloo', 'lo', 'b=c', '1']\n"


def started_by_a_shell(command: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run `command` with `text` as its standard input. In it, RUN is `python -m dualdist run`."""
    how: Any = {"shell": True, "cwd": ROOT, "capture_output": True, "text": True, "timeout": 60}
    return subprocess.run(command.replace("RUN", shlex.join(RUN)), input=text, **how)


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("hosts_of_job", ["localhost:2", "hostA:1,localhost:1"])
def test_rank_0_has_the_standard_input_of_the_launcher(hosts_of_job: str) -> None:
    ended = started_by_a_shell(f"RUN -H {hosts_of_job} sh -c 'echo $DUALDIST_RANK read $(cat)'", "some text")
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["[1,0]<stdout>:0 read some text", "[1,1]<stdout>:1 read"]


@pytest.mark.usefixtures("hosts")
def test_standard_input_of_any_length_reaches_rank_0_unchanged(tmp_path: Path) -> None:
    content = secrets.token_bytes(1_000_003) + b"\n\n"
    (tmp_path / "content").write_bytes(content)
    ended = started_by_a_shell(f"cat {tmp_path}/content | RUN -H hostA:1 sha256sum")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"[1,0]<stdout>:{hashlib.sha256(content).hexdigest()}  -\n"


@pytest.mark.usefixtures("hosts")
def test_a_job_ends_although_its_standard_input_does_not() -> None:
    ended = started_by_a_shell("yes | RUN -H hostA:1,localhost:1 head -c 2")
    assert (ended.returncode, ended.stdout) == (0, "[1,0]<stdout>:y\n"), ended.stderr
    reader, writer = os.pipe()
    command = [*RUN, "-H", "hostA:1,localhost:1", "true"]
    assert subprocess.run(command, cwd=ROOT, stdin=reader, timeout=60).returncode == 0
    os.close(reader)
    os.close(writer)


@pytest.mark.usefixtures("hosts")
def test_little_is_read_of_the_standard_input_if_rank_0_does_not_read_it(tmp_path: Path) -> None:
    wait_until_the_pipe_is_full = python("""
    import fcntl, sys, termios
    size = fcntl.fcntl(0, fcntl.F_GETPIPE_SZ)
    while int.from_bytes(fcntl.ioctl(0, termios.FIONREAD, bytes(4)), sys.byteorder) < size:
        pass
    """)
    command = [*RUN, "-H", "hostA:1", *wait_until_the_pipe_is_full]
    with (tmp_path / "content").open("w+b") as content:
        content.truncate(100 << 20)
        assert subprocess.run(command, cwd=ROOT, stdin=content, timeout=60).returncode == 0
        assert os.lseek(content.fileno(), 0, os.SEEK_CUR) <= 2 << 16  # two pieces


IN_THE_BACKGROUND = """
import fcntl, os, signal, sys, termios, time, types
from dualdist.cli import main
from dualdist.processes import job

def sleep(seconds):  # until the user puts the command in the foreground
    os.tcsetpgrp(0, os.getpgrp())

fcntl.ioctl(0, termios.TIOCSCTTY)
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os.setpgid(0, 0)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
job.time = types.SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
sys.exit(main(["run", "-H", "hostA:1", "cat"]))
"""


@pytest.mark.usefixtures("hosts")
def test_a_launcher_in_the_background_reads_the_terminal_when_it_is_in_the_foreground() -> None:
    typed, terminal = os.openpty()
    os.write(typed, b"some text\n\x04")
    how: Any = {"cwd": ROOT, "stdout": subprocess.PIPE, "start_new_session": True, "timeout": 60}
    ended = subprocess.run(python(IN_THE_BACKGROUND), stdin=terminal, **how)
    assert (ended.returncode, ended.stdout) == (0, b"[1,0]<stdout>:some text\n")
    os.close(typed)
    os.close(terminal)


@pytest.mark.only_ci(where=lambda closed: closed != "<&- >&- 2>&-")
@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize(
    ("closed", "hosts_of_job"),
    [*((closed, "localhost:2") for closed in (">&-", "2>&-", "<&-", "<&- >&-", "<&- >&- 2>&-")), ("<&-", "hostA:2")],
)
def test_standard_files_that_are_closed_are_empty(closed: str, hosts_of_job: str) -> None:
    command = f"RUN -H {hosts_of_job} sh -c 'cat; echo out; echo err >&2' {closed}"
    ended = started_by_a_shell(command, "some text\n")
    assert ended.returncode == 0, ended.stderr
    files = closed.split()
    assert ended.stdout.count("out\n") == (0 if ">&-" in files else 2)
    assert ended.stderr.count("err\n") == (0 if "2>&-" in files else 2)
    assert ended.stdout.count("some text") == (0 if {"<&-", ">&-"} & set(files) else 1)


@pytest.mark.only_ci
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("RUN -np 2 echo text >/dev/full", "No space left on device: 'stdout'"),
        ("RUN -np 2 sh -c 'echo text >&2' 2>/dev/full", ""),
        ("ulimit -n 16; RUN -np 2 true", "Too many open files"),
        ("ulimit -n 8; RUN -np 2 true", "Too many open files"),
    ],
)
def test_what_the_machine_lacks_is_said_in_one_line(command: str, said: str) -> None:
    ended = started_by_a_shell(command)
    assert ended.returncode == 1
    assert said in ended.stderr and ended.stderr.count("\n") == bool(said)


def test_the_error_names_a_command_that_does_not_exist(run: Run) -> None:
    ended = run("-np", "2", "no-such-command")
    assert ended.code == 127
    assert ended.errors == (
        "dualdist run: rank 0 on localhost could not be started: "
        "No such file or directory: no-such-command; ending the others.\n"
    )


def test_the_exit_code_after_a_signal_is_that_of_a_shell(run: Run) -> None:
    ended = run("-np", "2", "sh", "-c", "if [ $DUALDIST_RANK = 1 ]; then kill -SEGV $$; fi; exec sleep 1000")
    assert ended.code == 128 + signal.SIGSEGV
    assert ended.errors == "dualdist run: rank 1 on localhost was ended by SIGSEGV; ending the others.\n"


def test_processes_that_a_successful_job_leaves_behind_are_ended(run: Run, families: Families) -> None:
    assert run("-np", "1", *python(FAMILY)).code == 0
    assert families().left(0) == []


@pytest.mark.usefixtures("hosts")
def test_the_first_failure_ends_every_process_on_every_host(run: Run, families: Families) -> None:
    source = STUBBORN + "if os.environ['DUALDIST_RANK'] == '2': sys.exit(3)\nsignal.pause()"
    ended = run("-H", "localhost:1,hostA:1,hostB:1", *python(source))
    assert ended.code == 3
    assert ended.errors == "dualdist run: rank 2 on hostB ended with exit code 3; ending the others.\n"
    assert families().left(0) == []


@pytest.mark.usefixtures("hosts")
def test_the_hosts_of_an_allocation_are_used(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "nodes"
    file.write_text("hostA\nhostB\nhostB\n")
    monkeypatch.setenv("PBS_NODEFILE", str(file))
    ended = run("sh", "-c", "echo $DUALDIST_RANK of $DUALDIST_SIZE, $DUALDIST_LOCAL_SIZE here")
    assert ended.code == 0
    assert ended.errors == "dualdist run: the hosts are hostA:1,hostB:2, from PBS_NODEFILE.\n"
    assert [ended.written(rank).decode() for rank in range(3)] == [
        "0 of 3, 1 here\n",
        "1 of 3, 2 here\n",
        "2 of 3, 2 here\n",
    ]


@pytest.mark.usefixtures("hosts")
def test_names_and_values_arrive_unchanged_and_the_secret_is_on_no_command_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = "a b'c\"$HOME`id`\\ \n*;&|<>!#~é\udcff"
    folder = tmp_path / odd
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ODD", odd)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    source = """
    import glob, os, sys
    print(ascii([os.getcwd(), os.environ["ODD"], sys.argv[1], sys.executable, os.environ.get("CUDA_VISIBLE_DEVICES")]))
    lines = [open(path, "rb").read() for path in glob.glob("/proc/[0-9]*/cmdline") if os.path.exists(path)]
    assert any(b"ssh" in line for line in lines)
    print(sum(os.environ["DUALDIST_SECRET"].encode() in line for line in lines))
    """
    for flags, devices in (((), None), (("--env", "CUDA_VISIBLE_DEVICES"), "3")):
        ended = run("-H", "hostA:1", *flags, *python(source, odd))
        assert ended.code == 0
        shown, secrets = ended.written(0).decode().splitlines()
        assert shown == ascii([str(folder), odd, odd, sys.executable, devices])
        assert secrets == "0"


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize(("host", "words"), [("closed", "the gate is shut"), ("silent", "silent"), ("nobody", "ssh")])
def test_the_error_names_a_host_that_cannot_be_reached(host: str, words: str, run: Run) -> None:
    limit = ("--start-timeout", "2") if host == "silent" else ()  # the others end by themselves
    ended = run("-H", f"hostA:1,{host}:1", *limit, "sleep", "1000")
    assert ended.code in (1, 255)
    assert host in ended.errors and words in ended.errors
    assert ended.errors.count("dualdist run:") == 1


@pytest.mark.only_ci(where=lambda mode: mode != "garbage")
@pytest.mark.parametrize("mode", ["nothing", "garbage", "a wrong line"])
def test_what_answers_in_place_of_ssh_is_ended(
    mode: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = {"nothing": ":", "garbage": "head -c 200000 /dev/urandom", "a wrong line": "echo Welcome"}
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\n{written[mode]}\nsleep 1000\n")
    ssh.chmod(0o755)
    mark = f"STRAY={secrets.token_hex(8)}"
    monkeypatch.setenv(*mark.split("="))
    monkeypatch.setenv("DUALDIST_SSH", str(ssh))
    ended = run("-H", "192.0.2.1:1", "--network-interface", "lo", "--start-timeout", "1", "true")
    assert ended.code == 1 and ended.errors.count("dualdist run:") == 1
    assert "192.0.2.1 did not answer within 1 s" in ended.errors
    assert not any(mark.encode() in environment for environment in environments())


@pytest.mark.usefixtures("hosts")
def test_a_lost_connection_ends_the_job_and_the_processes_of_the_lost_host(run: Run, families: Families) -> None:
    source = FAMILY + (
        "def parent(pid): return int(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1])\n"
        "if os.environ['DUALDIST_RANK'] == '1': os.kill(parent(parent(os.getppid())), 9)\n"
        "signal.pause()\n"
    )
    ended = run("-H", "hostA:1,hostB:1", *python(source))
    assert ended.code == 255
    assert "hostB, with rank 1, is lost: the connection was lost" in ended.errors
    assert families().left() == []


@pytest.mark.only_ci(where=lambda number, host: (number, host) != (signal.SIGSEGV, "hostA"))
@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("host", ["localhost", "hostA"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_an_agent_that_is_killed_leaves_nothing_running(
    number: signal.Signals, host: str, run: Run, families: Families
) -> None:
    source = STUBBORN + "os.kill(os.getppid(), int(sys.argv[1]))\nsignal.pause()\n"
    assert run("-H", f"{host}:1", *python(source, str(int(number)))).code in (128 + number, 255)
    assert families().left(0) == []


@pytest.mark.only_ci
@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("host", ["localhost", "hostA"])
def test_an_agent_that_is_stopped_is_ended_with_the_job(
    host: str, run: Run, families: Families, tmp_path: Path
) -> None:
    source = FAMILY + (
        "if os.environ['DUALDIST_RANK'] == '1':\n"
        "    open(sys.argv[1]).read()\n"
        "    sys.exit(3)\n"
        "with open(f\"{os.environ['FAMILIES']}/{os.getppid()}\", 'w'):\n"
        "    os.kill(os.getppid(), signal.SIGSTOP)\n"
        "open(sys.argv[1], 'w').close()\n"
        "signal.pause()\n"
    )
    fifo = tmp_path / "stopped"
    os.mkfifo(fifo)
    other = {"localhost": "hostA", "hostA": "localhost"}[host]
    assert run("-H", f"{host}:1,{other}:1", *python(source, str(fifo))).code == 3
    assert families().left(0) == []


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("host", [pytest.param("localhost", marks=pytest.mark.only_ci), "hostA"])
def test_processes_that_fork_for_ever_end_with_the_job(host: str, run: Run) -> None:
    source = """
    import os, signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(4):
        if os.fork() == 0:
            while True:
                if os.fork():
                    os._exit(0)
    """
    mark = f"FORKS={secrets.token_hex(8)}"
    assert run("-H", f"{host}:1", "--env", mark, *python(source)).code == 0
    for _ in range(20):  # one scan can miss a process that lives for a millisecond
        assert not any(mark.encode() in environment for environment in environments())


@pytest.mark.usefixtures("hosts")
def test_a_host_ends_its_processes_when_the_launcher_is_silent(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_SILENCE_SECONDS", 0.1)
    monkeypatch.setattr(job, "_BEAT_SECONDS", 1000.0)
    assert run("-H", "hostA:1", "sleep", "1000").code != 0


@pytest.mark.only_ci(where=lambda number: number != signal.SIGTERM)
@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_every_process_on_every_host(
    number: signal.Signals, run: Run, families: Families
) -> None:
    source = FAMILY + (
        "if os.environ['DUALDIST_RANK'] == '1': os.kill(int(sys.argv[1]), int(sys.argv[2]))\nsignal.pause()\n"
    )
    # If the parent of this process ignores the signal, the launcher would ignore it too.
    before = signal.signal(number, lambda *_: None)
    try:
        ended = run("-H", "localhost:1,hostA:1", *python(source, str(os.getpid()), str(int(number))))
    finally:
        signal.signal(number, before)
    assert ended.code == 128 + number
    assert f"dualdist run: received {number.name}; ending all processes.\n" in ended.errors
    assert families().left(0) == []


@pytest.mark.usefixtures("hosts")
def test_a_launcher_that_is_killed_leaves_nothing_running(families: Families) -> None:
    command = [*RUN, "-H", "hostA:1,localhost:1", *python(FAMILY + "signal.pause()")]
    with open("/dev/zero", "rb") as input_that_nobody_reads:
        launcher = subprocess.Popen(command, cwd=ROOT, stdin=input_that_nobody_reads, stdout=subprocess.PIPE)
    try:
        assert launcher.stdout is not None
        for _ in range(2):  # until both have started
            launcher.stdout.readline()
        family = families()
        launcher.kill()
        assert family.left() == []
    finally:
        launcher.kill()
        launcher.communicate()


@pytest.mark.only_ci(where=lambda backend: backend == "horovod")
@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize(
    ("backend", "where", "six"),
    [
        ("torch", "hostA:2,localhost:1", ["0 3 0 2 0 2", "1 3 1 2 0 1", "2 3 0 1 1 2"]),
        ("horovod", "localhost:1,hostA:1", ["0 2 0 1 0 2", "1 2 0 1 1 2"]),
    ],
)
def test_several_hosts_join_one_world_on_every_backend(
    backend: str, where: str, six: list[str], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    source = """
    import torch, dualdist as hvd
    hvd.init()
    total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()
    six = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    print(*six, hvd.backend_name(), hvd.launcher_name(), total)
    """
    ended = run("-H", where, "--backend", backend, *python(source))
    assert ended.code == 0
    total = sum(range(1, len(six) + 1))
    for rank, numbers in enumerate(six):
        assert ended.written(rank).decode() == f"{numbers} {backend} dualdist run {total:.1f}\n"


@pytest.mark.parametrize(
    ("launcher", "rank", "size", "times"),
    [("srun", 0, 2, 1), ("srun", 1, 2, 0), ("srun", 0, 1, 0), ("mpirun", 0, 3, 1)],
)
def test_the_first_of_several_tasks_warns_that_each_has_a_world_of_its_own(
    launcher: str, rank: int, size: int, times: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_mpi = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
    rank_from, size_from = of_mpi if launcher == "mpirun" else ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    monkeypatch.setenv(rank_from, str(rank))
    monkeypatch.setenv(size_from, str(size))
    ended = run("-np", "1", "true")
    assert ended.code == 0
    said = f"dualdist run: {launcher} started {size} tasks ({size_from}), and each copy of `dualdist run` in them has"
    assert (ended.errors.count(said), ended.errors.count("\n")) == (times, times)


def test_modules_in_the_current_folder_do_not_replace_those_of_python(tmp_path: Path) -> None:
    for name in ("enum", "json", "socket", "selectors"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError('imported')\n")
    launch = tmp_path / "bin" / "launch.py"
    launch.parent.mkdir()
    launch.write_text("import sys\nfrom dualdist.cli import main\nsys.exit(main())\n")
    ended = subprocess.run(
        [sys.executable, launch, "run", "-np", "2", "echo", "started"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout.count("started")) == (0, 2), ended.stderr

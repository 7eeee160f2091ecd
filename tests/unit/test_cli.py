"""The command line of `dualdist run`. It takes all options of horovodrun and silently ignores none."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dualdist.cli import main
from dualdist.processes import command as run
from dualdist.processes.command import REFUSED, TUNING, Tuning, variables_of

from ..helpers.requirements import need

HOROVODRUN = """
--version -v --num-proc -np --check-build -cb --disable-cache --start-timeout --network-interfaces --network-interface
--output-filename --verbose --config-file --ssh-port -p --ssh-identity-file -i --fusion-threshold-mb --cycle-time-ms
--cache-capacity --hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather
--no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune --no-autotune --autotune-log-file
--autotune-warmup-samples --autotune-steps-per-sample --autotune-bayes-opt-max-samples
--autotune-gaussian-process-noise --min-np --min-num-proc --max-np --max-num-proc --slots-per-host --elastic-timeout
--reset-limit --blacklist-cooldown-range --timeline-filename --timeline-mark-cycles --no-timeline-mark-cycles
--no-stall-check --stall-check --stall-check-warning-time-seconds --stall-check-shutdown-time-seconds
--mpi-threads-disable --no-mpi-threads-disable --mpi-args --tcp --binding-args --num-nccl-streams --thread-affinity
--gloo-timeout-seconds --log-level --log-with-timestamp --log-without-timestamp -prefix-timestamp
--prefix-output-with-timestamp --log-hide-timestamp --no-log-hide-timestamp --hosts -H --hostfile -hostfile
--host-discovery-script --gloo --mpi --jsrun
""".split()
"""The options of horovodrun 0.28.1."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False)
    run.add_arguments(made)
    return made


def parsed(*arguments: str) -> argparse.Namespace:
    return parser().parse_args([*arguments, "command"])


def test_every_option_of_horovodrun_is_known() -> None:
    known = {flag for action in parser()._actions for flag in action.option_strings}
    assert set(HOROVODRUN) <= known


def test_the_recorded_options_are_those_of_the_installed_horovodrun() -> None:
    found = importlib.util.find_spec("horovod")
    need(found is not None, "needs Horovod")
    assert found is not None and found.submodule_search_locations
    source = Path(next(iter(found.submodule_search_locations))) / "runner" / "launch.py"
    recorded = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            recorded |= {text.value for text in node.args if isinstance(text, ast.Constant)}
    assert {name for name in recorded if str(name).startswith("-")} == set(HOROVODRUN)


@pytest.mark.parametrize("flag", REFUSED)
def test_the_error_names_an_unsupported_option(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-np", "1", flag, "1", "false"]) == 2
    errors = capsys.readouterr().err
    assert f"`{flag}` is not supported" in errors and errors.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["--fusion-threshold-mb", "32"], {"HOROVOD_FUSION_THRESHOLD": "33554432"}),
        (["--cycle-time-ms", "2.5"], {"HOROVOD_CYCLE_TIME": "2.5"}),
        (["--no-hierarchical-allreduce"], {"HOROVOD_HIERARCHICAL_ALLREDUCE": "0"}),
        (["--autotune", "--autotune-log-file", "a b"], {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": "a b"}),
        (["--log-level", "DEBUG"], {"HOROVOD_LOG_LEVEL": "DEBUG"}),
        (
            ["--timeline-filename", "t.json", "--timeline-mark-cycles"],
            {"HOROVOD_TIMELINE": "t.json", "HOROVOD_TIMELINE_MARK_CYCLES": "1"},
        ),
        (
            ["--stall-check-warning-time-seconds", "5"],
            {"DUALDIST_STALL_WARN_SECONDS": "5", "HOROVOD_STALL_CHECK_TIME_SECONDS": "5"},
        ),
        (["--stall-check-shutdown-time-seconds", "9"], {"DUALDIST_STALL_TIMEOUT_SECONDS": "9"}),
        (["--stall-check-shutdown-time-seconds", "0"], {"DUALDIST_STALL_TIMEOUT_SECONDS": "31536000"}),
        (["--tcp"], {"NCCL_IB_DISABLE": "1"}),
    ],
)
def test_settings_become_the_variables_of_the_backend(arguments: list[str], variables: dict[str, str]) -> None:
    assert variables_of(parsed(*arguments), "horovod") == (variables, [])


def test_settings_of_horovod_are_reported_as_without_effect_on_torch() -> None:
    args = parsed("--cycle-time-ms", "3", "--autotune", "--tcp")
    assert variables_of(args, "torch") == ({"NCCL_IB_DISABLE": "1"}, ["--cycle-time-ms", "--autotune"])


@pytest.mark.parametrize("row", [row for row in TUNING if row.value not in (None, str)], ids=lambda row: row.flags[0])
def test_the_error_names_the_option_with_a_value_out_of_range(row: Tuning, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-np", "1", "--backend", "horovod", f"{row.flags[0]}=-1", "false"]) == 2
    assert row.flags[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-np", "1"], "COMMAND"),
        (["true"], "-np"),
        (["-np", "0", "true"], "-np"),
        (["-np", "2", "-H", "localhost:1", "true"], "1 slots of localhost:1"),
        (["-H", "a b:1", "true"], "'a b:1'"),
        (["--hostfile", "/nowhere/hosts", "true"], "/nowhere/hosts"),
        (["-np", "1", "--transport", "mpi", "true"], "mpirun"),
        (["-np", "1", "--gloo", "--transport", "nccl", "true"], "--gloo"),
        (["-np", "1", "--output", "/dev/null", "true"], "--output"),
        (["-np", "1", "--env", "NO_SUCH_VARIABLE", "true"], "NO_SUCH_VARIABLE"),
        (["-np", "1", "--start-timeout", "0", "true"], "--start-timeout"),
        (["-np", "1", "--timeline-mark-cycles", "--no-timeline-mark-cycles", "true"], "cannot be given together"),
        (["-np", "99999999999", "true"], "99999999999"),
        (["-H", "localhost:1,127.0.0.1:1", "true"], "localhost and 127.0.0.1 are all this one"),
        (["-H", f"{'x' * 300}:1", "true"], "x" * 300),
        (["-H", "192.0.2.1:1", "--network-interface", "none0", "true"], "'none0'"),
    ],
)
def test_the_error_for_a_wrong_command_line_is_one_line_that_names_the_problem(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *arguments]) == 2
    errors = capsys.readouterr().err
    assert words in errors and errors.count("\n") == 1


def test_a_command_for_ssh_and_a_working_directory_that_cannot_be_used_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("DUALDIST_SSH", "ssh -F 'x")
    assert main(["run", "-H", "192.0.2.1:1", "true"]) == 2
    assert "`DUALDIST_SSH` must be a command" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert main(["run", "-np", "1", "true"]) == 2
    assert "working directory" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [("-np", "\u0663"), ("-np", "1", "--frobnicate"), ("-np", "1", "--verb")])
def test_digits_of_other_scripts_unknown_options_and_abbreviations_are_errors(
    wrong: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["run", *wrong, "true"])
    errors = capsys.readouterr().err
    assert wrong[-1] in errors and errors.startswith("usage: dualdist run -np")


@pytest.mark.parametrize("words", ["migrate {script}", "migrate --diff {script}", "doctor"])
def test_an_output_that_cannot_be_written_is_one_line_and_one_without_a_reader_none(words: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import horovod.torch as hvd\n")
    command = [sys.executable, "-m", "dualdist", *words.format(script=script).split()]
    reader, without_reader = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    error = f"dualdist {words.split()[0]}: [Errno 28] No space left on device\n"
    for output, code, said in ((full, 2, error), (without_reader, 141, "")):
        for mode in ("", "1"):
            env = os.environ | {"PYTHONUNBUFFERED": mode}
            ended = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, env=env)
            assert (ended.returncode, ended.stderr) == (code, said)
        os.close(output)

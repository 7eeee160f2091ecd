"""Measures training steps between hosts: dualdist in both styles beside torch's DDP, MPI's and Horovod's ways.

    python benchmarks/hosts.py                                     # as root; several hours: see --help for less
    python benchmarks/hosts.py --hosts 2 --ranks 1 --mbit 400 --models blocks late --ways gloo --json hosts.json
    python benchmarks/hosts.py --hosts 2 --ranks 1 --mbit 1000 --latency     # calls (latency.py) in place of steps

The hosts are network namespaces of this machine, joined by a bridge; `tc ... tbf` limits what each of them sends. They
share its processors, so a row is of use only where each rank has a processor of its own. In each world, the contestants
take turns in the same processes (step_in_world.py): a ratio is the median over the rounds, then the smallest and the
greatest. MB is what the first host sends in a step; the least that an allreduce needs is 2 (h - 1) / h of the gradients
of a rank, for h hosts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models import MODELS
from report_file import write_report

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.helpers.namespace_hosts import OPEN_MPI, Network, mpirun, running_network  # noqa: E402

_NAMES = ("alpha", "beta", "gamma", "delta")
_WAYS: Mapping[str, Sequence[str]] = {
    "gloo": ("--peers", "DDP"),
    "mpi": ("--transport", "mpi", "--peers", "DDP"),
    "horovod": ("--backend", "horovod", "--peers", "Horovod"),
}
"""What carries dualdist's data -> the options of step_in_world.py."""


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    options.add_argument("--hosts", nargs="+", type=int, default=[2, 4], choices=(2, 3, 4), help="(2 4)")
    options.add_argument("--ranks", nargs="+", type=int, default=[1, 2], help="of each host (1 2)")
    options.add_argument("--mbit", nargs="+", type=int, default=[100, 400, 1000], help="of a link (100 400 1000)")
    options.add_argument("--ways", nargs="+", choices=_WAYS, default=list(_WAYS), help="(%(default)s)")
    options.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=["blocks", "resnet18", "transformer", "mixed", "late"],
        help="(%(default)s)",
    )
    options.add_argument("--latency", action="store_true", help="measure calls, over gloo, in place of steps")
    options.add_argument("--rounds", type=int, default=7, help="(%(default)s)")
    options.add_argument("--json", type=Path, metavar="FILE", help="write all figures, after each world")
    args = options.parse_args()
    figures: dict[str, Any] = {}
    for number in args.hosts:
        with running_network(_NAMES[:number]) as network:
            for ranks, mbit in itertools.product(args.ranks, args.mbit) if args.latency else ():
                print(f"{number} hosts, {ranks} ranks each, {mbit} Mbit/s", flush=True)
                with network.slow(f"{mbit}mbit", slice(None)):
                    run(network, horovodrun(network, ranks), "latency.py", "--rounds", str(args.rounds))
            if args.latency:
                continue
            for ranks, mbit, way in itertools.product(args.ranks, args.mbit, args.ways):
                world = f"{number} hosts, {ranks} ranks each, {mbit} Mbit/s, {way}"
                with network.slow(f"{mbit}mbit", slice(None)):
                    figures[world] = measured(network, ranks, way, args.models, args.rounds)
                print_world(world, figures[world])
                if args.json is not None:
                    write_report(args.json, {"worlds": figures})


def horovodrun(network: Network, ranks: int) -> Sequence[str]:
    """Return Horovod's start of a command with `ranks` processes on each host."""
    options = ("--gloo", "--network-interfaces", "net0", "-np", str(ranks * len(network.hosts)))
    return ("horovodrun", *options, "-H", hosts_of(network, ranks))


def hosts_of(network: Network, ranks: int) -> str:
    return ",".join(f"{host.name}:{ranks}" for host in network.hosts)


def measured(network: Network, ranks: int, way: str, models: Sequence[str], rounds: int) -> dict[str, Any]:
    """Return what step_in_world.py writes: model -> contestant -> figure -> a number for each round."""
    hosts = hosts_of(network, ranks)
    launcher: Sequence[str] = (sys.executable, "-m", "dualdist", "run", "-H", hosts)
    if way == "mpi":
        launcher = mpirun(hosts, "GLOO_SOCKET_IFNAME")
    elif way == "horovod":
        launcher = horovodrun(network, ranks)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.json")
        options = (*_WAYS[way], "--copies", "1", "--rounds", str(rounds), "--json", str(file))
        run(network, launcher, "step_in_world.py", *options, "--models", *models)
        found: dict[str, Any] = json.loads(file.read_text())["models"]
    return found


def run(network: Network, launcher: Sequence[str], program: str, *options: str) -> None:
    """Run a program of this folder with `launcher` on the first host. Its output goes to standard error."""
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "net0", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        network.hosts[0].command(*launcher, sys.executable, str(ROOT / "benchmarks" / program), *options),
        env=os.environ | OPEN_MPI | variables,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        check=True,
    )


def print_world(world: str, models: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]) -> None:
    """Print a row for each model and style: milliseconds, megabytes, and the ratios to the first contestant."""
    print(f"{world}: ms and MB of a step; ratio")
    for model, contestants in models.items():
        peer, *styles = contestants
        base = contestants[peer]
        shown = f"{peer} {statistics.median(base['ms']):.0f} ms {statistics.median(base['MB']):.1f} MB"
        for style in styles:
            own = contestants[style]
            ratios = [mine / theirs for mine, theirs in zip(own["ms"], base["ms"], strict=True)]
            shown += f"; {style} {statistics.median(own['MB']):.1f} MB {statistics.median(ratios):.2f}"
            shown += f" ({min(ratios):.2f}-{max(ratios):.2f})"
        print(f"  {model:12} {shown}", flush=True)


if __name__ == "__main__":
    main()

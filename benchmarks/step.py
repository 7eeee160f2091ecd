"""Measures one training step of models, and compares dualdist with torch's DDP, Horovod and others.

    python benchmarks/step.py                                # everything that is installed: about half an hour
    python benchmarks/step.py --models mlp small --contestants DDP 'dualdist torch+gloo module' --json step.json
    python benchmarks/step.py --hook allreduce              # with a communication hook, for those that have it

In each round, each contestant trains all models in new processes. A ratio is the median over the rounds, then the
smallest and the greatest. CPU time (user and system, all threads) depends less on what else the machine does.
"""

from __future__ import annotations

from comparison import compare, parser
from hooks import HOOKS
from models import MODELS
from trainers import TRAINERS


def main() -> None:
    options = parser(__doc__, TRAINERS)
    options.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    options.add_argument("--hook", choices=HOOKS, default="none", help="a communication hook (%(default)s)")
    args = options.parse_args()
    chosen = {name: TRAINERS[name] for name in args.contestants if args.hook == "none" or TRAINERS[name].takes_hooks}
    figures = [f"{name} {kind}" for name in args.models for kind in ("ms", "CPU ms")]
    compare("step_worker.py", chosen, [args.hook, *args.models], figures, args)


if __name__ == "__main__":
    main()

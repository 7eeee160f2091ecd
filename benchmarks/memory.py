"""Measures the greatest resident memory of a process that trains one model.

Of shared memory, each process that uses it is charged an equal part (proportional set size, proc(5)).

python benchmarks/memory.py
python benchmarks/memory.py --model resnet18 --json memory.json
"""

from __future__ import annotations

from comparison import compare, parser
from models import MODELS
from trainers import TRAINERS


def main() -> None:
    options = parser(__doc__, TRAINERS, rounds=3)
    options.add_argument("--model", choices=MODELS, default="mlp", help="(%(default)s)")
    args = options.parse_args()
    chosen = {name: TRAINERS[name] for name in args.contestants}
    compare("step_worker.py", chosen, ["none", args.model], [f"{args.model} peak MB"], args)


if __name__ == "__main__":
    main()

"""Measures saves of a sharded model beside torch's own: the longest pause of training, and the greatest memory.

python benchmarks/sharded_checkpoint.py
python benchmarks/sharded_checkpoint.py --rounds 3 --json sharded.json

Each way to save has processes of its own, which save, train some steps and wait for the end of the save, three times.
"""

from __future__ import annotations

from comparison import compare, parser
from contestant import Contestant
from sharded_checkpoint_worker import WAYS


def main() -> None:
    contestants = {name: Contestant(lambda: None) for name in WAYS}
    options = parser(__doc__, contestants, rounds=5, baseline="torch async_save")
    args = options.parse_args()
    chosen = {name: contestants[name] for name in args.contestants}
    figures = ["longest pause s", "slowest step s", "in all s", "CPU s", "peak MB"]
    compare("sharded_checkpoint_worker.py", chosen, [], figures, args)


if __name__ == "__main__":
    main()

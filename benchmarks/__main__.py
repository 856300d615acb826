"""``python -m benchmarks``: step time of shardwise and its peers on local CPU ranks.

The engines take turns within one run, so that what disturbs the machine disturbs all of them, and
what is printed is the median of each relative to that of DDP. Nothing is asserted.
"""

import argparse
from pathlib import Path

from torch.multiprocessing.spawn import spawn

from benchmarks.engines import ENGINES
from benchmarks.steps import Setting, run_rank


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--vs", default=",".join(ENGINES), help="engines, by comma")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    engines = tuple(name.strip() for name in options.vs.split(","))
    unknown = [name for name in engines if name not in ENGINES]
    if unknown:
        parser.error(f"unknown engines {unknown}; expected some of {', '.join(ENGINES)}")
    setting = Setting(
        ranks=options.ranks,
        rounds=options.rounds,
        width=options.width,
        layers=options.layers,
        context=options.context,
        batch=options.batch,
        engines=engines,
    )
    spawn(run_rank, args=(setting, options.out), nprocs=setting.ranks)


if __name__ == "__main__":
    main()

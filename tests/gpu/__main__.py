"""``python -m tests.gpu [--device cpu|simulated] [--only WORD] [--out FILE]``."""

import argparse
import os
import platform
import sys
from pathlib import Path

# torch asks NVML whether there is a card: a process that has asked the driver cannot be forked.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import torch

from tests.gpu.registry import Check
from tests.gpu.runner import Results, find_cards, load_checks, run_checks

DEFAULT_OUT = Path("benchmarks/results/gpu-checks.json")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu", "simulated"), default="cuda")
    parser.add_argument(
        "--only", nargs="*", default=[""], metavar="WORDS", help="checks with such words"
    )
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    options = parser.parse_args()
    cards = find_cards() if options.device == "cuda" else []
    if options.device == "cuda" and not cards:
        print("no GPU found; --device cpu runs the checks that make sense on a CPU")  # noqa: T201
        return 0
    load_checks()
    if cards:
        find_cards()  # again: what was imported may have asked the driver

    def is_chosen(one: Check) -> bool:
        return any(words in f"{one.section}: {one.name}" for words in options.only)

    out = options.out or (DEFAULT_OUT if options.device == "cuda" else None)
    results = Results(out, {"device": options.device, "cards": cards, **versions()})
    run_checks(is_chosen, options.device, len(cards), results)
    if not results.rows:
        parser.error(f"--only {options.only}: no check has such words in its section or name")
    counts = dict.fromkeys(("ok", "skipped", "FAILED", "HUNG"), 0)
    for row in results.rows:
        counts[row["verdict"]] += 1
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))  # noqa: T201
    return 1 if results.num_bad else 0


def versions() -> dict[str, str | None]:
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main())

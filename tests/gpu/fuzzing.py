"""The fuzzer's programs on several ranks of one card, against one process on the host.

`programs.txt` has programs that were drawn before, because hypothesis may not be installed.
"""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from tests.gpu.registry import Context, check

FUZZ = "fuzz"
PARTS = 4  # processes for the programs of one number of ranks: a crash loses only one part
SHOWN = 4


def programs(ranks: int) -> list[Any]:
    """Return the programs for ``ranks`` ranks."""
    if importlib.util.find_spec("hypothesis") is None:
        sys.modules["hypothesis"] = mock.MagicMock()  # it would only draw others
    from tests.fuzz import programs as names  # noqa: PLC0415

    lines = Path(__file__).with_name("programs.txt").read_text(encoding="utf-8").splitlines()
    cases = [eval(line, vars(names)) for line in lines]
    return [case for case in cases if case.sharding.ranks == ranks]


for ranks in (2, 4):
    for part in range(PARTS):
        options = {"ranks": ranks, "group": "monitored"}
        values = {"ranks": ranks, "part": part}

        @check(FUZZ, f"programs {part} of {PARTS}, {ranks} ranks", options, values)
        def _fuzz(context: Context, ranks: int, part: int) -> None:
            own = programs(ranks)[part::PARTS]
            if context.kind == "cpu":  # `tests/fuzz` runs others
                own = own[:1] if part == 0 else []
            run_programs(context, own)


def run_programs(context: Context, cases: list[Any]) -> None:
    from tests.fuzz.compare import Comparison, prepared  # noqa: PLC0415 (needs hypothesis, or not)

    class OnCard(Comparison):
        loses_results = True

    def compare(case: Any) -> tuple[str, ...]:
        if context.simulation is None:
            return OnCard(case, context.device).run().problems
        from tests.streams.random_programs import OnDevice  # noqa: PLC0415

        return OnDevice(case, context.simulation).run().problems

    problems = []
    for number, case in enumerate(cases):
        context.report("last program", number)
        other = replace(case, seed=case.seed + 1000 * context.earlier_runs)
        with prepared(other):
            found = compare(other)
        problems += [f"{problem} in {other!r}" for problem in found[:SHOWN]]
    context.report("programs", len(cases))
    assert not problems, "\n".join(problems)

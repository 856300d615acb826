"""Medians of ratios, noisy rounds and heats, compared with values calculated by hand."""

import pytest

from shardwise.bench.compare import loss_gap, plan_heats
from shardwise.bench.harness import Figures, Round, interleave, make_table, medians, merge, ratio
from shardwise.bench.options import Setting
from shardwise.train.model import gpt_shape

SHAPE = gpt_shape(vocabulary=64, context=8, width=16, layers=1, heads=2)


def step(seconds: float, loss: float = 1.0, **communication: float) -> Figures:
    return {"seconds": seconds, "cpu_seconds": seconds, "loss": loss, **communication}


def rank_round(reference: float, **cases: Figures) -> Round:
    return Round(cases, reference, load=1.0, busy_cores=1.3, own_cores=0.4)


def test_every_case_is_measured_once_a_round_in_an_order_that_rotates() -> None:
    calls: list[tuple[str, int]] = []

    def measure(name: str, number: int) -> Figures:
        calls.append((name, number))
        return {"seconds": 1.0}

    cases = {name: lambda number, name=name: measure(name, number) for name in "abc"}
    rounds = interleave(cases, 3, title="a test", warm_up=1, visible=False)
    orders = ["".join(name for name, of in calls if of == number) for number in range(4)]
    assert orders == ["cab", "abc", "bca", "cab"]
    assert [sorted(round_.cases) for round_ in rounds] == [["a", "b", "c"]] * 3


def test_ranks_are_merged() -> None:
    views = [
        [rank_round(1.0, ddp=step(2.0, loss=1.0, busy_seconds=2.0, exposed_seconds=1.0))],
        [rank_round(9.0, ddp=step(4.0, loss=2.0, busy_seconds=4.0, exposed_seconds=0.0))],
    ]
    [merged] = merge(views)
    assert merged.cases["ddp"] == {
        "seconds": 4.0,
        "cpu_seconds": 3.0,
        "loss": 1.5,
        "busy_seconds": 3.0,
        "exposed_seconds": 0.5,
    }
    assert merged.reference_seconds == 1.0
    assert merged.others == pytest.approx(0.5)  # 1.3 busy cores, of which each rank uses 0.4


def test_noisy_rounds_are_left_out_and_marked() -> None:
    views = [
        rank_round(reference, ddp=step(2.0), other=step(2.0 * times))
        for reference, times in zip(
            [1.0, 1.0, 1.21, 1.0, 1.2], [1.0, 2.0, 50.0, 2.0, 3.0], strict=True
        )
    ]
    rounds = merge([views])
    assert [round_.is_noisy for round_ in rounds] == [False, False, True, False, False]
    found = ratio(rounds, "other", "ddp")
    assert (found.median, found.least, found.most) == (2.0, 1.0, 3.0)
    assert str(found) == "2.00 (1.00-3.00)"
    assert medians(rounds, "other")["seconds"] == 4.0


def test_the_median_is_of_ratios_in_one_round() -> None:
    """The ratio of medians would be 1 here, although the engine was slower in each round."""
    views = [rank_round(1.0, ddp=step(s), other=step(2 * s)) for s in (1.0, 2.0, 4.0)]
    assert ratio(merge([views]), "other", "ddp").median == 2.0


def test_the_loss_gap_counts_noisy_rounds() -> None:
    views = [
        rank_round(reference, ddp=step(1.0, loss=1.0), other=step(1.0, loss=1.0 + gap))
        for reference, gap in ((1.0, 0.25), (1.0, 0.0), (5.0, -0.5))
    ]
    rounds = merge([views])
    assert loss_gap(rounds, "other") == 0.5
    assert loss_gap(rounds, "ddp") == 0.0


def test_engines_of_several_heats_have_one_base() -> None:
    rounds = [
        *merge([[rank_round(1.0, ddp=step(1.0), one=step(2.0))]]),
        *merge([[rank_round(1.0, ddp=step(2.0), two=step(3.0))]]),
    ]
    found = {name: ratio(rounds, name, "ddp").median for name in ("ddp", "one", "two")}
    assert found == {"ddp": 1, "one": 2, "two": 1.5}


def test_a_table_has_a_dash_for_what_was_not_measured() -> None:
    columns = (("ms", "seconds", str), ("MB", "bytes", str))
    rows: dict[str, Figures] = {"a": {"seconds": 1.0}, "b": {"bytes": 2.0}, "c": {"other": 3.0}}
    table = make_table("a title", columns, rows)
    assert [list(column.cells) for column in table.columns] == [
        ["a", "b"],
        ["1.0", "-"],
        ["-", "2.0"],
    ]


@pytest.mark.parametrize(
    ("room", "heats"),
    [
        (0, [["ddp", "fsdp1", "fsdp2", "shardwise-zero2"]]),
        (10**9, [["ddp", "fsdp1", "fsdp2", "shardwise-zero2"]]),
        # ddp 32 bytes, a sharded one 24, of 1000 parameters on two ranks
        (90_000 / 0.6, [["ddp", "fsdp1", "fsdp2"], ["ddp", "shardwise-zero2"]]),
        (1, [["ddp", "fsdp1"], ["ddp", "fsdp2"], ["ddp", "shardwise-zero2"]]),
    ],
)
def test_heats_fit_into_memory(room: float, heats: list[list[str]]) -> None:
    engines = ("ddp", "fsdp1", "fsdp2", "shardwise-zero2")
    setting = Setting("x", SHAPE, 2, "fp32", engines, rounds=2, batch=1)
    assert plan_heats(setting, 1000, int(room)) == heats

"""Medians of ratios, noisy rounds, heats; by hand."""

import pytest

from shardwise.bench.figures import Round, merge, summarise
from shardwise.bench.machine import Clock
from shardwise.bench.options import Setting
from shardwise.bench.rounds import Communication, RankRound, Turn, plan_heats
from shardwise.train.model import Shape

SHAPE = Shape(vocabulary=64, context=8, width=16, layers=1, heads=2)


def turn(seconds: float, loss: float = 1.0, told: Communication | None = None) -> Turn:
    return Turn(seconds, cpu_seconds=seconds, page_faults=10, loss=loss, communication=told)


def rank_round(reference: float, **turns: Turn) -> RankRound:
    began, ended = Clock(now=0.0, own=0.0, all=0.0), Clock(now=10.0, own=4.0, all=13.0)
    return RankRound(began, ended, reference, load=1.0, turns=turns)


def rounds(references: list[float], ratios: list[float]) -> list[Round]:
    views = [
        rank_round(reference, ddp=turn(2.0), other=turn(2.0 * ratio))
        for reference, ratio in zip(references, ratios, strict=True)
    ]
    return merge(0, [views])


def test_ranks_are_merged() -> None:
    told = [Communication(busy=2.0, exposed=1.0), Communication(busy=4.0, exposed=0.0)]
    views = [
        [rank_round(1.0, ddp=turn(2.0, loss=1.0, told=told[0]))],
        [rank_round(9.0, ddp=turn(4.0, loss=2.0, told=told[1]))],
    ]
    [merged] = merge(3, views)
    of_both = merged.turns["ddp"]
    assert (of_both.seconds, of_both.cpu_seconds, of_both.loss) == (4.0, 3.0, 1.5)
    assert of_both.communication == Communication(busy=3.0, exposed=0.5)
    assert (merged.heat, merged.reference_seconds) == (3, 1.0)
    assert merged.others == pytest.approx(0.5)  # 13 busy seconds, 8 of them ours, in 10


def test_noisy_rounds_are_left_out_and_marked() -> None:
    several = rounds([1.0, 1.0, 1.21, 1.0, 1.2], [1.0, 2.0, 50.0, 2.0, 3.0])
    assert [one.is_noisy for one in several] == [False, False, True, False, False]
    ratio = summarise(several, "ddp")["other"].ratio
    assert (ratio.median, ratio.least, ratio.most) == (2.0, 1.0, 3.0)


def test_the_median_is_of_ratios_in_one_round() -> None:
    """Ratios of medians would say 1 here, and hide that the engine was slower in each round."""
    views = [rank_round(1.0, ddp=turn(s), other=turn(2 * s)) for s in (1.0, 2.0, 4.0)]
    assert summarise(merge(0, [views]), "ddp")["other"].ratio.median == 2.0


def test_the_loss_gap_counts_noisy_rounds() -> None:
    views = [
        rank_round(reference, ddp=turn(1.0, loss=1.0), other=turn(1.0, loss=1.0 + gap))
        for reference, gap in ((1.0, 0.25), (1.0, 0.0), (5.0, -0.5))
    ]
    times = summarise(merge(0, [views]), "ddp")
    assert times["other"].loss_gap == 0.5
    assert times["ddp"].loss_gap == 0.0
    assert times["other"].exposed_seconds is None


def test_engines_of_several_heats_have_one_base() -> None:
    several = [
        *merge(0, [[rank_round(1.0, ddp=turn(1.0), one=turn(2.0))]]),
        *merge(1, [[rank_round(1.0, ddp=turn(2.0), two=turn(3.0))]]),
    ]
    times = summarise(several, "ddp")
    assert {name: t.ratio.median for name, t in times.items()} == {"ddp": 1, "one": 2, "two": 1.5}


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

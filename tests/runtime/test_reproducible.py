"""With ``reproducible=V`` training has the same bits on any number of ranks that divides V."""

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.covering import covered_first, pairwise
from tests.ranks import run_on
from tests.runtime.leaf_runs import Options, Trained, train

STEPS, MANY_STEPS = 3, 30
DTYPES = (torch.float32, torch.bfloat16)
# Number of ranks, strategy, and rows of its mesh.
WAYS = [
    *product((2, 4, 8), ("fsdp", "ddp", "zero1", "zero2"), (0,)),
    *((8, strategy, replicas) for strategy in ("hsdp", "hfsdp") for replicas in (2, 4)),
]
PREFETCHES = (0, 2)
MODELS = ("gpt", "llama", "mixtral")
PAIRS = pairwise(MODELS, ("adamw", "muon"), DTYPES, WAYS, PREFETCHES)
SOME_WAYS = [
    (2, "fsdp", 0),
    (4, "ddp", 0),
    (8, "zero1", 0),
    (4, "zero2", 0),
    (8, "hsdp", 2),
    (8, "hfsdp", 4),
]
SOME = [
    *(
        ("gpt", ("adamw", "muon")[i % 2], DTYPES[i // 2 % 2], way, PREFETCHES[i // 3 % 2])
        for i, way in enumerate(SOME_WAYS)
    ),
    ("gpt, reentrant", "adamw", torch.bfloat16, (8, "fsdp", 0), 2),
    ("mixtral", "adamw", torch.float32, (2, "zero2", 0), 0),
]


@cache
def expected(options: Options, steps: int) -> Trained:
    """What one rank trains."""
    [result] = run_on(1, train, options, range(steps))
    return result


def check(options: Options, size: int, steps: int) -> None:
    alone = replace(options, strategy="fsdp", replicas=0, prefetch=1)
    reference = expected(alone, steps)
    assert len(set(reference.losses)) == steps, "it trains"
    results = run_on(size, train, options, range(steps))
    for result in results:
        assert result == reference, unsteady((size, options, results[0]), (1, alone, reference))


def unsteady(*runs: tuple[int, Options, Trained]) -> str:
    """Which of these numbers of ranks train the same again, as ranks with a changed setting do."""
    again = {
        size: run_on(size, train, options, range(len(before.losses)))[0] == before
        for size, options, before in runs
    }
    return f"the same again, by the number of ranks: {again}"


@pytest.mark.parametrize(
    ("model", "optimizer", "dtype", "way", "prefetch", "steps"),
    [
        *((*row, STEPS) for row in SOME),
        *(pytest.param(*row, MANY_STEPS, marks=pytest.mark.thorough) for row in PAIRS),
    ],
    ids=str,
)
def test_training_has_the_same_bits_on_any_ranks(
    model: str,
    optimizer: str,
    dtype: torch.dtype,
    way: tuple[int, str, int],
    prefetch: int,
    steps: int,
) -> None:
    size, strategy, replicas = way
    options = Options(model, optimizer, dtype, strategy, replicas, prefetch)
    check(options, size, steps)


@pytest.mark.parametrize(
    ("optimizer", "dtype", "size"),
    covered_first(product(("sgd", "rmsprop", "soap", "adam8bit"), DTYPES, (4, 2, 8))),
    ids=str,
)
def test_other_optimizers_have_the_same_bits(optimizer: str, dtype: torch.dtype, size: int) -> None:
    check(Options("gpt", optimizer, dtype), size, STEPS)


@pytest.mark.parametrize(
    ("steps", "dtype"),
    [(2, torch.float32), pytest.param(10, torch.bfloat16, marks=pytest.mark.thorough)],
    ids=str,
)
def test_a_run_may_continue_on_another_number_of_ranks(
    tmp_path: Path, steps: int, dtype: torch.dtype
) -> None:
    options = Options("gpt", "muon", dtype)
    whole, *_ = run_on(4, train, options, range(3 * steps))
    losses: list[str] = []
    load = None
    for part, size in enumerate((8, 2, 1)):
        save = tmp_path / str(part)
        its_steps = range(part * steps, (part + 1) * steps)
        result, *_ = run_on(size, train, options, its_steps, load, save)
        losses += result.losses
        load = save
    assert tuple(losses) == whole.losses
    assert (result.parameters, result.states) == (whole.parameters, whole.states)

"""C9: no module global is per rank, so ranks can be threads of one process."""

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

import shardwise as sw
from tests.features.training import TrippingAdamW
from tests.forked import run_forked
from tests.models import WIDTH, Block, build
from tests.ranks import on_ranks
from tests.runtime.one_process import (
    assert_equal_steps,
    full,
    squares,
)

RANKS = 2


def test_ranks_may_be_threads_of_one_process() -> None:
    # In a separate process: torch's threaded process group replaces globals of torch.
    assert sorted(run_forked(_train_in_threads)) == [*range(RANKS)]


def _train_in_threads() -> list[int]:
    """The ranks that trained as one process, and undid a step that failed on one of them."""
    from torch.testing._internal.distributed import multi_threaded_pg  # noqa: PLC0415

    multi_threaded_pg._install_threaded_pg()  # type: ignore[no-untyped-call]
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    seed, store = threading.Lock(), HashStore()
    equal: list[int] = []
    ranks = [
        threading.Thread(target=_rank, args=(rank, store, seed, equal), daemon=True)
        for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return equal


def _rank(rank: int, store: HashStore, seed: threading.Lock, equal: list[int]) -> None:
    dist.init_process_group("threaded", rank=rank, world_size=RANKS, store=store)
    with seed:  # all threads share torch's generator
        reference, model = build("stack"), build("stack")
    sw.fully_shard(model, units=Block)
    batch = (torch.arange(12 * WIDTH).double().view(12, WIDTH) / 7).sin()
    assert_equal_steps(model, reference, batch=lambda: batch)
    _undo_a_step(model, is_failing=rank == 1)
    equal.append(rank)


def _undo_a_step(model: nn.Module, *, is_failing: bool) -> None:
    """C8 where a collective cannot be left, as on NCCL: the vote itself carries the bad news.

    The threaded process group has no exchanges between two ranks either.
    """
    optimizer = TrippingAdamW(model.parameters(), lr=1e-2)

    def step() -> None:
        with sw.transaction(model, optimizer):
            squares(model, torch.ones(2, WIDTH).double()).backward()
            optimizer.step()
            optimizer.zero_grad()

    step()
    before = [full(p.detach()) for p in model.parameters()]
    optimizer.trips = is_failing
    with pytest.raises(ValueError if is_failing else sw.PeerAborted):
        step()
    after = [full(p.detach()) for p in model.parameters()]
    assert all(map(torch.equal, before, after))
    optimizer.trips = False
    step()


@pytest.mark.parametrize("drop_in", [False, True])
@on_ranks(2)
def test_another_thread_gets_shards_while_units_compute(drop_in: bool) -> None:
    """torchft calls ``state_dict`` on a thread of its own, during forward."""
    model = build("stack")
    options: dict[str, Any] = {"granularity": "dim"} if drop_in else {}
    sw.fully_shard(model, units=Block, **options)
    expected = {name: value.to_local().clone() for name, value in model.state_dict().items()}
    found: list[dict[str, Any]] = []

    def save(*_: object) -> None:
        thread = threading.Thread(target=lambda: found.append(model.state_dict()))
        thread.start()
        thread.join()

    model.layers[1].up.register_forward_hook(save)
    model(torch.randn(4, WIDTH, dtype=torch.float64)).sum().backward()
    assert len(found) == 1
    for name, value in expected.items():
        assert torch.equal(found[0][name].to_local(), value), name
    with sw.gathered(model):
        assert not any(isinstance(value, DTensor) for value in model.state_dict().values())

"""C8 where a collective cannot be left, as on NCCL: the vote itself carries the bad news.

Ranks are threads of one process, whose process group has no point-to-point exchanges either.
"""

import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

import shardwise as sw
from tests.features.training import TrippingAdamW
from tests.forked import run_forked
from tests.models import WIDTH, Block, build

RANKS = 2


def test_a_failing_optimizer_is_voted_on() -> None:
    # In a process of its own: torch's threaded process group replaces globals of torch's.
    assert sorted(run_forked(_train_in_threads)) == [*range(RANKS)]


def _train_in_threads() -> list[int]:
    """The ranks on which the failing step was undone."""
    from torch.testing._internal.distributed import multi_threaded_pg  # noqa: PLC0415

    multi_threaded_pg._install_threaded_pg()  # type: ignore[no-untyped-call]
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    seed, store = threading.Lock(), HashStore()
    undone: list[int] = []
    ranks = [
        threading.Thread(target=_rank, args=(rank, store, seed, undone), daemon=True)
        for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return undone


def _rank(rank: int, store: HashStore, seed: threading.Lock, undone: list[int]) -> None:
    dist.init_process_group("threaded", rank=rank, world_size=RANKS, store=store)
    with seed:  # torch's generator is one for all threads
        model = build("stack")
    sw.fully_shard(model, units=Block)
    optimizer = TrippingAdamW(model.parameters(), lr=1e-2)
    batch = (torch.arange(6 * WIDTH).double().view(6, WIDTH) / 7 + rank).sin()

    def step() -> None:
        with sw.transaction(model, optimizer):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    step()
    before = [p.full_tensor() for p in model.parameters() if isinstance(p, sw.ShardedTensor)]
    optimizer.trips = rank == 1
    with pytest.raises(ValueError if rank == 1 else sw.PeerAborted):
        step()
    after = [p.full_tensor() for p in model.parameters() if isinstance(p, sw.ShardedTensor)]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    optimizer.trips = False
    step()
    undone.append(rank)

"""Ranks that start again do not read what the last ones have left."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from shardwise.launch.rendezvous import own_store


def meet(store: HashStore, num_ranks: int) -> list[Store]:
    with ThreadPoolExecutor(num_ranks) as ranks:
        return list(ranks.map(lambda rank: own_store(store, rank, num_ranks), range(num_ranks)))


def test_each_start_has_a_store_of_its_own() -> None:
    store = HashStore()
    first = meet(store, 3)
    first[2].set("address", "old")
    assert first[0].get("address") == b"old"
    for num_ranks in (3, 2, 4):
        again = meet(store, num_ranks)
        assert not any(one.check(["address"]) for one in again)
        again[-1].set("address", "new")
        assert again[0].get("address") == b"new"


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[1\] did not come"):
        own_store(HashStore(), 0, 2, timeout_seconds=0.05)

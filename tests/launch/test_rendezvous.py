"""Ranks that are restarted do not read keys of the attempt before."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from shardwise.launch.rendezvous import fresh_store


def meet(store: HashStore, num_ranks: int) -> list[Store]:
    with ThreadPoolExecutor(num_ranks) as ranks:
        return list(ranks.map(lambda rank: fresh_store(store, rank, num_ranks), range(num_ranks)))


def test_each_attempt_has_its_own_keys() -> None:
    store = HashStore()
    first = meet(store, 3)
    first[2].set("address", "old")
    assert first[0].get("address") == b"old"
    for num_ranks in (3, 2, 4):
        again = meet(store, num_ranks)
        assert not any(one.check(["address"]) for one in again)
        again[-1].set("address", "new")
        assert again[0].get("address") == b"new"


def test_a_missing_rank_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[1\] did not join"):
        fresh_store(HashStore(), 0, 2, timeout_seconds=0.05)

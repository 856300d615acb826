"""A store of this start's own.

torchrun keeps one store for all of its restarts, in which the ranks of the one before have left
their addresses and reports. A rank that read those would wait for a process that is gone (seen with
Gloo: both ranks of a restart waited to be connected, for minutes). How often torchrun has restarted
is no name for a start: machines that come or go do not count.
"""

import time
import uuid

from torch.distributed.distributed_c10d import PrefixStore, Store

__all__ = ["own_store"]

POLL_SECONDS = 0.01


def own_store(store: Store, rank: int, num_ranks: int, timeout_seconds: float = 600.0) -> Store:
    """Agree with all other ranks of this start on a prefix that nobody has used.

    Each rank asks under a token of its own, and the first one answers every token that it sees,
    old ones, too, until all have said that they know.

    Raises:
        TimeoutError: not all ranks came.
    """
    if rank:
        token = uuid.uuid4().hex
        store.set(f"shardwise/token/{rank}", token)
        name = store.get(f"shardwise/answer/{token}").decode()
        store.set(f"shardwise/knows/{name}/{rank}", "")
        return PrefixStore(name, store)
    name = uuid.uuid4().hex
    end = time.monotonic() + timeout_seconds
    unaware = set(range(1, num_ranks))
    while unaware:
        for other in unaware:
            if store.check([f"shardwise/token/{other}"]):
                token = store.get(f"shardwise/token/{other}").decode()
                store.set(f"shardwise/answer/{token}", name)
        unaware = {
            other for other in unaware if not store.check([f"shardwise/knows/{name}/{other}"])
        }
        if unaware and time.monotonic() > end:
            raise TimeoutError(f"ranks {sorted(unaware)} did not come in {timeout_seconds:.0f} s")
        time.sleep(POLL_SECONDS if unaware else 0)
    return PrefixStore(name, store)

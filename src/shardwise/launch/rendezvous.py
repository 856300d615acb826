"""A store that hides the keys of earlier attempts.

torchrun keeps one store for all restarts of a job, and the ranks of the last attempt left their
addresses in it. A rank that reads these addresses waits for a process that no longer exists (with
Gloo, both ranks of a restart waited minutes to connect). The restart count cannot serve as a
prefix, because it does not count restarts that follow a change of membership.
"""

import time
import uuid

from torch.distributed.distributed_c10d import PrefixStore, Store

__all__ = ["fresh_store"]

POLL_SECONDS = 0.01


def fresh_store(store: Store, rank: int, world_size: int, timeout_seconds: float = 600.0) -> Store:
    """Agree with all ranks of this attempt on a new prefix in ``store``.

    Each rank publishes a token of its own. Rank 0 answers every token that it finds, including
    those of earlier attempts, until all ranks have acknowledged the prefix. A TimeoutError names
    the ranks that did not.
    """
    if rank:
        token = uuid.uuid4().hex
        store.set(f"shardwise/token/{rank}", token)
        prefix = store.get(f"shardwise/answer/{token}").decode()
        store.set(f"shardwise/joined/{prefix}/{rank}", "")
        return PrefixStore(prefix, store)
    prefix = uuid.uuid4().hex
    deadline = time.monotonic() + timeout_seconds
    missing = set(range(1, world_size))
    while missing:
        for other in missing:
            if store.check([f"shardwise/token/{other}"]):
                token = store.get(f"shardwise/token/{other}").decode()
                store.set(f"shardwise/answer/{token}", prefix)
        missing = {
            other for other in missing if not store.check([f"shardwise/joined/{prefix}/{other}"])
        }
        if missing and time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(missing)} did not join in {timeout_seconds:.0f} s")
        time.sleep(POLL_SECONDS if missing else 0)
    return PrefixStore(prefix, store)

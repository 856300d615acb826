"""The peak of allocated bytes, on all threads."""

import threading

import torch

from shardwise.bench.memory import Peak, allocated_bytes
from tests.waiting import eventually

MEGA = 1 << 20
_samples: list[int] = []


def sample() -> int:
    _samples.append(allocated_bytes())
    return _samples[-1]


def allocate(num_bytes: int) -> None:
    allocated = torch.ones(num_bytes, dtype=torch.uint8)
    before = len(_samples)
    assert eventually(lambda: len(_samples) > before + 1), "a whole sample must lie in between"
    del allocated


def allocate_on_a_thread(num_bytes: int) -> None:
    thread = threading.Thread(target=allocate, args=(num_bytes,))
    thread.start()
    thread.join()


def test_all_threads_count_and_freed_bytes_do_not() -> None:
    with Peak(sample, 0.0005) as live:
        allocate(48 * MEGA)
        allocate_on_a_thread(64 * MEGA)
        allocate(32 * MEGA)
    assert 64 * MEGA <= live.bytes < 72 * MEGA


def test_earlier_allocations_do_not_count() -> None:
    before = torch.ones(64 * MEGA, dtype=torch.uint8)
    with Peak(sample, 0.0005) as live:
        allocate(8 * MEGA)
    assert 8 * MEGA <= live.bytes < 16 * MEGA
    del before

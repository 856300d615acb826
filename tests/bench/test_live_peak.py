"""Live bytes, wherever they are taken and freed."""

import threading
import time

import torch

from shardwise.bench.machine import Peak, allocated_bytes

MEGA = 1 << 20


def hold(num_bytes: int) -> None:
    taken = torch.ones(num_bytes, dtype=torch.uint8)
    time.sleep(0.05)  # many samples
    del taken


def on_a_thread(num_bytes: int) -> None:
    thread = threading.Thread(target=hold, args=(num_bytes,))
    thread.start()
    thread.join()


def test_every_thread_counts_and_what_was_freed_does_not() -> None:
    with Peak(allocated_bytes, 0.0005) as live:
        hold(48 * MEGA)
        on_a_thread(64 * MEGA)
        hold(32 * MEGA)
    assert 64 * MEGA <= live.bytes < 72 * MEGA


def test_what_was_there_before_does_not_count() -> None:
    before = torch.ones(64 * MEGA, dtype=torch.uint8)
    with Peak(allocated_bytes, 0.0005) as live:
        hold(8 * MEGA)
    assert 8 * MEGA <= live.bytes < 16 * MEGA
    del before

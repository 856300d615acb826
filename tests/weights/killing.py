"""Kill senders at every access to a file, or in the middle of a message; check the receivers."""

import itertools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from shardwise import weights
from shardwise.weights import publish  # noqa: F401 (once here, instead of in each child)

ACCESSES = {"open", "os.rename", "os.remove", "os.mkdir"}


def make() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


def fill(model: nn.Module, version: int) -> None:
    """Give a version's value to all parameters but the last, which does not change."""
    with torch.no_grad():
        for parameter in list(model.parameters())[:-1]:
            parameter.fill_(version)


def in_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked child, and return its exit status."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def kill_at_every_access(folder: Path, *, in_memory: bool) -> int:
    """Kill a sender at each access to a file in turn, and return how many there were.

    Call this in a process with one rank and one thread.
    """
    target: Any = (
        weights.SharedMemory(f"killed-{os.getpid()}") if in_memory else weights.Directory(folder)
    )
    assert in_child(lambda: publish_twice(target, 0)) == 0
    for number in itertools.count():
        found = weights.read_published(target).version
        status = in_child(partial(publish_until, number, found, target))
        check(target, found)
        if status == 0:
            break
        assert os.WIFSIGNALED(status)
    if in_memory:
        target.remove()
    return number


def publish_until(number: int, version: int, target: weights.Directory) -> None:
    """Publish two versions, and die at the access with this number."""
    left = [number]

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ACCESSES and str(target.path) in str(arguments[0]):
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

    sys.addaudithook(count)
    publish_twice(target, version)


def publish_twice(target: weights.Directory, version: int) -> None:
    model = make()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    for following in (version + 1, version + 2):
        fill(model, following)
        assert sw.publish(model, target) == following


def check(target: weights.Directory, at_least: int) -> None:
    """One whole version is visible, at least the one that was there before."""
    found = weights.read_published(target)
    assert found.version >= at_least
    *changed, last = found.tensors.values()
    assert len(changed) == 5
    values = {float(value) for tensor in found.tensors.values() for value in tensor.view(-1)}
    assert values == {0.0, float(found.version)}, "a mixture of versions"
    assert not last.any() or len(values) == 2


# -- a group -------------------------------------------------------------------------------------


class Dying(weights.Broadcast):
    """Dies in the middle of a version."""

    dies_in = 3

    def send(self, bucket: Sequence[weights.Update]) -> None:
        super().send(bucket)
        if self.version + 1 == self.dies_in:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_a_sender(folder: Path) -> None:
    """A receiver of a group keeps its version if the sender dies while it sends the next one."""

    def start(rank: int) -> None:
        store = f"file://{folder / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)

    def send() -> None:
        start(0)
        model, target = make(), Dying()
        mesh = DeviceMesh("cpu", [0])
        sw.fully_shard(model, mesh=mesh)
        for version in (1, 2, 3):
            fill(model, version)
            sw.publish(model, target, bucket_bytes=100)

    child = os.fork()
    if child == 0:
        try:
            send()
        finally:
            os._exit(1)
    start(1)
    receiver = weights.Receiver()
    assert [receiver.receive(), receiver.receive()] == [1, 2]
    try:
        receiver.receive()
    except RuntimeError:
        assert receiver.version == 2
        assert {float(x) for x in receiver.tensors["0.weight"].view(-1)} == {2.0}
    else:
        raise AssertionError("the third version was never committed")
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])

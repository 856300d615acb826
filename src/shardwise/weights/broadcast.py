"""A target of `publish` that sends versions to other processes of a process group."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.weights.updates import Manifest, Update

__all__ = ["Broadcast", "Receiver"]


class Broadcast:
    """Sends versions to the other members of ``group``, each of which has a `Receiver`.

    Rank 0 of the group is the first rank of the model; its other ranks are not in the group.
    `publish` returns when all receivers have the version.

    Args:
        group: None is the default group, for a model on one rank.
        device: of the messages, which the group's backend supports.
    """

    accepts_runs = True

    def __init__(
        self, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.version = 0
        self._group = group
        self._device = torch.device(device)

    def begin(self, manifest: Manifest) -> None:
        self._say(kind="begin", version=manifest.version, base=manifest.base)

    def send(self, bucket: Sequence[Update]) -> None:
        described = [
            [one.name, list(one.values.shape), [_kind_of(x) for x in one.parts]] for one in bucket
        ]
        sizes = [[len(part) for part in one.parts] for one in bucket]
        self._say(kind="send", updates=described, sizes=sizes)
        for one in bucket:
            for part in one.parts:
                _broadcast(part.to(self._device).view(torch.uint8), self._group)

    def commit(self, version: int) -> None:
        self._say(kind="commit", version=version)
        _check_receivers(version, self._device, self._group)
        self.version = version

    def _say(self, **message: Any) -> None:
        content = bytearray(json.dumps(message).encode())
        _broadcast(torch.tensor([len(content)], device=self._device), self._group)
        _broadcast(torch.frombuffer(content, dtype=torch.uint8).to(self._device), self._group)


class Receiver:
    """Receives versions that another process publishes to a `Broadcast`.

    Attributes:
        version: the last whole version; 0 before the first.
        tensors: its tensors by name.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.version = 0
        self.tensors: dict[str, Tensor] = {}
        self._group = group
        self._device = torch.device(device)

    def receive(self) -> int:
        """Wait for the next version, take it over, and return its number.

        If the sender dies before that, this raises the backend's error, and `tensors` is unchanged.
        If any receiver cannot take the version over, this raises an error on all of them, and so
        does `publish`; `tensors` is unchanged, and the next version comes whole.
        """
        pending: list[Update] = []
        base: int | None = None
        while True:
            message = self._hear()
            if message["kind"] == "begin":
                pending, base = [], message["base"]
            elif message["kind"] == "send":
                pending += self._updates(message)
            else:
                self._take_over(pending, base, message["version"])
                return self.version

    def _updates(self, message: dict[str, Any]) -> Iterator[Update]:
        for (name, shape, kinds), sizes in zip(message["updates"], message["sizes"], strict=True):
            parts = []
            for kind, size in zip(kinds, sizes, strict=True):
                part = torch.empty(size, dtype=getattr(torch, kind), device=self._device)
                _broadcast(part.view(torch.uint8), self._group)
                parts.append(part)
            yield Update(name, parts[0].view(shape), *parts[1:])

    def _take_over(self, updates: Sequence[Update], base: int | None, version: int) -> None:
        """Replace the tensors; if that raises on any receiver, the last version stays on all."""
        tensors: dict[str, Tensor] = {}
        error: Exception | None = None
        try:
            tensors = self._updated(updates, base)
        except Exception as raised:  # noqa: BLE001 - raised once the others know
            error = raised
        _check_receivers(version, self._device, self._group, error)
        self.tensors, self.version = tensors, version

    def _updated(self, updates: Sequence[Update], base: int | None) -> dict[str, Tensor]:
        if base not in (None, self.version):
            raise RuntimeError(
                f"received changes of version {base}, but this receiver has version "
                f"{self.version}; it must be in the group from the first version on"
            )
        tensors = {} if base is None else dict(self.tensors)
        for update in updates:
            if update.starts is None:
                tensors[update.name] = update.values
            else:
                tensors[update.name] = changed = tensors[update.name].clone()
                update.apply_(changed)
        return tensors

    def _hear(self) -> dict[str, Any]:
        length = torch.zeros(1, dtype=torch.int64, device=self._device)
        _broadcast(length, self._group)
        content = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        _broadcast(content, self._group)
        message: dict[str, Any] = json.loads(content.cpu().numpy().tobytes())
        return message


def _check_receivers(
    version: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    error: Exception | None = None,
) -> None:
    """Raise on all processes if one has an ``error``: its own, or one that says so."""
    num_failed = torch.tensor(int(error is not None), device=device)
    dist.all_reduce(num_failed, group=group)
    if error is not None:
        raise error
    if num_failed:
        raise RuntimeError(f"a receiver could not take over version {version}; see its error")


def _kind_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _broadcast(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    if tensor.numel():
        dist.broadcast(tensor, group=group, group_src=0)

"""A target of `publish` that sends versions to other processes of a process group."""

from collections.abc import Sequence
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
        self._announce(kind="begin", base=manifest.base)

    def send(self, bucket: Sequence[Update]) -> None:
        self._announce(kind="send", updates=[one.to("meta") for one in bucket])
        for one in bucket:
            for part in one.parts:
                _broadcast(part.to(self._device).view(torch.uint8), self._group)

    def commit(self, version: int) -> None:
        self._announce(kind="commit", version=version)
        _check_receivers(version, self._device, self._group)
        self.version = version

    def _announce(self, **message: Any) -> None:
        """Tell the receivers what comes; tensors in ``message`` have no elements."""
        dist.broadcast_object_list([message], group=self._group, device=self._device, group_src=0)


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
            announced: list[Any] = [None]
            dist.broadcast_object_list(
                announced, group=self._group, device=self._device, group_src=0
            )
            [message] = announced
            if message["kind"] == "begin":
                pending, base = [], message["base"]
            elif message["kind"] == "send":
                pending += map(self._received, message["updates"])
            else:
                self._take_over(pending, base, message["version"])
                return self.version

    def _received(self, described: Update) -> Update:
        """Receive an update, of which ``described`` has the shapes and dtypes."""
        parts = [torch.empty_like(part, device=self._device) for part in described.parts]
        for part in parts:
            _broadcast(part.view(torch.uint8), self._group)
        return Update(described.name, parts[0].view(described.values.shape), *parts[1:])

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


def _broadcast(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    if tensor.numel():
        dist.broadcast(tensor, group=group, group_src=0)

"""Makes a run one of several replicas, as [replicas] and [outer] configure it."""

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

import shardwise as sw
from shardwise.errors import ConfigError, PackageMissing, PlanError
from shardwise.launch.world import World
from shardwise.replicas.group import ReplicaGroup
from shardwise.replicas.local_steps import ElasticOuterOptimizer
from shardwise.train.config import Config

__all__ = ["Replicas", "check_replicas"]

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def check_replicas(config: Config) -> None:
    """Raise a ConfigError if keys of [replicas] or [outer] are invalid, or conflict with others."""
    replicas = config.replicas
    if not replicas.lighthouse:
        if config.outer.every:
            raise ConfigError(
                f"outer.every={config.outer.every}: there are no other replicas; set "
                "replicas.lighthouse, or run `shardwise train --replicas 2`"
            )
        return
    if config.train.reproducible:
        raise ConfigError(
            f"train.reproducible={config.train.reproducible} with [replicas]: which replicas take "
            "part in a step is not reproducible; set train.reproducible=0"
        )
    PackageMissing.check("torchft", extra="ft", needed_for="[replicas]")
    if not re.fullmatch(r"https?://.+:\d+", replicas.lighthouse):
        raise ConfigError(f"replicas.lighthouse={replicas.lighthouse!r}: expected http://host:port")
    if config.outer.every:
        try:
            _outer_settings(config)
        except PlanError as error:
            raise ConfigError(f"[outer]: {error}") from None
    reason = "replicas decide whether a step counts before the optimizer runs"
    if config.memory.step_in_backward:
        raise ConfigError(f"memory.step_in_backward=true: {reason}; set it to false")
    if config.precision.compute == "float16":
        key, remedy = "precision.compute=float16", "set precision.compute=bfloat16"
        raise ConfigError(f"{key} skips steps: {reason}; {remedy}")


class Replicas:
    """The other replicas of a run, if there are any."""

    def __init__(
        self, config: Config, world: World, model: nn.Module, optimizer: Optimizer
    ) -> None:
        self.outer: sw.OuterOptimizer | None = None  # if they train alone for many steps
        self._elastic: sw.Elastic | None = None
        self._manager: Any = None
        self._count = config.replicas.count
        if not config.replicas.lighthouse:
            return
        self._store, self._manager = _manager_of(config, world)
        if config.outer.every:
            settings = _outer_settings(config)
            self.outer = sw.outer_optimizer(model, optimizer, settings, manager=self._manager)
        else:
            self._elastic = sw.elastic(model, optimizer, self._manager)

    def register(self, name: str, stateful: Stateful) -> None:
        if self.outer is not None:
            self.outer.register(name, stateful)
        elif self._elastic is not None:
            self._elastic.register(name, stateful)

    def mean(self, value: Tensor) -> Tensor:
        """The mean over the replicas of this step; ``value`` if replicas train alone."""
        return value if self._elastic is None else self._elastic.mean(value)

    @property
    def group(self) -> ReplicaGroup | None:
        """The replicas of the last step, or of the last round of local steps."""
        if self._elastic is not None:
            return self._elastic.group
        return self.outer.group if isinstance(self.outer, ElasticOuterOptimizer) else None

    def metrics(self) -> dict[str, Any]:
        """What `StepMetrics` says about the replicas of the last step."""
        attendance = None if self.group is None else self.group.attendance
        if attendance is None or not attendance.members:
            return {}
        change, attendance.change = attendance.change, None
        return {
            "replicas": attendance.num_replicas,
            "goodput": attendance.useful_seconds / (attendance.seconds * self._count),
            **({} if change is None else asdict(change)),
        }

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a step. If it does not count, the block ends at once, without an error."""
        if self._elastic is None:
            yield
            return
        with self._elastic.step():
            yield

    def step_of(self, own: int) -> int:
        """The number of steps that replicas have trained; ``own`` if this is the only one."""
        if self._elastic is not None:
            return int(self._manager.current_step())
        return own if self.outer is None else self.outer.local_steps

    def continue_after(self, step: int, *, has_outer: bool) -> None:
        """Continue after ``step`` of a checkpoint, with or without the state of ``outer``."""
        if self._elastic is not None:
            self._manager.load_state_dict({"step": step, "batches_committed": step})
        elif self.outer is not None and not has_outer:
            self.outer.begin_after(step)

    def close(self) -> None:
        if self._manager is not None:
            self._manager.shutdown(wait=False)


def _manager_of(config: Config, world: World) -> tuple[Any, Any]:
    """The store of this replica's manager, which rank 0 keeps, and the manager of this rank."""
    os.environ.setdefault("RUST_LOG", "error")  # torchft logs each quorum otherwise
    from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL  # noqa: PLC0415

    replicas = config.replicas
    host = os.environ.get("MASTER_ADDR", "localhost")
    if host in _LOOPBACK and urlsplit(replicas.lighthouse).hostname not in _LOOPBACK:
        host = socket.gethostname()  # under `torchrun` on one machine; others must reach it, too
    host = world.gather(host)[0]
    # A store of its own: that of a launcher would have the address of the manager before a restart.
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if world.is_first else None
    port = world.gather(0 if store is None else store.port)[0]
    timeout = timedelta(seconds=replicas.timeout)
    kind = ProcessGroupNCCL if world.device.type == "cuda" else ProcessGroupGloo
    manager = Manager(
        pg=kind(timeout=timeout),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=replicas.minimum,
        use_async_quorum=False,  # so that a replica that joins trains on the samples of its step
        timeout=timeout,
        quorum_timeout=timedelta(seconds=replicas.quorum_timeout),
        rank=world.rank,
        world_size=world.size,
        store_addr=host,
        store_port=port,
        lighthouse_addr=replicas.lighthouse,
        replica_id=f"replica{replicas.number}",
        hostname=host,
        init_sync=False,
        quorum_retries=replicas.retries,
    )
    return store, manager


def _outer_settings(config: Config) -> sw.Outer:
    lr, momentum = config.outer.lr, config.outer.momentum
    optimizer = partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)
    return sw.Outer(**config.outer.model_dump(exclude={"lr", "momentum"}), optimizer=optimizer)

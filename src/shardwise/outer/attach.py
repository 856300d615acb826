"""`outer_optimizer`: make a model and its optimizer a replica."""

from hashlib import sha256
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardwise.errors import PlanError
from shardwise.outer.exchange import GroupExchange
from shardwise.outer.link import HubExchange
from shardwise.outer.optimizer import OuterOptimizer, optimizer_template
from shardwise.outer.replica import checksum_of, checksum_over_ranks
from shardwise.plan.outer import Outer
from shardwise.runtime.engine import Runtime
from shardwise.runtime.module import runtime_of_root
from shardwise.runtime.parameters import STEPS_IN_BACKWARD
from shardwise.tensor.sharding import sharding_of

__all__ = ["outer_optimizer"]


def outer_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    outer: Outer,
    *,
    group: dist.ProcessGroup | None = None,
    hub: str = "",
    replica: int = 0,
    num_replicas: int = 1,
) -> OuterOptimizer:
    """Make ``optimizer.step()`` also synchronize this replica with others.

    With a ``hub``, each replica is a separate world with its own launcher, so it may die without
    the others and come back::

        model = sw.fully_shard(model, units=Block)
        optimizer = torch.optim.AdamW(model.parameters())
        outer = sw.outer_optimizer(
            model, optimizer, sw.Outer(every=32, fragments=4), hub="10.0.0.1:29400", replica=0
        )
        outer.join()
        while outer.local_steps < 10_000:
            ...

    Start the hub with ``python -m shardwise.outer 10.0.0.1:29400``. With a ``group``, all replicas
    are in one world, sharded over the inner dim of a mesh: ``fully_shard(model,
    mesh=mesh["shard"])`` and ``group=mesh.get_group("replicate")``.

    Args:
        model: sharded over the ranks of this replica only.
        optimizer: the optimizer of the model's parameters.
        outer: when and how replicas are synchronized.
        group: the ranks that hold the same shard, one from each replica.
        hub: instead of a group, the address of the hub as ``host:port``.
        replica: the number of this replica, unique among those that run at the same time.
        num_replicas: the number of replicas to wait for at the beginning, at most for
            ``outer.deadline`` seconds.

    Raises:
        PlanError: the model, the optimizer or the options cannot be used.
    """
    runtime = runtime_of_root(model)
    _check(model, optimizer, runtime)
    if (group is None) == (not hub):
        raise PlanError(f"group={group}, hub={hub!r}: expected one of them")
    if group is not None:
        return OuterOptimizer(model, optimizer, outer, GroupExchange(group))
    names = [p.name for unit in runtime.units for p in unit.parameters]
    hello: dict[str, Any] = {
        "num_ranks": runtime.mesh.num_ranks,
        "num_replicas": num_replicas,
        "deadline": outer.deadline,
        "options": {
            "every": outer.every,
            "fragments": outer.fragments,
            "dtype": outer.dtype,
            "block": outer.block,
            "ranks of a replica": runtime.mesh.num_ranks,
            "strategy": runtime.plan.strategy.name,
            "outer optimizer": _description(optimizer_template(outer)),
            "digest of model and units": sha256(repr((runtime.plan, names)).encode()).hexdigest(),
        },
    }
    if frozen := [p for p in model.parameters() if not p.requires_grad]:
        checksum = checksum_over_ranks(checksum_of(frozen), runtime)
        hello["options"]["checksum of frozen parameters"] = checksum
    exchange = HubExchange(hub, replica, runtime.mesh.world.own_rank, hello)
    return OuterOptimizer(model, optimizer, outer, exchange)


def _check(model: nn.Module, optimizer: object, runtime: Runtime) -> None:
    if not isinstance(optimizer, Optimizer):
        name = type(optimizer).__name__
        raise PlanError(f"outer_optimizer expects a torch.optim.Optimizer, got {name}")
    runtime.scheduler.check_idle("sw.outer_optimizer cannot be called in the middle of a step")
    for name, parameter in model.named_parameters():
        sharding = sharding_of(parameter)
        if parameter.requires_grad and (sharding is None or sharding.tensor_parallel):
            raise PlanError(
                f"{name} is trainable but not sharded by fully_shard alone, so it would differ "
                "between replicas; freeze it, or remove it from ignored_params"
            )
        if getattr(parameter, STEPS_IN_BACKWARD, False):
            raise PlanError(
                "sw.optimizer_in_backward has no step after which replicas could synchronize; "
                "call remove() on its handle"
            )


def _description(optimizer: Optimizer) -> str:
    """The class and the options of ``optimizer``."""
    options = ", ".join(f"{key}={value}" for key, value in sorted(optimizer.defaults.items()))
    return f"{type(optimizer).__name__}({options})"

"""How a model and its optimizer become a replica."""

from hashlib import sha256
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardwise.errors import PlanError
from shardwise.outer.exchange import GroupExchange
from shardwise.outer.link import HubExchange
from shardwise.outer.optimizer import OuterOptimizer, template_of
from shardwise.outer.replica import checksum_of, checksum_over_ranks
from shardwise.plan.outer import Outer
from shardwise.runtime.engine import Runtime
from shardwise.runtime.module import runtime_of_root
from shardwise.runtime.parameters import STEPS_IN_BACKWARD
from shardwise.tensor.sharding import sharding_of
from shardwise.transport.communicator import communicator

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
    """From now on ``optimizer.step()`` also synchronizes this replica with others.

    With a ``hub`` each replica is a world of its own, under a launcher of its own, so that it may
    die without the others, and come back::

        model = sw.fully_shard(model, units=Block)
        optimizer = torch.optim.AdamW(model.parameters())
        outer = sw.outer_optimizer(
            model, optimizer, sw.Outer(every=32, fragments=4), hub="10.0.0.1:29400", replica=0
        )
        outer.join()
        while outer.local_steps < 10_000:
            ...

    The hub is ``python -m shardwise.outer 10.0.0.1:29400``. With a ``group`` all replicas are in
    one world, sharded over the inner dim of a mesh: ``fully_shard(model, mesh=mesh["shard"])`` and
    ``group=mesh.get_group("replicate")``.

    Args:
        model: sharded, over the ranks of this replica alone.
        optimizer: of the model's parameters.
        outer: how often, how much at a time, in which format.
        group: the ranks of all replicas that hold the same shard, one of each.
        hub: instead of a group, where the hub is.
        replica: the number of this replica, which no other one has at the same time.
        num_replicas: how many to wait for at the beginning, for ``outer.deadline`` at most.

    Raises:
        PlanError: the model, the optimizer or the options do not fit.
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
            "outer optimizer": _description(template_of(outer)),
            "digest of model and units": sha256(repr((runtime.plan, names)).encode()).hexdigest(),
        },
    }
    if frozen := [p for p in model.parameters() if not p.requires_grad]:
        device = runtime.pools.device
        links = communicator(runtime.mesh.world, device)
        checksum = checksum_over_ranks(checksum_of(frozen), links, device)
        hello["options"]["checksum of frozen parameters"] = checksum
    exchange = HubExchange(hub, replica, runtime.mesh.world.own_rank, hello)
    return OuterOptimizer(model, optimizer, outer, exchange)


def _check(model: nn.Module, optimizer: object, runtime: Runtime) -> None:
    if not isinstance(optimizer, Optimizer):
        name = type(optimizer).__name__
        raise PlanError(f"outer_optimizer takes a torch.optim.Optimizer, got {name}")
    runtime.scheduler.check_idle("replicas cannot begin to synchronize in the middle of a step")
    for name, parameter in model.named_parameters():
        sharding = sharding_of(parameter)
        if parameter.requires_grad and (sharding is None or sharding.tensor_parallel):
            raise PlanError(
                f"{name} is trained and not sharded by fully_shard alone, so it would differ "
                "between replicas; freeze it, or do not name it in ignored_params"
            )
        if getattr(parameter, STEPS_IN_BACKWARD, False):
            raise PlanError(
                "sw.optimizer_in_backward has no step after which replicas could synchronize; "
                "call remove() of its handle"
            )


def _description(optimizer: Optimizer) -> str:
    """Its class and its options."""
    options = ", ".join(f"{key}={value}" for key, value in sorted(optimizer.defaults.items()))
    return f"{type(optimizer).__name__}({options})"

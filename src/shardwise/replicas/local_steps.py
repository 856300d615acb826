"""Local steps: replicas that train alone for many steps, and may come and go between rounds."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from shardwise.checkpoint.local_state import LocalState, checksum_of
from shardwise.errors import PlanError
from shardwise.optim.outer import Outer
from shardwise.optim.outer_optimizer import Gather, OuterOptimizer
from shardwise.replicas.elastic import check_replica
from shardwise.replicas.group import ReplicaGroup, check_manager

__all__ = ["ElasticOuterOptimizer", "outer_optimizer"]

_NONE = -1  # no fragment


def outer_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    outer: Outer,
    *,
    manager: Any = None,
    group: dist.ProcessGroup | None = None,
) -> OuterOptimizer:
    """Make ``optimizer.step()`` also synchronize this replica with others.

    With a ``manager`` of torchft, each replica is a separate world with its own launcher, so it may
    die without the others and come back::

        model = sw.fully_shard(model, units=Block)
        optimizer = torch.optim.AdamW(model.parameters())
        manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(), min_replica_size=1, replica_id="replica0",  # or 1, ...
            use_async_quorum=False, load_state_dict=None, state_dict=None,
        )
        outer = sw.outer_optimizer(
            model, optimizer, sw.Outer(every=32, fragments=4), manager=manager
        )
        while outer.local_steps < 10_000:
            ...

    With a ``group``, all replicas are in one world, sharded over the inner dim of a mesh:
    ``fully_shard(model, mesh=mesh["shard"])`` and ``group=mesh.get_group("replicate")``.

    Args:
        model: sharded over the ranks of this replica only.
        optimizer: the optimizer of the model's parameters.
        outer: when and how replicas are synchronized.
        manager: a `torchft.Manager` of this rank, which needs no callbacks, and a ``replica_id``
            that ends with the number of the replica.
        group: instead of a manager, the ranks that hold the same shard, one from each replica.

    Raises:
        PackageMissing: torchft is not installed.
        PlanError: the model, the optimizer or the options cannot be used.
    """
    if (manager is None) == (group is None):
        raise PlanError(f"manager={manager}, group={group}: expected one of them")
    check_replica(model, optimizer, "sw.outer_optimizer")
    if group is not None:
        return OuterOptimizer(model, optimizer, outer, group)
    check_manager(manager, "sw.outer_optimizer")
    if manager._use_async_quorum:  # of which the manager does not tell otherwise
        raise PlanError(
            "sw.outer_optimizer: the parameters change while a quorum is awaited; create the "
            "manager with use_async_quorum=False"
        )
    if outer.delay > outer.every // outer.fragments:
        raise PlanError(
            f"{outer}: with a manager, a round has to end before the next one begins; expected a "
            f"delay of at most every // fragments = {outer.every // outer.fragments}"
        )
    return ElasticOuterOptimizer(model, optimizer, outer, manager)


class ElasticOuterOptimizer(OuterOptimizer):
    """The outer optimizer of replicas that a manager finds.

    A round is a step of their `ReplicaGroup`. It is repeated if it has failed, and a replica that
    joins takes the state of another one in a round.

    Attributes:
        group: the replicas of the last round; ``group.attendance`` tells who came and went.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, outer: Outer, manager: Any) -> None:
        super().__init__(model, optimizer, outer, None)
        self._state = LocalState(model, optimizer, self, trains_on=True)
        self._has_met = False  # it may have come back
        row = f"{outer.every} {outer.fragments} {outer.dtype} {outer.block} {self._template}"
        description = f"{self._state.description}, {row}"
        self.group = ReplicaGroup(manager, self._state, description, is_continuous=True)
        # Now, because replicas train apart before their first round.
        self.group.history = checksum_of(self._state.parameters)

    def register(self, name: str, stateful: Stateful) -> None:
        self._state.register(name, stateful)

    @property
    def num_replicas(self) -> int:
        return self.group.num_replicas

    def _synchronize(self, step: int) -> None:
        super()._synchronize(step)
        if not self._has_met:
            self._begin(_NONE)  # take the others' state now

    def _begin(self, fragment: int) -> None:
        due, gather = self._meet(fragment)
        if due == fragment != _NONE:
            self._gathers[fragment] = gather
        else:
            self._receive(due, gather)

    def _end(self, fragment: int) -> None:
        gather = self._gathers.pop(fragment, None)
        if gather is not None:
            self._receive(fragment, gather)

    def _receive(self, fragment: int, gather: Gather | None) -> None:
        """End the round of ``fragment``; repeat it if it has failed."""
        while True:
            packed = [] if gather is None else gather()
            if self.group.commit():
                break
            self.param_groups[0]["rounds"] = self.group.step  # 0 if this replica was cut off
            fragment, gather = self._meet(fragment)
        if gather is not None:
            counted = zip(packed, self.group.counted(), strict=True)
            self._apply(fragment, [one for one, counts in counted if counts])
        self.param_groups[0].update(rounds=self.group.step, history=self.group.history)

    def _meet(self, fragment: int) -> tuple[int, Gather | None]:
        """Begin a round of ``fragment``; return the one that is due in all replicas.

        It is another one if this replica has taken a state. It then ends the round at once.
        """
        parameters = self.fragments[fragment].parameters if fragment != _NONE else []
        if fragment != _NONE:
            self._take_differences(fragment)
        options = self.param_groups[0]
        if self.group.step < options["rounds"]:  # a checkpoint was loaded
            self.group.continue_after(options["rounds"], options["history"])
        checksum = checksum_of(map(self._anchor, parameters))
        self.group.begin()
        self._has_met, counts = True, fragment != _NONE and not self.group.has_joined
        if self.group.has_joined:
            self._forget_differences()
        table = self.group.meet(checksum, fragment, self.local_steps, counts=counts)
        due = fragment
        if table is not None:
            rows = [row for row in table if row.counts]
            *_, due, options["local_steps"] = rows[0] if rows else (_NONE, self.local_steps)
        if due != fragment and self.outer.delay:
            self._gathers[due] = None  # the others end it later
        return due, None if due == _NONE else self._send(due)

    def _gather(self, packed: Tensor) -> Gather:
        return self.group.gather(packed)

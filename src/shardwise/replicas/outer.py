"""The outer optimizer, which synchronizes replicas that train alone for many steps.

::

    shared      a0 ------------------------------- a1 = step(a0, mean of differences) ---
                 |                                  |
    replica 0    p0 -- step -- ... -- p   a0 - p   a1 -- step -- ...
    replica 1    p0 -- step -- ... -- q   a0 - q   a1 -- step -- ...

The shared parameters have the same bits in all replicas. Each rank keeps its shard of them and
exchanges differences with the ranks that hold the same shard in other replicas, so nothing is
gathered.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import SGD, Optimizer

from shardwise.comm.communicator import communicator
from shardwise.errors import PlanError, StepError
from shardwise.features.transaction import TRANSACTION
from shardwise.plan.axes import AxisBytes
from shardwise.replicas.elastic import check_replica
from shardwise.replicas.fragments import Fragment, fragments_of
from shardwise.replicas.group import FixedGroup, Gather, ReplicaGroup, check_manager
from shardwise.replicas.plan import Outer
from shardwise.replicas.state import ReplicaState, checksum_of
from shardwise.runtime.module import runtime_of_root
from shardwise.tensor.sharding import Sharding, local_of, sharding_of

__all__ = ["OuterOptimizer", "optimizer_of", "outer_optimizer"]

_NONE = -1  # no fragment
_DILOCO = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)
# Keys in the state of each parameter, next to the states of the outer optimizer: the shared
# parameter and, with a delay, the difference in transit, which is sent again after a load.
_ANCHOR, _SENT = "anchor", "sent"


def outer_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    outer: Outer,
    *,
    manager: Any = None,
    group: dist.ProcessGroup | None = None,
) -> "OuterOptimizer":
    """Make ``optimizer.step()`` also synchronize this replica with others.

    With a ``manager`` of torchft, each replica is a separate world with its own launcher, so it may
    die without the others and come back::

        model = sw.fully_shard(model, units=Block)
        optimizer = torch.optim.AdamW(model.parameters())
        manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(), min_replica_size=1, use_async_quorum=False,
            load_state_dict=None, state_dict=None,
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
        manager: a `torchft.Manager` of this rank, which needs no callbacks.
        group: instead of a manager, the ranks that hold the same shard, one from each replica.

    Raises:
        PackageMissing: torchft is not installed.
        PlanError: the model, the optimizer or the options cannot be used.
    """
    if (manager is None) == (group is None):
        raise PlanError(f"manager={manager}, group={group}: expected one of them")
    check_replica(model, optimizer, "sw.outer_optimizer")
    if group is not None:
        return OuterOptimizer(model, optimizer, outer, FixedGroup(group))
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
    return OuterOptimizer(model, optimizer, outer, manager)


class OuterOptimizer(Optimizer):
    """Keeps the shared parameters and the state of the outer optimizer, by parameter of a model.

    It is a torch optimizer, so that ``sw.save(..., outer=...)`` and ``sw.load`` handle its state
    and learning rate schedulers can set its options.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, outer: Outer, replicas: Any) -> None:
        """``replicas``: a `FixedGroup`, or the manager of a `ReplicaGroup`."""
        self.outer = outer
        self.sent_bytes = 0  # of differences, by this rank
        self._runtime = runtime_of_root(model)
        parameters = [p for p in model.parameters() if p.requires_grad]
        template = optimizer_of(outer, [nn.Parameter(torch.zeros(1))])  # for its options
        counts = {"local_steps": 0, "rounds": 0, "history": 0}
        super().__init__(parameters, dict(template.defaults) | counts)
        self._options = set(template.defaults)
        self._state = ReplicaState(model, optimizer, self, trains_on=True)
        for parameter in parameters:
            shared = local_of(parameter).detach().clone()
            self.state[parameter] = {_ANCHOR: _sharded_as(parameter, shared)}
        self.fragments = fragments_of(self._runtime, outer)
        self._frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
        self._joined: set[int] = set()  # fragments whose rounds it has ended before the others
        self._gathers: dict[int, Gather] = {}  # of rounds that have begun, by fragment
        self._has_met = isinstance(replicas, FixedGroup)  # it may have come back otherwise
        self._hook = optimizer.register_step_post_hook(self._after_step)
        self.group: ReplicaGroup | FixedGroup
        if isinstance(replicas, FixedGroup):
            self.group = replicas
        else:
            row = f"{outer.every} {outer.fragments} {outer.dtype} {outer.block} {template}"
            description = f"{self._state.description}, {row}"
            self.group = ReplicaGroup(replicas, self._state, description, is_continuous=True)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Not for users: steps of the model's optimizer also step the outer optimizer.

        Raises:
            StepError: always.
        """
        raise StepError(
            "the outer optimizer steps after steps of the model's optimizer; call optimizer.step()"
        )

    def register(self, name: str, stateful: Stateful) -> None:
        """Copy the state of ``stateful`` to replicas that join, as it is after a step.

        Raises:
            PlanError: there is another object with this name.
        """
        self._state.register(name, stateful)

    def remove(self) -> None:
        """Leave the other replicas; ``optimizer.step()`` no longer synchronizes."""
        self._hook.remove()

    @property
    def local_steps(self) -> int:
        """The number of steps of the model's optimizer.

        A replica that joins adopts the others' number, so that all replicas synchronize a fragment
        at the same step.
        """
        return int(self.param_groups[0]["local_steps"])

    def planned_bytes(self, step: int) -> int:
        """The number of bytes of differences that this rank sends after local step ``step``."""
        return sum(self._message_bytes(fragment) for fragment in self.outer.sent_after(step))

    def begin_after(self, step: int) -> None:
        """Use the model's parameters as the shared parameters after ``step``.

        For a model that was loaded from the checkpoint of a run without replicas.
        """
        for parameter in self.state:
            self._anchor(parameter).copy_(local_of(parameter).detach())
        self.param_groups[0]["local_steps"] = step

    # -- rounds ----------------------------------------------------------------------------------

    @torch.no_grad()
    def _after_step(self, *_: object) -> None:
        if TRANSACTION in self._runtime.scheduler.forbids_conversion:
            raise StepError(
                "sw.transaction cannot undo the synchronization of replicas; step outside of it, "
                "or train without sw.outer_optimizer"
            )
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise PlanError(
                    f"{name} was frozen when sw.outer_optimizer was called, so replicas do not "
                    "share it; call its result's remove(), and sw.outer_optimizer again, with a "
                    "new torchft.Manager if there is one, in all replicas"
                )
        self.param_groups[0]["local_steps"] += 1
        self._synchronize(self.local_steps)

    def _synchronize(self, step: int) -> None:
        """Begin and end the rounds that are due after ``step``."""
        if self.outer.delay:
            self._finish(self.outer.applied_after(step))
        for fragment in self.outer.sent_after(step):
            due = self._begin(fragment)
            if due == fragment:
                self._joined.discard(fragment)  # of a state before the last one
            else:  # this replica has taken the state of another one, in another round
                self._join(due)
        if not self.outer.delay:
            self._finish(self.outer.applied_after(step))
        if not self._has_met:
            self._join(self._begin(_NONE))  # take the others' state now

    def _join(self, fragment: int) -> None:
        """End the round in which this replica has taken a state; the others may end it later."""
        self._receive(fragment)
        if self.outer.delay and fragment != _NONE:
            self._joined.add(fragment)

    def _finish(self, fragments: Iterable[int]) -> None:
        """End the rounds of ``fragments``."""
        for fragment in fragments:
            if fragment in self._joined:
                self._joined.discard(fragment)
                continue
            is_begun = fragment in self._gathers  # if not, a checkpoint was loaded meanwhile
            self._receive(fragment if is_begun else self._begin(fragment))

    def _receive(self, fragment: int) -> None:
        """End a round; repeat it if it has failed."""
        while True:
            packed = [] if fragment == _NONE else self._gathers.pop(fragment)()
            if self.group.commit():
                break
            fragment = self._begin(fragment)
        if fragment != _NONE:
            assert packed is not None
            counted = zip(packed, self.group.counted(), strict=True)
            self._apply(self.fragments[fragment], [one for one, counts in counted if counts])
        self.param_groups[0].update(rounds=self.group.step, history=self.group.history)

    def _begin(self, fragment: int) -> int:
        """Begin the round of ``fragment``; return the fragment that is due in other replicas."""
        parameters = self.fragments[fragment].parameters if fragment != _NONE else []
        if not (self.outer.delay and all(_SENT in self.state[p] for p in parameters)):
            for parameter in parameters:
                difference = self._anchor(parameter) - local_of(parameter)
                self.state[parameter][_SENT] = _sharded_as(parameter, difference)
        self._check_finite(parameters)
        options = self.param_groups[0]
        if self.group.step < options["rounds"]:  # a checkpoint was loaded
            self.group.continue_after(options["rounds"], options["history"])
        checksum = checksum_of(map(self._anchor, parameters))
        self.group.begin()
        self._has_met, counts = True, fragment != _NONE and not self.group.has_joined
        if self.group.has_joined:
            for one in self.state.values():  # differences that the other replica has in transit
                one.pop(_SENT, None)
        table = self.group.meet(checksum, fragment, self.local_steps, counts=counts)
        if table is not None:
            rows = [row for row in table.tolist() if row[0]]  # those that count
            *_, fragment, options["local_steps"] = rows[0] if rows else (_NONE, self.local_steps)
        if fragment != _NONE:
            own = [self._difference(p) for p in self.fragments[fragment].parameters]
            self._gathers[fragment] = self.group.gather(self.fragments[fragment].pack(own))
            sent = self._message_bytes(fragment)
            self.sent_bytes += sent
            self._runtime.scheduler.ledger.add_sent(AxisBytes(outer=sent), after_backward=True)
        return fragment

    def _difference(self, parameter: Tensor) -> Tensor:
        """The difference in transit; zeros if this replica has just taken a state."""
        sent = self.state[parameter].get(_SENT)
        return torch.zeros_like(local_of(parameter)) if sent is None else local_of(sent)

    def _check_finite(self, parameters: Sequence[Tensor]) -> None:
        """Raise on all ranks of this replica if a difference is not finite on one."""
        wrong = [p for p in parameters if not self._difference(p).isfinite().all()]
        comm = communicator(self._runtime.mesh.world, self._runtime.pools.device)
        flag = torch.tensor([bool(wrong)], dtype=torch.uint8, device=self._runtime.pools.device)
        comm.wait(comm.reduce.all_reduce_max(flag, comm.world, "check of differences"))
        if not flag.any():
            return
        found = cast("Sharding", sharding_of(wrong[0])).name if wrong else "a parameter"
        raise StepError(
            f"{found} of this replica is not finite after step {self.local_steps}, so it does not "
            "synchronize, and the others go on without it; restart it to take the state of another "
            "replica"
        )

    def _message_bytes(self, fragment: int) -> int:
        return self.fragments[fragment].packed_bytes * (self.group.num_replicas - 1)

    def _apply(self, fragment: Fragment, packed: Sequence[Tensor]) -> None:
        """Step the shared parameters, and update this replica's parameters from them."""
        parameters = fragment.parameters
        self._step_shared(parameters, fragment.mean(packed))
        for parameter in parameters:
            local, shared = local_of(parameter), self._anchor(parameter)
            if self.outer.mixing:
                local.lerp_(shared, 1 - self.outer.mixing)
            else:
                local.copy_(shared)
            self.state[parameter].pop(_SENT, None)
            torch.autograd.graph.increment_version(parameter)

    def _anchor(self, parameter: Tensor) -> Tensor:
        return local_of(self.state[parameter][_ANCHOR])

    def _step_shared(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Step the shared values of ``parameters`` with the outer optimizer."""
        shared = [nn.Parameter(self.state[parameter][_ANCHOR]) for parameter in parameters]
        optimizer = optimizer_of(self.outer, shared)
        group = self.param_groups[0]
        optimizer.param_groups[0].update({key: group[key] for key in self._options})
        for one, parameter, gradient in zip(shared, parameters, gradients, strict=True):
            one.grad = _sharded_as(parameter, gradient)
            state = {k: v for k, v in self.state[parameter].items() if k not in (_ANCHOR, _SENT)}
            if state:
                optimizer.state[one] = state
        with torch.enable_grad():
            optimizer.step()
        for one, parameter in zip(shared, parameters, strict=True):
            self.state[parameter].update(optimizer.state.get(one, {}))


def _sharded_as(parameter: Tensor, local: Tensor) -> Tensor:
    """The tensor that is sharded like ``parameter`` and of which this rank stores ``local``."""
    return cast("Sharding", sharding_of(parameter)).wrap(local.reshape(-1))


def optimizer_of(outer: Outer, parameters: list[Any]) -> Any:
    """The outer optimizer of ``parameters``."""
    return (outer.optimizer or _DILOCO)(parameters)

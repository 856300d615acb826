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

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import SGD, Optimizer

from shardwise.comm.communicator import communicator
from shardwise.comm.groups import backends_of
from shardwise.errors import PlanError, StepError
from shardwise.features.transaction import TRANSACTION
from shardwise.optim.fragments import Fragment, fragments_of
from shardwise.optim.outer import Outer
from shardwise.plan.axes import AxisBytes
from shardwise.runtime.module import runtime_of_root
from shardwise.tensor.sharding import Sharding, local_of, sharding_of

__all__ = ["Gather", "OuterOptimizer", "optimizer_of"]

Gather = Callable[[], list[Tensor]]  # waits for the tensors of all; none if this has failed
_DILOCO = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)
# Keys in the state of each parameter, next to the states of the outer optimizer: the shared
# parameter; with a delay, the difference in transit, which is sent again after a load; and what
# quantization took from the difference before, which is added to the next one (error feedback).
_ANCHOR, _SENT, _RESIDUAL = "anchor", "sent", "residual"


class OuterOptimizer(Optimizer):
    """Keeps the shared parameters and the state of the outer optimizer, by parameter of a model.

    It is a torch optimizer, so that ``sw.save(..., outer=...)`` and ``sw.load`` handle its state
    and learning rate schedulers can set its options. See `shardwise.outer_optimizer`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        outer: Outer,
        group: dist.ProcessGroup | None,
    ) -> None:
        """``group``: the ranks that hold the same shard, one from each replica."""
        self.outer = outer
        self.sent_bytes = 0  # of differences, by this rank
        self._group = group
        self._runtime = runtime_of_root(model)
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._template = optimizer_of(outer, [nn.Parameter(torch.zeros(1))])  # for its options
        # The last two are those of replicas that come and go, in the checkpoints of all.
        counts = {"local_steps": 0, "rounds": 0, "history": 0}
        super().__init__(parameters, dict(self._template.defaults) | counts)
        for parameter in parameters:
            shared = local_of(parameter).detach().clone()
            self.state[parameter] = {_ANCHOR: _sharded_as(parameter, shared)}
        self.fragments = fragments_of(self._runtime, outer)
        self._frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
        # By fragment, rounds that have begun; None for one that this replica has ended already.
        self._gathers: dict[int, Gather | None] = {}
        self._hook = optimizer.register_step_post_hook(self._after_step)

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

        In one world none joins, so nothing is copied.

        Raises:
            PlanError: there is another object with this name.
        """

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

    @property
    def num_replicas(self) -> int:
        """The number of replicas in the last round."""
        return dist.get_world_size(self._group)

    def planned_bytes(self, step: int) -> int:
        """The number of bytes of differences that this rank sends after local step ``step``."""
        return sum(self._message_bytes(fragment) for fragment in self.outer.sent_after(step))

    def begin_after(self, step: int) -> None:
        """Use the model's parameters as the shared parameters after ``step``.

        For a model that was loaded from the checkpoint of a run without replicas.
        """
        for parameter in self.state:
            self._anchor(parameter).copy_(local_of(parameter).detach())
        self._forget_differences()
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
            for fragment in self.outer.applied_after(step):
                if fragment not in self._gathers:  # a checkpoint was loaded meanwhile
                    self._begin(fragment)
                self._end(fragment)
        for fragment in self.outer.sent_after(step):
            self._begin(fragment)
            if not self.outer.delay:
                self._end(fragment)

    def _begin(self, fragment: int) -> None:
        """Begin the round of ``fragment``."""
        self._take_differences(fragment)
        self._gathers[fragment] = self._send(fragment)

    def _end(self, fragment: int) -> None:
        """End the round of ``fragment``."""
        gather = self._gathers.pop(fragment)
        assert gather is not None
        self._apply(fragment, gather())

    def _send(self, fragment: int) -> Gather:
        """Begin to exchange the differences of ``fragment`` with all replicas."""
        one = self.fragments[fragment]
        packed = one.pack([self._difference(p) for p in one.parameters])
        sent = self._message_bytes(fragment)
        self.sent_bytes += sent
        self._runtime.scheduler.ledger.add_sent(AxisBytes(outer=sent), after_backward=True)
        return self._gather(packed)

    def _gather(self, packed: Tensor) -> Gather:
        """Begin to exchange ``packed`` [n] with all replicas."""
        assert self._group is not None
        types = list(backends_of(self._group))
        own = packed.to("cpu" if "cpu" in types else types[0])
        gathered = [torch.empty_like(own) for _ in range(self.num_replicas)]
        work = dist.all_gather(gathered, own, group=self._group, async_op=True)
        assert work is not None
        return lambda: (work.wait(), gathered)[1]

    def _message_bytes(self, fragment: int) -> int:
        return self.fragments[fragment].packed_bytes * (self.num_replicas - 1)

    # -- differences and shared parameters -------------------------------------------------------

    def _take_differences(self, fragment: int) -> None:
        """Keep the differences that this replica sends, unless they are in transit.

        Raises:
            StepError: a difference is not finite. All ranks of this replica raise it.
        """
        parameters = self.fragments[fragment].parameters
        if not (self.outer.delay and all(_SENT in self.state[p] for p in parameters)):
            for parameter in parameters:
                difference = self._anchor(parameter) - local_of(parameter)
                if _RESIDUAL in self.state[parameter]:
                    difference += local_of(self.state[parameter][_RESIDUAL])
                self.state[parameter][_SENT] = _sharded_as(parameter, difference)
        self._check_finite(parameters)

    def _difference(self, parameter: Tensor) -> Tensor:
        """The difference in transit; zeros if this replica has just taken a state."""
        sent = self.state[parameter].get(_SENT)
        return torch.zeros_like(local_of(parameter)) if sent is None else local_of(sent)

    def _forget_differences(self) -> None:
        """Forget what was not sent yet, as the state is that of another replica or run."""
        for state in self.state.values():
            state.pop(_SENT, None)
            state.pop(_RESIDUAL, None)

    def _check_finite(self, parameters: Sequence[Tensor]) -> None:
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

    def _apply(self, fragment: int, packed: Sequence[Tensor]) -> None:
        """Step the shared parameters, and update this replica's parameters from them."""
        one = self.fragments[fragment]
        self._step_shared(one.parameters, one.mean(packed))
        self._replace_residuals(one)
        for parameter in one.parameters:
            local, shared = local_of(parameter), self._anchor(parameter)
            if self.outer.mixing:
                local.lerp_(shared, 1 - self.outer.mixing)
            else:
                local.copy_(shared)
            self.state[parameter].pop(_SENT, None)
            torch.autograd.graph.increment_version(parameter)

    def _replace_residuals(self, fragment: Fragment) -> None:
        """Keep what quantization has taken from the differences in transit."""
        for parameter in fragment.parameters:
            self.state[parameter].pop(_RESIDUAL, None)
        if not self.outer.is_quantized:
            return
        exact = [self._difference(p) for p in fragment.parameters]
        sent = fragment.mean([fragment.pack(exact)])
        for parameter, one, rounded in zip(fragment.parameters, exact, sent, strict=True):
            self.state[parameter][_RESIDUAL] = _sharded_as(parameter, one.reshape(-1) - rounded)

    def _anchor(self, parameter: Tensor) -> Tensor:
        return local_of(self.state[parameter][_ANCHOR])

    def _step_shared(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Step the shared values of ``parameters`` with the outer optimizer."""
        shared = [nn.Parameter(self.state[parameter][_ANCHOR]) for parameter in parameters]
        optimizer = optimizer_of(self.outer, shared)
        group = self.param_groups[0]
        optimizer.param_groups[0].update({key: group[key] for key in self._template.defaults})
        own = (_ANCHOR, _SENT, _RESIDUAL)
        for one, parameter, gradient in zip(shared, parameters, gradients, strict=True):
            one.grad = _sharded_as(parameter, gradient)
            state = {k: v for k, v in self.state[parameter].items() if k not in own}
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

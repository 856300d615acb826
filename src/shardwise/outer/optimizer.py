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

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from shardwise.errors import PeerLost, PlanError, StepError
from shardwise.outer.exchange import Decision, Exchange, Progress
from shardwise.outer.fragments import Fragment, fragments_of
from shardwise.outer.replica import (
    ANCHOR,
    SENT,
    Known,
    agree,
    checksum_of,
    decode_state,
    encode_state,
)
from shardwise.plan.axes import AxisBytes
from shardwise.plan.outer import Outer
from shardwise.runtime.module import runtime_of_root
from shardwise.tensor.sharding import Sharding, local_of, sharding_of

__all__ = ["OuterOptimizer", "optimizer_factory", "optimizer_template"]

_PATIENCE_SECONDS = 5.0  # for the hub, in addition to twice the deadline
_DILOCO = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)


class OuterOptimizer(Optimizer):
    """Keeps the shared parameters and the state of the outer optimizer, by parameter of a model.

    It is a torch optimizer, so that ``sw.save(..., outer=...)`` and ``sw.load`` handle its state
    and learning rate schedulers can set its options.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, outer: Outer, exchange: Exchange
    ) -> None:
        self.outer = outer
        self.exchange = exchange
        self._runtime = runtime_of_root(model)
        self._make = optimizer_factory(outer)
        parameters = [p for p in model.parameters() if p.requires_grad]
        template = optimizer_template(outer)
        counts = {"local_steps": 0, "progress": [astuple(Progress())] * outer.fragments}
        super().__init__(parameters, dict(template.defaults) | counts)
        self._options = set(template.defaults)
        self._optimizer = optimizer
        self._has_joined = False
        # What all ranks of this replica have received.
        self._group_step = 0
        self._is_member = False
        self._tickets: list[int] = []  # under which this rank has to send its state
        for parameter in parameters:
            shared = local_of(parameter).detach().clone()
            self.state[parameter] = {ANCHOR: _sharded_as(parameter, shared)}
        self.fragments = fragments_of(self._runtime, outer)
        self._frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
        self._hook = optimizer.register_step_post_hook(self._after_step)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Not for users: steps of the model's optimizer also step the outer optimizer.

        Raises:
            StepError: always.
        """
        raise StepError(
            "the outer optimizer steps after steps of the model's optimizer; call optimizer.step()"
        )

    def remove(self) -> None:
        """Leave the other replicas; ``optimizer.step()`` no longer synchronizes."""
        self._hook.remove()
        self.exchange.close()

    @property
    def local_steps(self) -> int:
        """The number of steps of the model's optimizer.

        A late replica adopts the others' number, so that all replicas synchronize a fragment at the
        same step again.
        """
        return int(self.param_groups[0]["local_steps"])

    def planned_bytes(self, step: int) -> int:
        """The number of bytes of differences that this rank sends after local step ``step``."""
        return sum(
            self.exchange.message_bytes(self.fragments[fragment].packed_bytes)
            for fragment in self.outer.sent_after(step)
        )

    def join(self) -> int:
        """Join the other replicas; return the number of steps that have been trained.

        If they are training already, this replica takes the state of one of them: parameters, both
        optimizers, and the number of steps. The first step calls this if the user has not.

        Raises:
            PlanError: other replicas have other options or other initial values.
            PeerLost: the hub cannot be reached.
        """
        if self._has_joined:
            return self.local_steps
        self._has_joined = True
        if len(self.progress) != len(self.fragments):
            raise PlanError(
                f"the checkpoint is of {len(self.progress)} fragments, expected "
                f"{len(self.fragments)}; load it without outer=, in all replicas"
            )
        self.exchange.connect(self.progress, self._checksum(self.state))
        until = time.monotonic() + 2 * self.outer.deadline + _PATIENCE_SECONDS
        while self.exchange.is_elastic:
            self.exchange.wait(_PATIENCE_SECONDS)
            known = self._agree()
            if known.ticket:
                self._take_state(known.ticket)
                return self.local_steps
            if known.is_member:
                break
            if time.monotonic() > until:
                reason = self.exchange.connection_error or "no replica has a state to take"
                raise PeerLost(
                    f"{reason}; start the hub with `python -m shardwise.outer HOST:PORT`, where "
                    "all replicas can reach it"
                )
        self._send_again()
        return self.local_steps

    def begin_after(self, step: int) -> None:
        """Use the model's parameters as the shared parameters after ``step``.

        For a model that was loaded from the checkpoint of a run without replicas.
        """
        for parameter in self.state:
            self._anchor(parameter).copy_(local_of(parameter).detach())
        self.param_groups[0]["local_steps"] = step

    @property
    def progress(self) -> list[Progress]:
        """The rounds that have been applied to each fragment."""
        return [Progress(*one) for one in self.param_groups[0]["progress"]]

    @torch.no_grad()
    def _after_step(self, *_: object) -> None:
        if self._runtime.scheduler.is_in_transaction:
            raise StepError(
                "sw.transaction cannot undo the synchronization of replicas; step outside of it, "
                "or train without sw.outer_optimizer"
            )
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise PlanError(
                    f"{name} was frozen when sw.outer_optimizer was called, so replicas do not "
                    "share it; call its result's remove(), and sw.outer_optimizer again, in all "
                    "replicas"
                )
        self.join()
        self.param_groups[0]["local_steps"] += 1
        self.exchange.step = self.local_steps
        self._synchronize(self.local_steps)
        if self._tickets:
            state = encode_state(self._optimizer, self)
            for ticket in self._tickets:
                self.exchange.give_state(ticket, state)
            self._tickets.clear()

    def _synchronize(self, step: int) -> None:
        delay = self.outer.delay
        # Skip rounds that this replica was too late for: it sent no difference to them.
        due = [
            fragment
            for fragment in self.outer.applied_after(step)
            if self.progress[fragment].step < step - delay
        ]
        if delay and not all(map(self._apply_decided, due)):
            return
        for fragment in self.outer.sent_after(step):
            # Decisions that arrived too late for their step are applied first.
            if self.exchange.is_elastic and not self._apply_decided(fragment, seconds=0):
                return
            if self.progress[fragment].step >= step:  # the others did not wait for this replica
                self.param_groups[0]["local_steps"] = max(step, self._group_step)
                return
            # If a rank of this replica is disconnected, the others would wait for its shard.
            if self._is_member or not self.exchange.is_elastic:
                self._send_difference(fragment)
        if not delay:
            all(map(self._apply_decided, due))

    @torch.no_grad()
    def _send_again(self) -> None:
        """Send the differences that were in transit when the checkpoint was saved."""
        for number, sent in self.outer.in_flight_after(self.local_steps).items():
            parameters = self.fragments[number].parameters
            if all(SENT in self.state[p] for p in parameters):
                self.exchange.step = sent
                self._send(number, [local_of(self.state[p][SENT]) for p in parameters])

    def _send_difference(self, number: int) -> None:
        parameters = self.fragments[number].parameters
        differences = [self._anchor(p) - local_of(p) for p in parameters]
        if self.outer.delay:
            for parameter, difference in zip(parameters, differences, strict=True):
                self.state[parameter][SENT] = _sharded_as(parameter, difference)
        self._send(number, differences)

    def _send(self, number: int, differences: Sequence[Tensor]) -> None:
        fragment = self.fragments[number]
        flat = fragment.flat(differences)
        if not flat.isfinite().all():
            self.exchange.close()  # so that the other replicas do not wait
            pairs = zip(fragment.parameters, differences, strict=True)
            found = next(p for p, one in pairs if not one.isfinite().all())
            name = cast("Sharding", sharding_of(found)).name
            raise StepError(
                f"{name} of this replica is not finite after step {self.local_steps}; it has left "
                "the other replicas, whose parameters would become non-finite, too; restart it to "
                "take the state of another replica"
            )
        before = self.exchange.sent_bytes
        self.exchange.send(number, fragment.pack(flat), self._checksum(fragment.parameters))
        sent = AxisBytes(outer=self.exchange.sent_bytes - before)
        self._runtime.scheduler.ledger.add_sent(sent, after_backward=True)

    def _apply_decided(self, number: int, seconds: float | None = None) -> bool:
        """Apply the decisions for a fragment; False if another replica's state was loaded instead.

        Waits for a decision up to ``seconds``, by default twice the deadline.
        """
        seconds = 2 * self.outer.deadline if seconds is None else seconds
        decisions = self.exchange.decided(number, seconds)
        if self.exchange.is_elastic:
            known = self._agree(len(decisions))
            self._group_step, self._is_member = known.group_step, known.is_member
            if known.ticket:
                self._take_state(known.ticket)
                return False
            decisions = decisions[: known.decisions]
        group = self.param_groups[0]
        for decision in decisions:
            self.exchange.applied(number, decision)
            group["progress"] = [*group["progress"]]
            group["progress"][number] = astuple(decision.progress)
            self._apply(self.fragments[number], decision)
            if decision.ticket:
                self._tickets.append(decision.ticket)
        return True

    def _apply(self, fragment: Fragment, decision: Decision) -> None:
        """Step the shared parameters, and update this replica's parameters from them."""
        parameters = fragment.parameters
        before = [] if decision.includes_own else [self._anchor(p).clone() for p in parameters]
        self._step_shared(parameters, fragment.mean(decision.packed))
        for index, parameter in enumerate(parameters):
            local, shared = local_of(parameter), self._anchor(parameter)
            if not decision.includes_own:  # a later round will include its own difference
                local += shared - before[index]
            elif self.outer.mixing:
                local.lerp_(shared, 1 - self.outer.mixing)
            else:
                local.copy_(shared)
            self.state[parameter].pop(SENT, None)
            torch.autograd.graph.increment_version(parameter)

    def _agree(self, num_decisions: int = 0) -> Known:
        """Agree with the other ranks of this replica on what all of them have received."""
        exchange = self.exchange
        own = Known(num_decisions, exchange.ticket, exchange.is_member, exchange.group_step)
        return agree(own, self._runtime)

    def _take_state(self, ticket: int) -> None:
        decode_state(self.exchange.take_state(ticket), self._optimizer, self)
        for state in self.state.values():  # differences that the other replica has in transit
            state.pop(SENT, None)
        self.exchange.step = self.local_steps
        self.exchange.ready(self.progress)

    def _checksum(self, parameters: Iterable[Tensor]) -> str:
        """The checksum of this rank's shards of the shared values of ``parameters``."""
        return f"{checksum_of(map(self._anchor, parameters)):08x}"

    def _anchor(self, parameter: Tensor) -> Tensor:
        return local_of(self.state[parameter][ANCHOR])

    def _step_shared(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Step the shared values of ``parameters`` with the outer optimizer."""
        shared = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            one = nn.Parameter(self.state[parameter][ANCHOR])
            one.grad = _sharded_as(parameter, gradient)
            shared.append(one)
        optimizer = self._make(shared)
        group = self.param_groups[0]
        optimizer.param_groups[0].update({key: group[key] for key in self._options})
        for one, parameter in zip(shared, parameters, strict=True):
            state = {k: v for k, v in self.state[parameter].items() if k not in (ANCHOR, SENT)}
            if state:
                optimizer.state[one] = state
        with torch.enable_grad():
            optimizer.step()
        for one, parameter in zip(shared, parameters, strict=True):
            self.state[parameter].update(optimizer.state.get(one, {}))


def _sharded_as(parameter: Tensor, local: Tensor) -> Tensor:
    """The tensor that is sharded like ``parameter`` and of which this rank stores ``local``."""
    return cast("Sharding", sharding_of(parameter)).wrap(local.reshape(-1))


def optimizer_factory(outer: Outer) -> Callable[[list[Any]], Any]:
    """The function that creates the outer optimizer for a list of parameters."""
    return outer.optimizer or _DILOCO


def optimizer_template(outer: Outer) -> Optimizer:
    """An outer optimizer of one placeholder parameter, for its class and options."""
    return cast("Optimizer", optimizer_factory(outer)([nn.Parameter(torch.zeros(1))]))

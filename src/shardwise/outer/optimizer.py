"""Replicas that train alone for many steps, and an outer optimizer that brings them together.

::

    shared      a0 ------------------------------- a1 = step(a0, mean of differences) ---
                 |                                  |
    replica 0    p0 -- step -- ... -- p   a0 - p   a1 -- step -- ...
    replica 1    p0 -- step -- ... -- q   a0 - q   a1 -- step -- ...

The shared parameters are the same bits in all replicas. Each rank keeps its shard of them and
exchanges that with the ranks at its place in the other replicas, so nothing is gathered.
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
from shardwise.outer.packing import mean_of, pack
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
from shardwise.transport.communicator import communicator

__all__ = ["OuterOptimizer", "maker_of", "template_of"]

_PATIENCE_SECONDS = 5.0
_DILOCO = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)


class OuterOptimizer(Optimizer):
    """The shared parameters and the states of the outer optimizer, for each parameter of a model.

    It is a torch optimizer so that ``sw.save(..., outer=...)`` and ``sw.load`` know what it keeps,
    and that learning rate schedulers can set its options.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, outer: Outer, exchange: Exchange
    ) -> None:
        self.outer = outer
        self.exchange = exchange
        self._runtime = runtime_of_root(model)
        self._make = maker_of(outer)
        parameters = [p for p in model.parameters() if p.requires_grad]
        template = template_of(outer)
        counts = {"local_steps": 0, "progress": [astuple(Progress())] * outer.fragments}
        super().__init__(parameters, dict(template.defaults) | counts)
        self._options = set(template.defaults)
        self._optimizer = optimizer
        self._has_joined = False
        self._group_step = 0  # the last one that all ranks know of
        self._takes_part = False  # as far as all ranks know
        self._ticket = 0  # of the state that this rank has to give after the step
        for parameter in parameters:
            self.state[parameter] = {ANCHOR: _copy_of(parameter)}
        self.fragments = fragments_of(self._runtime, outer)
        self._frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
        self._hook = optimizer.register_step_post_hook(self._after_step)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Not for users: the model's optimizer calls what there is to do."""
        raise StepError(
            "the outer optimizer steps after steps of the model's optimizer; call optimizer.step()"
        )

    def remove(self) -> None:
        """Let ``optimizer.step()`` synchronize nothing any more."""
        self._hook.remove()
        self.exchange.close()

    @property
    def local_steps(self) -> int:
        """Steps of the model's optimizer so far.

        A replica that others did not wait for takes their number, so that all of them synchronize
        a fragment at the same time again.
        """
        return int(self.param_groups[0]["local_steps"])

    def planned_bytes(self, step: int) -> int:
        """The bytes of differences that this rank sends after local step ``step``."""
        return sum(
            self.exchange.message_bytes(self.fragments[fragment].packed_bytes)
            for fragment in self.outer.sent_after(step)
        )

    def join(self) -> int:
        """Meet the other replicas; returns the number of steps that were trained.

        If they are training already, this replica takes the state of one of them: parameters, both
        optimizers, and the number of steps. The first step calls it if the user has not.

        Raises:
            PlanError: other replicas have other options or other initial values.
            PeerLost: there is no hub.
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
                raise PeerLost(
                    f"{self.exchange.trouble or 'no replica has a state to take'}; start the hub "
                    "with `python -m shardwise.outer HOST:PORT`, where all replicas reach it"
                )
        self._send_again()
        return self.local_steps

    def begin_after(self, step: int) -> None:
        """Take the model's parameters for those that all replicas share after ``step``.

        For a model that was loaded from a checkpoint of a run without other replicas.
        """
        for parameter in self.state:
            self._anchor(parameter).copy_(local_of(parameter).detach())
        self.param_groups[0]["local_steps"] = step

    @property
    def progress(self) -> list[Progress]:
        """How far each fragment is."""
        return [Progress(*one) for one in self.param_groups[0]["progress"]]

    @torch.no_grad()
    def _after_step(self, *_: object) -> None:
        if self._runtime.scheduler.is_in_transaction:
            raise StepError(
                "sw.transaction cannot undo what replicas have agreed on; step outside of it, or "
                "train without sw.outer_optimizer"
            )
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise PlanError(
                    f"{name} was frozen when sw.outer_optimizer was called, so replicas do not "
                    "share it; call remove() of its result, and sw.outer_optimizer again, in all "
                    "replicas"
                )
        self.join()
        self.param_groups[0]["local_steps"] += 1
        self.exchange.step = self.local_steps
        self._synchronize(self.local_steps)
        if self._ticket:
            self.exchange.give_state(self._ticket, encode_state(self._optimizer, self))
            self._ticket = 0

    def _synchronize(self, step: int) -> None:
        delay = self.outer.delay
        # Without those that this replica was too late for: it sent nothing to wait for.
        applied = [
            fragment
            for fragment in self.outer.applied_after(step)
            if self.progress[fragment].step < step - delay
        ]
        if delay and not all(map(self._apply_decided, applied)):
            return
        for fragment in self.outer.sent_after(step):
            # What came after it was due is first.
            if self.exchange.is_elastic and not self._apply_decided(fragment, seconds=0):
                return
            if self.progress[fragment].step >= step:  # the others did not wait for this replica
                self.param_groups[0]["local_steps"] = max(step, self._group_step)
                return
            # Not while some rank of this replica is cut off: the others would wait for its part.
            if self._takes_part or not self.exchange.is_elastic:
                self._send_difference(fragment)
        if not delay:
            all(map(self._apply_decided, applied))

    @torch.no_grad()
    def _send_again(self) -> None:
        """Send the differences that were on their way when the checkpoint was saved."""
        for number, sent in self.outer.on_their_way_after(self.local_steps).items():
            parameters = self.fragments[number].parameters
            if all(SENT in self.state[p] for p in parameters):
                self.exchange.step = sent
                self._send(number, [local_of(self.state[p][SENT]) for p in parameters])

    def _send_difference(self, number: int) -> None:
        parameters = self.fragments[number].parameters
        differences = [self._anchor(p) - local_of(p) for p in parameters]
        if self.outer.delay:
            for parameter, difference in zip(parameters, differences, strict=True):
                sharding = cast("Sharding", sharding_of(parameter))
                self.state[parameter][SENT] = sharding.wrap(difference.reshape(-1))
        self._send(number, differences)

    def _send(self, number: int, differences: Sequence[Tensor]) -> None:
        fragment = self.fragments[number]
        flat = fragment.flat(differences)
        if not flat.isfinite().all():
            self.exchange.close()  # so that the others do not wait
            pairs = zip(fragment.parameters, differences, strict=True)
            found = next(p for p, one in pairs if not one.isfinite().all())
            name = cast("Sharding", sharding_of(found)).name
            raise StepError(
                f"{name} of this replica is not finite after step {self.local_steps}; it has left "
                "the other replicas, whose parameters would not be finite either; start it again, "
                "and it takes the state of another one"
            )
        packed = pack(flat, self.outer.dtype, self.outer.block)
        before = self.exchange.sent_bytes
        self.exchange.send(number, packed, self._checksum(fragment.parameters))
        sent = AxisBytes(outer=self.exchange.sent_bytes - before)
        self._runtime.scheduler.ledger.add_sent(sent, after_backward=True)

    def _apply_decided(self, number: int, seconds: float | None = None) -> bool:
        """Apply what was decided; False if this replica has taken another one's state instead."""
        seconds = 2 * self.outer.deadline if seconds is None else seconds
        decisions = self.exchange.decided(number, seconds)
        if self.exchange.is_elastic:
            known = self._agree(len(decisions))
            self._group_step, self._takes_part = known.group_step, known.is_member
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
            self._ticket = decision.ticket or self._ticket
        return True

    def _apply(self, fragment: Fragment, decision: Decision) -> None:
        """Step the shared parameters, and have this replica take them."""
        parameters = fragment.parameters
        packed = [one.to(fragment.device) for one in decision.packed]
        mean = mean_of(packed, fragment.num_elements, self.outer.dtype, self.outer.block)
        before = [] if decision.counts_own else [self._anchor(p).clone() for p in parameters]
        self._step_shared(parameters, fragment.split(mean))
        for index, parameter in enumerate(parameters):
            local, shared = local_of(parameter), self._anchor(parameter)
            if not decision.counts_own:  # its own difference stays, and counts in a later round
                local += shared - before[index]
            elif self.outer.mixing:
                local.lerp_(shared, 1 - self.outer.mixing)
            else:
                local.copy_(shared)
            self.state[parameter].pop(SENT, None)
            torch.autograd.graph.increment_version(parameter)

    def _agree(self, num_decisions: int = 0) -> Known:
        """What all ranks of this replica know."""
        exchange = self.exchange
        own = Known(num_decisions, exchange.ticket, exchange.is_member, exchange.group_step)
        links = communicator(self._runtime.mesh.world, self._runtime.pools.device)
        return agree(own, links, self._runtime.pools.device)

    def _take_state(self, ticket: int) -> None:
        decode_state(self.exchange.take_state(ticket), self._optimizer, self)
        for state in self.state.values():  # what is on its way is the other's
            state.pop(SENT, None)
        self.exchange.step = self.local_steps
        self.exchange.ready(self.progress)

    def _checksum(self, parameters: Iterable[Tensor]) -> str:
        """Of this rank's shards of the shared values of ``parameters``."""
        return f"{checksum_of(map(self._anchor, parameters)):08x}"

    def _anchor(self, parameter: Tensor) -> Tensor:
        return local_of(self.state[parameter][ANCHOR])

    def _step_shared(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        shared = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            one = nn.Parameter(self.state[parameter][ANCHOR])
            sharding = cast("Sharding", sharding_of(parameter))
            one.grad = sharding.wrap(gradient)
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


def _copy_of(parameter: Tensor) -> Tensor:
    sharding = cast("Sharding", sharding_of(parameter))
    return sharding.wrap(local_of(parameter).detach().clone().reshape(-1))


def maker_of(outer: Outer) -> Callable[[list[Any]], Any]:
    """What makes the outer optimizer of a list of parameters."""
    return outer.optimizer or _DILOCO


def template_of(outer: Outer) -> Optimizer:
    """The outer optimizer of a parameter, for its class and options."""
    return cast("Optimizer", maker_of(outer)([nn.Parameter(torch.zeros(1))]))

"""Runs a case in a rank: sharded, and in one process beside it, and compares as it goes.

Nothing is exchanged to compare. Every rank computes the whole of the reference and looks at its
own runs of parameters and gradients, so that a difference on one rank does not stop the others.
"""

import contextlib
import copy
import importlib
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.features import fused_wgrad
from shardwise.schedule.sequencer import UnitState
from shardwise.tensor.sharded_tensor import own_part_of
from shardwise.tensor.sharding import local_of
from tests.fuzz.build import Fork, Net, build, halve_gradients, settle_forks, trainable
from tests.fuzz.events import happen, holding, release
from tests.fuzz.faults import Boom, arm
from tests.fuzz.hooks import HooksOnSums
from tests.fuzz.losses import Loss, backwards, losses_of, outputs_of
from tests.fuzz.mutants import mutated
from tests.fuzz.optimizers import make_optimizer
from tests.fuzz.programs import Case, Fault, Micro, Step
from tests.fuzz.replicas import Replicas
from tests.fuzz.shard import mesh_of_replicas, shard
from tests.host.ways import only
from tests.lossless import lossless_wires
from tests.runtime.one_process import TOLERANCE, runtime_of

__all__ = ["CPU", "Comparison", "Report", "check", "prepared", "warm_up"]

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Report:
    """What a rank found: where it differs from one process, and the bits that it ended with."""

    problems: tuple[str, ...]
    refused: tuple[str, ...]  # events, with the engine's error
    shard: int  # ranks with the same number hold the same
    digest: int


def check(case: Case, mutant: str | None = None, way: str = "memory") -> Report:
    """Train ``case`` on the ranks of the pool, connected in one of `WAYS`, and compare."""
    with only(way), prepared(case), mutated(mutant):
        return Comparison(case).run()


@contextlib.contextmanager
def prepared(case: Case) -> Iterator[None]:
    """What ``case`` needs of its process."""
    least = 1 if case.in_slot else fused_wgrad._LEAST_ELEMENTS
    slots = mock.patch.object(fused_wgrad, "_LEAST_ELEMENTS", least)
    with warnings.catch_warnings(), slots, lossless_wires():
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
        yield


def warm_up() -> None:
    """Have torch import what a first optimizer would, which takes seconds."""
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch.distributed.tensor")


class Comparison:
    """A sharded model, its reference, and what was found to differ."""

    loses_results = False  # a step that another rank ends computes anything before it raises

    def __init__(self, case: Case, device: torch.device = CPU) -> None:
        self.case = case
        self.device = device  # of the sharded model
        self.problems: list[str] = []
        self.refused: list[str] = []
        self.tolerance = TOLERANCE
        self.holds = False  # a backward now reduces less than all gradients
        self.is_whole = False  # the last micro-batch held in all units
        self.is_holding = False  # some gradients are not in ``.grad`` yet
        self.held: set[nn.Parameter] = set()  # of the reference: trainable when it held
        self.hooks = HooksOnSums()  # of the reference
        self.where = "start"
        self.reference = build(case.model, case.seed)
        mesh = mesh_of_replicas(case)
        self.model = shard(self.place(build(case.model, case.seed)), case.sharding, mesh)
        settle_forks(self.model, self.reference, all_forks=_raises_everywhere(case))
        for net in (self.reference, self.model):
            halve_gradients(net, case.model.hooked)
        self.optimizers = [
            make_optimizer(case.optimizer, trainable(net)) for net in (self.reference, self.model)
        ]
        if case.in_backward:
            sw.optimizer_in_backward(self.model, self.optimizers[1])
        self.replicas = Replicas(case, mesh, self.model, self.optimizers[1], self.reference)
        self.batches = torch.Generator()

    def place(self, net: Net) -> Net:
        """``net`` on the device."""
        return net.to(self.device)

    def run(self) -> Report:
        """All steps."""
        for number, step in enumerate(self.case.steps):
            self.run_step(number, step)
        return self.report()

    @property
    def nets(self) -> tuple[Net, Net]:
        """The sharded model and its reference."""
        return self.model, self.reference

    def run_step(self, number: int, step: Step) -> None:
        self.where = f"step {number}"
        for position, micro in enumerate(step.micros):
            self._run_micro(number, position, micro)
        if step.micros:
            self.release()
        self._draw_anew(number)
        self.where = f"step {number}"
        if step.before == "write":
            self.write()
        self.run_attempt(step, step.fault)

    def run_attempt(self, step: Step, fault: Fault | None) -> None:
        """Train and update, unless there is a fault and it is hit."""
        if fault is None:
            self._train(step)
        elif self._has_failed(step, fault):
            return
        if step.update:
            # Here, so that the reference does not step if the sharded one raises.
            self.optimizers[0].step()
            self.optimizers[0].zero_grad(set_to_none=step.set_to_none)
            self.replicas.step(set_to_none=step.set_to_none)
        self._compare_models()
        if not self.holds:  # else units may stay for the next micro-batch
            self._check_idle()

    def release(self) -> None:
        """Let backward reduce everything from now on."""
        release(self.model)
        self.holds = False

    def _run_micro(self, number: int, position: int, micro: Micro) -> None:
        self.where = f"step {number}, micro-batch {position}"
        self._draw_anew(number, 1 + position)
        self.is_whole = not micro.units and micro.holds != "nothing"
        with holding(self.model, micro) as self.holds:
            self._compare_losses(micro.loss)
        self.holds &= micro.holds != "no_sync"  # from now on, not those of the micro-batch
        for event in micro.after:
            happen(event, self)

    def _draw_anew(self, number: int, position: int = 0) -> None:
        """Seed batches and turns, for ranks that leave a step early have drawn less."""
        self.batches.manual_seed(1000 * self.case.seed + number + 10**6 * position)
        self._set_turns(number + position)

    def _has_failed(self, step: Step, fault: Fault) -> bool:
        """Train with a fault; afterwards it is as if a step that failed had never been."""
        kept = [None if q.grad is None else q.grad.clone() for q in self.reference.parameters()]
        # Where it steps in backward, the reference may have gone on before another rank raised.
        states = copy.deepcopy((self.reference.state_dict(), self.optimizers[0].state_dict()))
        failed, num_problems = False, len(self.problems)
        was_holding, held, complete = self.is_holding, set(self.held), self.hooks.state()
        with arm(fault, self.model, self.optimizers[1]) as trigger:
            try:
                with sw.transaction(self.model, self.optimizers[1]):
                    self._train(step)
            except (Boom, sw.PeerAborted):
                failed = True
        if failed and self.loses_results:
            del self.problems[num_problems:]
        flags = torch.tensor([trigger.has_fired, failed], dtype=torch.int64)
        dist.all_reduce(flags)
        if flags[1] != (dist.get_world_size() if flags[0] else 0):
            self.report_problem(
                f"{flags[0]} ranks hit the fault and {flags[1]} raised: {failed=} here"
            )
        if not flags[1]:
            return False
        self.reference.load_state_dict(states[0])
        self.optimizers[0].load_state_dict(states[1])
        for parameter, gradient in zip(self.reference.parameters(), kept, strict=True):
            parameter.grad = gradient
        self.is_holding, self.held = was_holding, held
        self.hooks.restore(complete)
        self._compare_models()
        return True

    def report(self) -> Report:
        mesh = runtime_of(self.model).mesh
        locals_ = [_bits(_local(parameter).cpu()) for parameter in self.model.parameters()]
        shard = self.replicas.own * mesh.size + mesh.rank
        return Report(
            tuple(self.problems), tuple(self.refused), shard, zlib.crc32(b"".join(locals_))
        )

    # -- a step ----------------------------------------------------------------------------------

    def _train(self, step: Step) -> None:
        self._compare_outputs_by(step.before)
        for kind in step.losses:
            self._compare_losses(kind)
        if step.clip is not None:
            wanted = nn.utils.clip_grad_norm_(self.reference.parameters(), step.clip)
            self.replicas.clip(step.clip)
            self.compare(sw.clip_grad_norm_(self.model.parameters(), step.clip), wanted, "norm")
        if step.update and not self.case.in_backward:
            self.optimizers[1].step()
            self.optimizers[1].zero_grad(set_to_none=step.set_to_none)

    def _compare_outputs_by(self, kind: str) -> None:
        batch = self.batch()
        match kind:
            case "evaluate":
                with torch.no_grad():
                    self._compare_outputs(self.model, batch)
            case "inference":
                with torch.inference_mode():
                    self._compare_outputs(self.model, batch)
            case "gathered":
                with sw.gathered(self.model):
                    self._compare_outputs(self.model, batch)
            case "copy":
                self._compare_outputs(copy.deepcopy(self.model), batch)

    def write(self) -> None:
        """Halve all parameters by `sw.gathered`."""
        with sw.gathered(self.model, write_back=True):
            _shrink(self.model)
        _shrink(self.reference)
        for net in self.replicas.others:
            _shrink(net)

    def _compare_losses(self, kind: str) -> None:
        own, ranks = dist.get_rank(), self.replicas.ranks(self.replicas.own)
        batches = [self.batch(), self.batch()]
        parts = [[part.clone() for part in batch.chunk(dist.get_world_size())] for batch in batches]
        sharded = [partial(losses_of, self.model, [part[own].to(self.device)]) for part in parts]
        whole = [partial(losses_of, self.reference, [part[r] for r in ranks]) for part in parts]
        pairs = zip(backwards(kind, sharded), self._unseen(backwards(kind, whole)), strict=True)
        where = self.where
        self._begin_reference()
        for number, (found, expected) in enumerate(pairs):
            self.where = f"{where}, {kind} loss {number}"
            with self.unseen():
                self.compare(found.parts[0], expected.parts[ranks.index(own)], "loss")
            self._end_reference()
            self._compare_models()
        self.replicas.run_others(kind, parts, self.model)
        self.where = where

    def run_reference_alone(self, batch: Tensor) -> None:
        """Backward of what the sharded model has had already."""
        parts = [part.clone() for part in batch.chunk(dist.get_world_size())]
        self._begin_reference()
        losses_of(self.reference, parts)[0].total.backward()  # type: ignore[no-untyped-call]
        self._end_reference()
        self._compare_models()

    def _begin_reference(self) -> None:
        self.hooks.before_backward(self.reference.parameters(), is_holding=self.is_holding)

    def _end_reference(self) -> None:
        self.is_holding = self.holds
        if self.is_holding:
            self.held.update(trainable(self.reference))
            return
        self.hooks.run()
        if self.case.in_backward:
            self._step_reference()

    def reduce_held(self) -> None:
        """The sharded model has reduced what it held, which runs the hooks."""
        if self.is_holding:
            self.is_holding = False
            self.held.clear()
            self.hooks.run()

    def run_in_backward(self) -> None:
        """A micro-batch in whose backward the optimizer steps, unlike in the others."""
        batch = self.batch()
        losses_of(self.model, [self.part(batch)])[0].total.backward()  # type: ignore[no-untyped-call]
        parts = [part.clone() for part in batch.chunk(dist.get_world_size())]
        self._begin_reference()
        losses_of(self.reference, parts)[0].total.backward()  # type: ignore[no-untyped-call]
        self._end_reference()
        self._step_reference()
        self._compare_models()

    def compare_copy(self, copied: Net, batch: Tensor) -> None:
        """Compare a copy of the model after its first backward, of ``batch``."""
        parts = [part.clone() for part in batch.chunk(dist.get_world_size())]
        expected = copy.deepcopy(self.reference)
        losses_of(expected, parts)[0].total.backward()  # type: ignore[no-untyped-call]
        is_holding, self.is_holding = self.is_holding, False
        self._compare_pairs(copied, expected)
        self.is_holding = is_holding

    def _step_reference(self) -> None:
        if self.case.sharding.unused == "zeros":
            for parameter in {*trainable(self.reference), *self.held}:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        self.held.clear()
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()

    def _compare_outputs(self, model: nn.Module, batch: Tensor) -> None:
        part = batch.chunk(dist.get_world_size())[dist.get_rank()]
        found = outputs_of(model, part.to(self.device))
        with self.unseen():
            for one, other in zip(found, outputs_of(self.reference, part), strict=True):
                self.compare(one, other, "output")

    def _unseen(self, losses: Iterator[Loss]) -> Iterator[Loss]:
        """``losses`` of the reference, under `unseen`."""
        while True:
            with self.unseen():
                loss = next(losses, None)
            if loss is None:
                return
            yield loss

    # -- comparing -------------------------------------------------------------------------------

    def _compare_models(self) -> None:
        with self.unseen():
            self._compare_pairs(self.model, self.reference)

    def _compare_pairs(self, model: Net, reference: Net) -> None:
        pairs = zip(model.named_parameters(), reference.named_parameters(), strict=True)
        for (name, parameter), (expected_name, expected) in pairs:
            if name != expected_name or parameter.requires_grad != expected.requires_grad:
                self.report_problem(f"{name}: expected {expected_name}, {expected.requires_grad=}")
            if not self.is_holding:
                self._compare_gradients(name, parameter, expected)
            self.compare(parameter.detach(), expected.detach(), name)

    def _compare_gradients(self, name: str, parameter: Tensor, expected: Tensor) -> None:
        found = parameter.grad
        if found is not None and expected.grad is None and self.case.sharding.unused == "zeros":
            expected.grad = torch.zeros_like(expected)
        if (found is None) != (expected.grad is None):
            wanted = "None" if expected.grad is None else "a gradient"
            self.report_problem(f"gradient of {name}: expected {wanted}, got {found}")
        elif found is not None and expected.grad is not None:
            self.compare(found, expected.grad, f"gradient of {name}")

    def compare(self, found: Tensor, expected: Tensor, what: str) -> None:
        if found.shape != expected.shape or found.dtype != expected.dtype:
            self.report_problem(f"{what}: expected {expected.shape} {expected.dtype}, got {found}")
            return
        part = own_part_of(found)
        if part is not None:
            expected = expected.reshape(-1)[part.run.start : part.run.stop]
            found = local_of(found).reshape(-1)
        exact = torch.complex128 if expected.is_complex() else torch.float64
        expected = expected.detach().to(exact)
        error = (_local(found).to(expected.device, exact) - expected).norm().item()
        scale = max(1.0, expected.norm().item())
        if not error <= self.tolerance * scale:
            self.report_problem(f"{what}: off by {error:.2e} of {scale:.2e}")

    def _check_idle(self) -> None:
        runtime = runtime_of(self.model)
        state = runtime.scheduler.sequencer.state
        labels = [unit.plan.label for unit in runtime.units]
        gathered = [name for i, name in enumerate(labels) if state(i) is not UnitState.SHARDED]
        held = runtime.scheduler.ledger.gathered_bytes
        if gathered or held:
            self.report_problem(f"{gathered} are gathered still, {held} bytes")

    def report_problem(self, problem: str) -> None:
        self.problems.append(f"{self.where}: {problem}")

    # -- data ------------------------------------------------------------------------------------

    def part(self, batch: Tensor) -> Tensor:
        """This rank's rows."""
        return batch.chunk(dist.get_world_size())[dist.get_rank()].clone().to(self.device)

    def batch(self) -> Tensor:
        """The global batch [ranks * rows, width]."""
        rows = self.case.rows * dist.get_world_size()
        shape = (rows, self.case.model.width)
        return torch.randn(shape, generator=self.batches, dtype=torch.float64)

    def unseen(self) -> contextlib.AbstractContextManager[None]:
        """Within it, nothing belongs to the program that is compared."""
        return contextlib.nullcontext()

    def _set_turns(self, number: int) -> None:
        for net in (self.model, self.reference, *self.replicas.others):
            for module in net.modules():
                if isinstance(module, Fork):
                    module.turn = number


# -- pieces -------------------------------------------------------------------------------------


def _raises_everywhere(case: Case) -> bool:
    """Whether all ranks have to reach the place of an exception."""
    events = [event for step in case.steps for micro in step.micros for event in micro.after]
    return any(event.kind.startswith("raise") or event.kind == "clip" for event in events)


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _local(tensor: Tensor) -> Tensor:
    return (local_of(tensor) if isinstance(tensor, DTensor) else tensor).detach()


@torch.no_grad()
def _shrink(net: Net) -> None:
    for parameter in net.parameters():
        if parameter.is_floating_point():
            parameter.mul_(0.5)

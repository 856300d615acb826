"""What happens between micro-batches: to the sharded model, and to one process.

The reference is plain torch. Its gradients are always in ``.grad``, so an event does to it what a
user's line does there; after an exception its ``.grad`` is as it was before the micro-batch.
"""

import copy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.fsdp import FullyShardedDataParallel
from tests.fuzz.build import EXACT
from tests.fuzz.faults import Boom, arm
from tests.fuzz.losses import backwards, losses_of
from tests.fuzz.programs import Event, Micro, Step
from tests.runtime.one_process import runtime_of

if TYPE_CHECKING:
    from tests.fuzz.compare import Comparison

__all__ = ["happen", "holding", "release"]

# Where gradients are reduced and nothing was held, a backward that raises leaves in ``.grad`` what
# it has added, as in one process. True demands that it adds nothing there, either.
FAILED_REDUCTIONS_ADD_NOTHING = False
LOOSE = 1e-5  # the tolerance after parts of sums were rounded to float32


@contextmanager
def holding(model: nn.Module, micro: Micro) -> Iterator[bool]:
    """Let units hold as ``micro`` says, and find out whether any does."""
    release(model)
    if micro.holds != "no_sync":
        yield _hold(model, micro)
        return
    with FullyShardedDataParallel(model).no_sync():  # around a model that is sharded already
        yield True


def _hold(model: nn.Module, micro: Micro) -> bool:
    units = [module for module in model.modules() if isinstance(module, sw.FSDPModule)]
    chosen = [units[number % len(units)] for number in micro.units]
    for unit in chosen or units[:1]:
        assert isinstance(unit, sw.FSDPModule)
        if micro.holds in ("gradients", "both"):
            unit.set_requires_gradient_sync(False, recurse=not chosen)
        if micro.holds in ("sums", "both"):
            unit.set_requires_all_reduce(False, recurse=not chosen)
    units[0].set_is_last_backward(micro.holds == "nothing")
    return micro.holds != "nothing"


def release(model: Any) -> None:
    """Let backward reduce everything."""
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(True)


def happen(event: Event, of: "Comparison") -> None:
    """Let an event happen to both models."""
    where = of.where
    of.where += f", {event.kind}"
    _EVENTS[event.kind](event, of)
    of.where = where


# -- gradients are dropped ----------------------------------------------------------------------


def _zero_optimizer(event: Event, of: "Comparison") -> None:
    for optimizer in of.optimizers:
        optimizer.zero_grad(set_to_none=event.variant)


def _zero_model(event: Event, of: "Comparison") -> None:
    for net in of.nets:
        net.zero_grad(set_to_none=event.variant)


def _zero_module(event: Event, of: "Comparison") -> None:
    for net in of.nets:
        modules = list(net.modules())
        modules[event.target % len(modules)].zero_grad(set_to_none=event.variant)


def _drop_one(event: Event, of: "Comparison") -> None:
    for net in of.nets:
        _chosen(net.parameters(), event).grad = None


# -- a micro-batch raises, and the loop catches it ------------------------------------------------


def _raise_in_micro(event: Event, of: "Comparison") -> None:
    _try_micro(event, of, is_grad=True)


def _raise_in_evaluation(event: Event, of: "Comparison") -> None:
    _try_micro(event, of, is_grad=False)


def _raise_and_reduce(event: Event, of: "Comparison") -> None:
    of.release()
    _try_micro(event, of, is_grad=True)


def _try_micro(event: Event, of: "Comparison", *, is_grad: bool) -> None:
    """A micro-batch that the fault ends on all ranks or on none: then it counts."""
    reduces = is_grad and not (of.holds and of.is_whole)
    if reduces and not _adds_nothing(of):
        return
    batch = of.batch()
    own = partial(losses_of, of.model, [of.part(batch)])
    fault, failed = event.fault, False
    assert fault is not None
    with arm(fault, of.model, of.optimizers[1]) as trigger, torch.set_grad_enabled(is_grad):
        try:
            if is_grad:
                list(backwards("plain", [own]))
            else:
                own()
        except (Boom, sw.PeerAborted):  # another rank may have come to it first
            failed = True
    if trigger.has_fired and not failed:
        of.report_problem("the fault was hit, and nothing was raised")
    if is_grad and not failed:
        of.run_reference_alone(batch)
    elif reduces and not FAILED_REDUCTIONS_ADD_NOTHING:
        for parameter, expected in zip(
            of.model.parameters(), of.reference.parameters(), strict=True
        ):
            if expected.grad is None:
                parameter.grad = None  # only what was held is not added to


def _adds_nothing(of: "Comparison") -> bool:
    """Whether a backward that reduces and raises has to leave all gradients as they were."""
    if of.case.in_backward:
        return False  # half a step would stay
    has_forks = any(word in repr(of.case.model) for word in ("Skip(", "Branch("))
    return FAILED_REDUCTIONS_ADD_NOTHING or (of.is_holding and of.is_whole and not has_forks)


def _transaction(event: Event, of: "Comparison") -> None:
    """A step, or a micro-batch, in a transaction; a fault on any rank undoes it."""
    fault = event.fault
    assert fault is not None
    if event.variant:
        of.release()
    of.run_attempt(Step(update=event.variant), fault)


# -- parameters and the runtime change ----------------------------------------------------------


def _freeze(event: Event, of: "Comparison") -> None:
    _set_requires_grad(event, of, requires_grad=False)


def _thaw(event: Event, of: "Comparison") -> None:
    if of.case.in_backward:
        return  # the next forward says to remove and attach it again
    _set_requires_grad(event, of, requires_grad=True)


def _set_requires_grad(event: Event, of: "Comparison", *, requires_grad: bool) -> None:
    """Of one parameter that is as it was built; never of the head, which is always trained."""
    for net in of.nets:
        head = {id(parameter) for parameter in net.head.parameters()}
        others = [
            parameter
            for parameter in net.parameters()
            if id(parameter) not in head
            and parameter.dtype in (EXACT, torch.complex128)
            and parameter.requires_grad is not requires_grad
        ]
        if others:
            others[event.target % len(others)].requires_grad_(requires_grad)


def _convert(event: Event, of: "Comparison") -> None:
    with _refused(of):
        if event.variant:
            of.model.double()
            of.reference.double()
            return
        of.model.float()
        of.model.double()
        of.reference.float().double()
        of.tolerance = LOOSE
        of.reduce_held()


def _to_cpu(_event: Event, of: "Comparison") -> None:
    for net in of.nets:
        net.to("cpu")


def _train(event: Event, of: "Comparison") -> None:
    for net in of.nets:
        net.train(event.variant)


# -- others read or write the model ---------------------------------------------------------------


def _save(_event: Event, of: "Comparison") -> None:
    with _shared_folder() as folder, _refused(of):
        sw.save(folder / "saved", model=of.model, optimizer=of.optimizers[1])


def _load(_event: Event, of: "Comparison") -> None:
    with _shared_folder() as folder, _refused(of):
        sw.save(folder / "saved", model=of.model, optimizer=of.optimizers[1])
        values = copy.deepcopy(of.reference.state_dict())
        of.write()
        sw.load(folder / "saved", model=of.model, optimizer=of.optimizers[1])
        of.reference.load_state_dict(values)


@contextmanager
def _shared_folder() -> Iterator[Path]:
    """The same on all ranks."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as own:
        names = [own]
        dist.broadcast_object_list(names)
        yield Path(names[0])
        dist.barrier()


def _gathered(event: Event, of: "Comparison") -> None:
    with _refused(of):
        if event.variant:
            of.write()
            return
        with sw.gathered(of.model):
            pass


def _full_tensors(event: Event, of: "Comparison") -> None:
    """On all ranks, or on those of one replica alone."""
    mesh = runtime_of(of.model).mesh
    replica = mesh.replicas[event.target % len(mesh.replicas)]
    if event.variant or mesh.group_rank in replica:
        for found, expected in zip(of.model.parameters(), of.reference.parameters(), strict=True):
            whole = found.full_tensor() if isinstance(found, DTensor) else found
            of.compare(whole, expected, "full tensor")


def _copy(_event: Event, of: "Comparison") -> None:
    """Train a copy once: it begins without gradients, and the model keeps its own."""
    with _refused(of):
        twin = copy.deepcopy(of.model)
        release(twin)
        batch = of.batch()
        own = losses_of(twin, [of.part(batch)])
        own[0].total.backward()  # type: ignore[no-untyped-call]
        if not of.case.in_backward:
            of.compare_copy(twin, batch)


def _step_in_backward(_event: Event, of: "Comparison") -> None:
    """Let a backward step that reduces what was held."""
    if of.case.in_backward:
        return
    with _refused(of):
        handle = sw.optimizer_in_backward(of.model, of.optimizers[1])
        of.release()
        of.run_in_backward()
        handle.remove()


def _clip(event: Event, of: "Comparison") -> None:
    clip: Callable[..., Tensor] = sw.clip_grad_norm_
    if event.variant:
        clip = nn.utils.clip_grad_norm_
    with _refused(of):
        found: Any = clip(of.model.parameters(), 0.1)
        wanted = nn.utils.clip_grad_norm_(of.reference.parameters(), 0.1)
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        of.compare(found, wanted.to(found.dtype), "norm")


def _hook(event: Event, of: "Comparison") -> None:
    """A hook that doubles a gradient or clamps it, where all units are reduced at the same time.

    It runs once for each reduction: there are several if a unit is called more often than before.
    """
    if any(micro.units for step in of.case.steps for micro in step.micros):
        return
    is_called_once = not any(word in repr(of.case) for word in _SEVERAL_CALLS)
    numbers = [
        number
        for number, parameter in enumerate(of.reference.parameters())
        if parameter.requires_grad and not parameter.is_complex()
    ]
    number = numbers[event.target % len(numbers)]
    hook: Callable[[Tensor], Tensor] = _clamp if event.variant and is_called_once else _double
    list(of.model.parameters())[number].register_hook(hook)  # type: ignore[no-untyped-call]
    of.hooks.register(list(of.reference.parameters())[number], hook)


_SEVERAL_CALLS = ("sum'", "Repeat(", "Listed(", "Checkpoint(", "Skip(", "Branch(")


def _double(gradient: Tensor) -> Tensor:
    return gradient * 2


def _clamp(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)


@contextmanager
def _refused(of: "Comparison") -> Iterator[None]:
    """Note an error of the engine that refuses what is done, as long as the model stays usable."""
    try:
        yield
    except sw.ShardwiseError as error:
        if isinstance(error, (sw.PeerAborted, sw.PeerLost, sw.RanksDiverged)):
            raise  # it names no way out
        of.refused.append(f"{of.where.rpartition(', ')[2]}: {error}")


def _chosen(parameters: Iterator[nn.Parameter], event: Event) -> nn.Parameter:
    all_ = list(parameters)
    return all_[event.target % len(all_)]


_EVENTS: dict[str, Callable[[Event, "Comparison"], None]] = {
    "zero_grad": _zero_optimizer,
    "model zero_grad": _zero_model,
    "module zero_grad": _zero_module,
    "grad is None": _drop_one,
    "raise in forward": _raise_in_micro,
    "raise in evaluation": _raise_in_evaluation,
    "raise in backward": _raise_in_micro,
    "raise and reduce": _raise_and_reduce,
    "transaction": _transaction,
    "freeze": _freeze,
    "thaw": _thaw,
    "convert": _convert,
    "to cpu": _to_cpu,
    "train": _train,
    "save": _save,
    "load": _load,
    "gathered": _gathered,
    "full tensors": _full_tensors,
    "copy": _copy,
    "step in backward": _step_in_backward,
    "clip": _clip,
    "hook": _hook,
}

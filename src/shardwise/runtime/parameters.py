"""Parameters, which are sharded between steps and dense while their modules compute."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise._private import run_last, set_versions
from shardwise.errors import PlanError
from shardwise.plan.layout import ParameterSpec
from shardwise.runtime import hooks
from shardwise.tensor.sharding import Sharding, local_of

__all__ = [
    "CLASS",
    "STEPS_IN_BACKWARD",
    "FSDPParameter",
    "ParameterOwner",
    "attributes_of",
    "parameter_like",
    "reclaim_locals",
    "tied_since",
]

_FREED_VERSION = 10**9  # of dense parameters without memory; in errors of autograd
CLASS = "_shardwise_class"  # the class of a sharded parameter while its unit computes
_OF_EVERY_PARAMETER = frozenset({"_is_param", "_sharding"})
STEPS_IN_BACKWARD = "_shardwise_steps_in_backward"  # set on parameters that step in backward


class ParameterOwner:
    """A module's attribute that holds a parameter; a tied parameter has several."""

    def __init__(self, module: nn.Module, attribute: str) -> None:
        self._module = weakref.ref(module)
        self._attribute = attribute
        # Recurrent layers have a second list of their weights, which __setattr__ updates.
        self._is_plain = type(module).__setattr__ is nn.Module.__setattr__

    @property
    def module(self) -> nn.Module | None:
        """The module; None if it was deleted."""
        return self._module()

    def get(self) -> Tensor | None:
        """The parameter that the module holds now; None if the module was deleted."""
        module = self._module()
        if module is None:
            return None
        parameter = module._parameters.get(self._attribute)
        if parameter is None:
            raise PlanError(
                f"{module._get_name()}.{self._attribute} is no longer a parameter, but "  # type: ignore[no-untyped-call]
                "fully_shard manages it; delete, prune or parametrize it before fully_shard"
            )
        return parameter

    def drop_weak_references(self) -> None:
        """Make a recurrent layer forget its weak references, which prevent a swap of tensors.

        It uses them to find out that its weights were replaced, which `put` tells it.
        """
        module = self._module()
        if module is not None and (references := vars(module).get("_flat_weight_refs")):
            vars(module)["_flat_weight_refs"] = [None] * len(references)

    def holds_other_than(self, parameter: nn.Parameter) -> bool:
        """Whether a program has assigned another parameter to the attribute.

        A tensor that is no parameter is made anew in each forward, as in layers with DropConnect.
        """
        module = self._module()
        held = parameter if module is None else module._parameters.get(self._attribute)
        return held is not parameter and isinstance(held, nn.Parameter)

    def put(self, parameter: nn.Parameter) -> None:
        module = self._module()
        if module is None:
            return
        if self._is_plain:
            module._parameters[self._attribute] = parameter
        else:
            setattr(module, self._attribute, parameter)


@dataclass(eq=False, slots=True)
class FSDPParameter:
    """One parameter in its sharded and its dense form."""

    sharding: Sharding
    sharded: nn.Parameter  # holds a DTensor
    local: Tensor  # this rank's part, a view of the shard
    dense: nn.Parameter  # [shape], a view of the flat buffer; a DTensor with tensor parallelism
    owners: Sequence[ParameterOwner]
    _version: int = 0  # of `dense`, when its values were last known to be the gathered ones
    _is_freed: bool = False
    on_gradient: Callable[[], None] | None = None  # see `watch_gradient`
    _shown: nn.Parameter | None = None  # in the modules in place of `sharded`
    _num_internal: int = -1  # see `_carry`

    @property
    def spec(self) -> ParameterSpec:
        return self.sharding.extent.parameter

    @property
    def name(self) -> str:
        return self.sharding.name

    @property
    def frozen(self) -> str:
        """What labels of reductions say if it was frozen, for ranks to notice that others train it.

        Those that were frozen when they were sharded are in no reduction.
        """
        return "" if self.sharded.requires_grad else f" without {self.sharding.label}"

    @property
    def modules(self) -> Iterator[nn.Module | None]:
        return (owner.module for owner in self.owners)

    def watch_gradient(self) -> None:
        """Call `on_gradient` each time autograd has put a gradient on this dense parameter."""
        if self.on_gradient is not None:
            hooks.on_gradient(self.dense, self.on_gradient)

    def forget_changes(self) -> bool:
        """Return whether the dense parameter was changed in place since the last call."""
        if self._is_freed:
            return False
        before, self._version = self._version, self.dense._version
        return before != self._version

    def restore(self, view: Tensor, *, keeps_values: bool) -> bool:
        """Let the dense parameter view the flat buffer again, as ``view``. False if it does.

        ``dense.data = other`` and ``dense.set_(other)`` replace its memory.
        """
        local = self.sharding.local_of_dense(self.dense)
        if local.data_ptr() == view.data_ptr():
            return False
        if keeps_values:
            view.data.copy_(local.detach())  # `.data`: autograd compares the version of `view`
        self.dense.data = self.sharding.dense(view)
        self.forget_changes()
        return True

    def is_as_gathered(self) -> bool:
        """Whether this rank's part of the gathered dense parameter has the bits of its shard.

        It has after ``dense.set_(dense)``, which counts as a change in place:
        `torch.nn.utils.parametrize` calls it when a parametrization is registered.
        """
        own = self.sharding.own_part_of(self.sharding.local_of_dense(self.dense).detach())
        expected = self.local.detach().to(own.device, own.dtype)
        bits = [one.reshape(-1).view(torch.uint8) for one in (own, expected)]
        return torch.equal(*bits)

    @staticmethod
    def forbid_reads(parameters: "Sequence[FSDPParameter]") -> None:
        """Make autograd refuse to read dense parameters, which are freed.

        Without that, a backward that does not gather them would read memory at address 0.
        """
        for one in parameters:
            one._is_freed = True
        set_versions([p.dense for p in parameters], [_FREED_VERSION] * len(parameters))

    @staticmethod
    def allow_reads(parameters: "Sequence[FSDPParameter]") -> None:
        """Undo `forbid_reads`, after a gather."""
        freed = [one for one in parameters if one._is_freed]
        for one in freed:
            one._is_freed = False
        set_versions([p.dense for p in freed], [p._version for p in freed])

    def use_unsharded(self) -> None:
        """Put the dense parameter into the modules."""
        if self.dense.requires_grad != self.sharded.requires_grad:
            self._follow_requires_grad()
        if len(self.sharded.__dict__) + len(self.dense.__dict__) != self._num_internal:
            self._carry(self.sharded, self.dense)
        self.show(self.dense)

    def show(self, parameter: nn.Parameter) -> None:
        """Put ``parameter`` into the modules, until `use_sharded`."""
        self._put(parameter)
        self._shown = parameter  # last: after an interrupt in between it would count as assigned

    def take_gradient(self) -> Tensor:
        """Remove the gradient [shape] from the dense parameter and return it."""
        gradient, self.dense.grad = self.dense.grad, None
        assert gradient is not None
        local = self.sharding.local_of_gradient(gradient)
        if type(local) is Tensor:
            return local
        # The gradient of a tensor subclass is copied to a plain tensor, as buffers are plain.
        return torch.empty(local.shape, dtype=local.dtype, device=local.device).copy_(local)

    def use_sharded(self) -> bool:
        """Put the sharded parameter back into the modules; whether it replaces an assigned one."""
        shown, self._shown = self._shown, None
        # Hooks that the forward has registered need the gradient, which the engine's hook takes.
        run_last(self.dense, hooks.is_own)
        is_assigned = shown is not None and any(o.holds_other_than(shown) for o in self.owners)
        if shown is not None and (
            shown is not self.dense
            or len(self.sharded.__dict__) + len(shown.__dict__) != self._num_internal
        ):
            self._carry(shown, self.sharded)
        self._put(self.sharded)
        return is_assigned

    def replacement(self) -> Tensor | None:
        """What the user has put in place of the sharded parameter; None if nothing."""
        held = [tensor for owner in self.owners if (tensor := owner.get()) is not None]
        if self._shown is not None or not held:
            return None
        # ``load_state_dict(assign=True)`` makes a parameter for each name, in the same memory.
        if any(_memory_of(tensor) != _memory_of(held[0]) for tensor in held):
            raise PlanError(
                f"{', '.join(self.spec.names)}: these names of one tied parameter hold different "
                "tensors; assign the same nn.Parameter to each of them"
            )
        is_own = isinstance(held[0], DTensor) and held[0]._local_tensor is self.local
        return None if is_own else held[0]

    def is_replaced(self) -> bool:
        """Whether there is another DTensor now, or another local tensor."""
        held = self.owners[0].get()
        return isinstance(held, DTensor) and held._local_tensor is not self.local

    def is_converted(self) -> bool:
        """Whether the sharded parameter has another dtype or device than when it was sharded."""
        held, own = self.owners[0].get(), self.local
        # A whole parameter that the user has put in its place is not one that was converted.
        return isinstance(held, DTensor) and (held.dtype, held.device) != (own.dtype, own.device)

    def adopt(self, replacement: Tensor) -> None:
        """Take over a parameter that the user put in place of the sharded one, if it fits."""
        if not isinstance(replacement, nn.Parameter):
            raise PlanError(
                f"{self.name}: expected a parameter, got a {type(replacement).__name__}: "
                "functional_call and parametrizations need whole tensors; use them inside "
                "`with sw.gathered(model):`"
            )
        fits = (
            self.sharding.describes(replacement)
            and replacement.dtype == self.local.dtype
            and replacement.device == self.local.device
        )
        if not fits:
            is_whole = not isinstance(replacement, DTensor)
            raise PlanError(
                f"{self.name} was replaced after fully_shard: expected {self.local.dtype} on "
                f"{self.local.device}, sharded; got {replacement.dtype} on {replacement.device}, "
                + (
                    "whole; copy it, as load_state_dict does without assign=True"
                    if is_whole
                    else "sharded in another way; convert and move the model before fully_shard"
                )
            )
        self.local = self.sharding.take_over(replacement, self.local)
        self.sharding.attach_to(replacement)
        self.sharded, self._num_internal = replacement, -1
        self._put(replacement)

    def _carry(self, source: nn.Parameter, target: nn.Parameter) -> None:
        """Give ``target`` the attributes that a program has set on ``source``.

        Most parameters have none. Then `_num_internal` is how many the engine and torch have set,
        and this is not called.
        """
        is_dense = source is self.dense or target is self.dense
        if not self.sharding.carries_attributes:
            return
        attributes, own = attributes_of(source), vars(target)
        for name in attributes_of(target).keys() - attributes.keys():
            del own[name]
        own.update(attributes)
        if is_dense and not attributes_of(target):
            self._num_internal = len(source.__dict__) + len(target.__dict__)

    def _put(self, parameter: nn.Parameter) -> None:
        for owner in self.owners:
            owner.put(parameter)

    def _follow_requires_grad(self) -> None:
        if self.sharded.requires_grad and not self.spec.trainable:
            raise PlanError(
                f"{self.name} was frozen when it was sharded, so no memory is planned for its "
                "gradient; set requires_grad before a forward of the whole model, which plans it"
            )
        self.dense.requires_grad_(self.sharded.requires_grad)


def reclaim_locals(parameters: Sequence[FSDPParameter]) -> None:
    """Adopt parameters that were replaced, as `Module.to` and ``assign=True`` do."""
    for one in parameters:
        for owner in one.owners:
            if not isinstance(held := owner.get(), DTensor) or held._local_tensor is not one.local:
                _adopt_replaced(parameters)
                return


def tied_since(parameters: Sequence[FSDPParameter]) -> list[tuple[FSDPParameter, FSDPParameter]]:
    """Parameters in whose place is another one of ``parameters``, each with that one."""
    replaced = [(one, held) for one in parameters if (held := one.replacement()) is not None]
    kept = {id(one.local): one for one in parameters}
    for one, _ in replaced:
        del kept[id(one.local)]
    locals_of = [(one, held._local_tensor) for one, held in replaced if isinstance(held, DTensor)]
    return [(one, kept[id(local)]) for one, local in locals_of if id(local) in kept]


def _adopt_replaced(parameters: Sequence[FSDPParameter]) -> None:
    """Adopt all replacements, of which some may be in the memory of shards.

    Raises:
        PlanError: a parameter was tied to another one, or is no longer tied.
    """
    for one, other in tied_since(parameters):
        raise PlanError(
            f"{one.name} was tied to {other.name} after fully_shard, which has planned memory "
            "for both; tie them before fully_shard, or before a forward of the whole model"
        )
    replaced = [(one, held) for one in parameters if (held := one.replacement()) is not None]
    shards = {one.local.data_ptr() for one, _ in replaced if type(one.local) is Tensor}
    for one, held in replaced:  # parameters that were exchanged: `adopt` overwrites their memory
        if isinstance(held, DTensor) and one.local.data_ptr() != _memory_of(held) in shards:
            held._local_tensor = local_of(held).detach().clone()
    for one, held in replaced:
        one.adopt(held)


def attributes_of(parameter: Tensor) -> dict[str, Any]:
    """The attributes that neither torch nor the engine has set."""
    return {name: value for name, value in vars(parameter).items() if not _is_internal(name)}


def parameter_like(original: Tensor, tensor: Tensor) -> nn.Parameter:
    """Make ``tensor`` a parameter with the attributes of ``original``."""
    parameter = nn.Parameter(tensor, original.requires_grad)
    vars(parameter).update(attributes_of(original))
    return parameter


def _memory_of(tensor: Tensor) -> int:
    """What is equal for DTensors in the same memory; each of another class's is alone."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else None
    return local.data_ptr() if type(local) is Tensor else id(tensor)


def _is_internal(name: str) -> bool:
    return name in _OF_EVERY_PARAMETER or name.startswith("_shardwise")

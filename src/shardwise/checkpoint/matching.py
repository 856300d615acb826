"""Match the tensors of a checkpoint to those of a model and optimizer, before any is read."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint import tree
from shardwise.checkpoint.collect import check_sharded, check_storable, parameter_names, tensors_of
from shardwise.checkpoint.format import Spec
from shardwise.checkpoint.read import OpenComponent
from shardwise.errors import CheckpointError
from shardwise.optim.states import empty_state
from shardwise.runtime.attach import unowned_states
from shardwise.tensor.sharded_tensor import RunSharding
from shardwise.tensor.sharding import sharding_of

__all__ = [
    "LoadReport",
    "OptimizerStates",
    "Selection",
    "Target",
    "load_copies",
    "match_module",
    "without_adapter_names",
]

_MAX_SHOWN = 12  # names in each list of an error; a wrong model has thousands


@dataclass(frozen=True, slots=True)
class Target:
    """The name of a tensor in the checkpoint and the tensor that receives its values.

    If the tensor is not the module's own memory, ``loaded_as`` is the name under which the module's
    ``load_state_dict()`` must load it afterwards.
    """

    name: str
    tensor: Tensor
    loaded_as: str | None = None


@dataclass(frozen=True)
class Selection:
    """The tensors to load and the differences that are allowed, as passed to `load`."""

    only: tuple[str, ...] | None = None  # patterns of names; None for all
    strict: bool = True
    cast: bool = False
    # The names in the models and components that were matched.
    names: set[str] = field(default_factory=set)

    def includes(self, name: str) -> bool:
        return self.only is None or any(fnmatchcase(name, pattern) for pattern in self.only)

    def check(self, where: str) -> None:
        """Raise a CheckpointError if a pattern matches none of `names`."""
        for pattern in self.only or ():
            if not any(fnmatchcase(name, pattern) for name in self.names):
                raise CheckpointError(
                    f"only={list(self.only or ())}: neither the model nor {where} has a tensor "
                    f"with the name {pattern!r}"
                )


@dataclass
class LoadReport:
    """The differences between a checkpoint and the objects it was loaded into, as lists of names.

    The entries of the last three lists also state what was expected and what was found.
    """

    missing: list[str] = field(default_factory=list)  # not in the checkpoint
    unexpected: list[str] = field(default_factory=list)  # only in the checkpoint
    reshaped: list[str] = field(default_factory=list)
    retyped: list[str] = field(default_factory=list)  # converted without loss
    narrowed: list[str] = field(default_factory=list)  # rounded

    def check(self, where: str, selection: Selection) -> None:
        """Raise if there are differences that ``selection`` does not allow.

        Raises:
            CheckpointError: lists the differences.
        """
        problems = []
        if selection.strict:
            problems += [
                ("missing in the checkpoint", self.missing),
                ("unexpected in the checkpoint", self.unexpected),
            ]
        problems.append(("of another shape", self.reshaped))
        if not selection.cast:
            problems.append(("of a dtype that would be rounded (pass cast=True)", self.narrowed))
        found = [_section(title, names) for title, names in problems if names]
        if found:
            advice = "; to load a part, pass only=[patterns] or strict=False"
            raise CheckpointError(
                f"{where} does not match{advice if selection.strict else ''}\n" + "\n".join(found)
            )

    def __str__(self) -> str:
        lists = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "reshaped": self.reshaped,
            "re-typed": self.retyped,
            "narrowed": self.narrowed,
        }
        return "\n".join(_section(title, names) for title, names in lists.items() if names)


def _section(title: str, names: list[str]) -> str:
    more = f"\n  and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return f"{title}: {len(names)}\n  " + "\n  ".join(names[:_MAX_SHOWN]) + more


# -- modules -------------------------------------------------------------------------------------


def match_module(
    module: nn.Module, component: OpenComponent, selection: Selection, report: LoadReport
) -> list[Target]:
    """Match the tensors of ``module``; a tied one matches by any of its names."""
    check_sharded(module)
    own = tensors_of(module)
    names = {name: [name] for name in own.tensors}
    for other, name in own.aliases.items():
        names[name].append(other)
    specs, aliases = component.specs, component.aliases
    selection.names.update(own.tensors, own.aliases, specs, aliases)
    targets, used = [], set()
    for name, tensor in own.tensors.items():
        candidates = [aliases.get(other, other) for other in names[name]]
        candidates += map(without_adapter_names, names[name])
        found = [candidate for candidate in candidates if candidate in specs]
        used.update(found)
        if not any(selection.includes(other) for other in names[name]):
            continue
        if not found:
            report.missing.append(name)
            continue
        report.unexpected += [
            f"{other}, which is tied to {found[0]} in the model but has other values"
            for other in sorted({*found} - {found[0]})
            if not component.reader.are_equal(found[0], other)
        ]
        target = Target(found[0], tensor, name if name in own.copies else None)
        if target.loaded_as and name.endswith(EXTRA_STATE):
            spec = specs[found[0]]  # which may change between saves
            memory = torch.empty(spec.shape, dtype=spec.torch_dtype, device=tensor.device)
            targets.append(replace(target, tensor=memory))
        elif _fits(specs[found[0]], tensor, report):
            check_storable(name, tensor)
            targets.append(target)
    report.unexpected += [name for name in specs if name not in used and selection.includes(name)]
    copied = {target.loaded_as for target in targets}
    load_copies(module, {name: own.tensors[name] for name in own.copies & copied})
    return targets


EXTRA_STATE = "_extra_state"  # the end of a name of what a module's get_extra_state() returns


def load_copies(module: nn.Module, copies: Mapping[str, Tensor]) -> None:
    """Load tensors that are not the memory of ``module`` with its ``load_state_dict()``.

    Raise a CheckpointError if it does not load one of them.
    """
    if not copies:
        return
    try:
        unknown = module.load_state_dict(copies, strict=False).unexpected_keys
    except RuntimeError as error:
        raise CheckpointError(f"{type(module).__name__}.load_state_dict(): {error}") from error
    if unknown:
        raise CheckpointError(
            f"{unknown[0]}: the state_dict() of {type(module).__name__} returns a copy under this "
            "name, which its load_state_dict() does not load; return the parameter or buffer "
            "itself, or add the hook or set_extra_state() that loads the copy"
        )


def without_adapter_names(name: str) -> str:
    """The name of a parameter without the modules that PEFT wraps around a model and its layers."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _fits(spec: Spec, tensor: Tensor, report: LoadReport) -> bool:
    """Whether the values can be loaded, possibly after a conversion."""
    if spec.shape != tuple(tensor.shape):
        report.reshaped.append(f"{spec.name}: expected {tuple(tensor.shape)}, found {spec.shape}")
        return False
    if spec.torch_dtype is not tensor.dtype:
        text = f"{spec.name}: expected {tensor.dtype}, found {spec.torch_dtype}"
        is_exact = _keeps_values(spec.torch_dtype, tensor.dtype)
        (report.retyped if is_exact else report.narrowed).append(text)
    return True


def _keeps_values(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether ``target`` represents every value of ``source``; the two differ."""
    if source is torch.bool or target is torch.bool or source.is_complex:
        return source is torch.bool
    target = torch.float32 if target is torch.complex64 else target
    if source.is_floating_point:
        if not target.is_floating_point:
            return False
        own, wider = torch.finfo(source), torch.finfo(target)
        return own.eps >= wider.eps and own.max <= wider.max and own.tiny >= wider.tiny
    integers = torch.iinfo(source)
    if target.is_floating_point:
        return integers.max <= 2 / torch.finfo(target).eps
    return torch.iinfo(target).min <= integers.min and integers.max <= torch.iinfo(target).max


# -- optimizers ----------------------------------------------------------------------------------


class OptimizerStates:
    """The states of an optimizer, matched by parameter names.

    After all `targets` have been read, `assign` changes the optimizer.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        component: OpenComponent,
        selection: Selection,
        report: LoadReport,
    ) -> None:
        """Allocate the tensors to read into."""
        self.targets: list[Target] = []
        self._optimizer = optimizer
        self._specs = component.specs
        _check_kind(optimizer, component.tree)
        parameters = parameter_names(optimizer, model)
        selection.names.update(parameters, component.tree["state"])
        selected = {name: p for name, p in parameters.items() if selection.includes(name)}
        self._options: list[dict[str, Any]] = []  # by group; empty if none were saved
        self._match_groups(component.tree["param_groups"], parameters, selection, report)
        saved = component.tree["state"]
        shapes: dict[str, list[tuple[tuple[int, ...], torch.Size]]] = defaultdict(list)
        for name in parameters.keys() & saved.keys():
            for key, value in saved[name].items():
                for spec in map(self._specs.__getitem__, tree.tensor_names(value)):
                    shapes[key].append((spec.shape, parameters[name].shape))
        # Keys of states that are single numbers, such as NAdam's "mu_product". They are never
        # sharded, as in torch, even if a parameter of one element has the same shape.
        self._numbers = {"step"} | {
            key
            for key, pairs in shapes.items()
            if any(prod(own) == 1 and own != of for own, of in pairs)
        }
        # Keys of states with the elements of their parameters, perhaps in another shape, as
        # Prodigy's "s" and "p0". Prodigy has a number for a "p0" of zeros.
        self._elementwise = {
            key
            for key, pairs in shapes.items()
            if all(prod(own) == prod(of) or not own for own, of in pairs)
            and any(prod(own) == prod(of) > 1 for own, of in pairs)
        }
        self._states = {
            selected[name]: {
                key: self._decode(selected[name], key, value) for key, value in state.items()
            }
            for name, state in saved.items()
            if name in selected
        }
        # Parameters whose state is removed, because none was saved.
        self._stale = [parameter for name, parameter in selected.items() if name not in saved]
        others = tree.decode(component.tree.get("other", {}), self._decode_option)
        selection.names.update(map(str, others))
        self._others = {key: x for key, x in others.items() if selection.includes(str(key))}
        own = unowned_states(optimizer)
        lacking = [key for key in own if key not in others and selection.includes(str(key))]
        report.missing += [f"{key} in the optimizer" for key in lacking]
        self._check_options(component.origin)

    def assign(self) -> None:
        """Assign the states and the options of the groups to the optimizer."""
        for parameter in self._stale:
            self._optimizer.state.pop(parameter, None)
        self._optimizer.state.update(self._states)
        for key, value in self._others.items():
            present: Any = self._optimizer.state.get(key)
            is_moved = isinstance(value, Tensor) and isinstance(present, Tensor)
            self._optimizer.state[key] = value.to(present.device) if is_moved else value
        for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
            group.update(options)

    def _match_groups(
        self,
        saved: Sequence[dict[str, Any]],
        parameters: Mapping[str, Tensor],
        selection: Selection,
        report: LoadReport,
    ) -> None:
        """Decode the options of each group, from the one saved group that shares its parameters."""
        names = {id(parameter): name for name, parameter in parameters.items()}
        own = [[names[id(p)] for p in group["params"]] for group in self._optimizer.param_groups]
        found = [group["params"] for group in saved]
        if own == found:
            self._options = [self._decode_options(group) for group in saved]
            return
        known = {name for group in found for name in group}
        missing = [name for name in parameters if name not in known]
        unexpected = [name for name in sorted(known) if name not in parameters]
        for names_of, listed in ((missing, report.missing), (unexpected, report.unexpected)):
            listed += [f"{x} in the optimizer" for x in names_of if selection.includes(x)]
        if not missing and not unexpected and selection.only is None:
            report.missing.append(f"param_groups: expected {_sizes(own)}, found {_sizes(found)}")
        for number, members in enumerate(map(set, own)):
            sources = [group for group in saved if not members.isdisjoint(group["params"])]
            self._options.append(self._decode_options(sources[0]) if len(sources) == 1 else {})
            if len(sources) != 1 and any(map(selection.includes, members)):
                report.missing.append(
                    f"options of param_groups[{number}]: expected the parameters of one saved "
                    f"group, found those of {len(sources)}"
                )

    def _decode_options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        options = {key: value for key, value in group.items() if key != "params"}
        decoded: dict[str, Any] = tree.decode(options, self._decode_option)
        return decoded

    def _check_options(self, origin: str) -> None:
        """Raise a CheckpointError if a saved option is of another type than the optimizer's."""
        for number, options in enumerate(self._options):
            own = dict.fromkeys(_SCHEDULED, 0.0) | self._optimizer.param_groups[number]
            for key, value in options.items():
                if not _is_same_kind(own.get(key), value):
                    raise CheckpointError(
                        f"{origin}: optimizer: param_groups[{number}][{key!r}] is {value!r}, but "
                        f"{type(self._optimizer).__name__} has {own[key]!r} there; load without "
                        "optimizer=, or repair the file"
                    )

    def _decode(self, parameter: Tensor, key: str, value: Any) -> Any:
        def allocate(name: str) -> Tensor:
            return self._add_target(name, self._empty_state(parameter, key, self._specs[name]))

        return tree.decode(value, allocate)

    def _decode_option(self, name: str) -> Tensor:
        spec = self._specs[name]
        # On the CPU, even if torch has another default device.
        return self._add_target(name, torch.empty(spec.shape, dtype=spec.torch_dtype, device="cpu"))

    def _add_target(self, name: str, tensor: Tensor) -> Tensor:
        self.targets.append(Target(name, tensor))
        return tensor

    def _empty_state(self, parameter: Tensor, key: str, spec: Spec) -> Tensor:
        """A tensor for the state ``key`` of ``parameter``: the current one if it fits."""
        made = empty_state(self._optimizer, parameter, key, spec.shape, spec.torch_dtype)
        if made is not None:
            return made
        sharding, shape = sharding_of(parameter), tuple(parameter.shape)
        is_elementwise = key in self._elementwise and spec.shape != ()
        if is_elementwise and spec.shape != shape and isinstance(sharding, RunSharding):
            return sharding.with_shape(spec.shape).empty(spec.torch_dtype, parameter.device)
        is_number = key in self._numbers and prod(spec.shape) == 1 and not is_elementwise
        if is_number or spec.shape != shape:
            on_cpu = key == "step" and id(parameter) in self._steps_on_cpu
            device = torch.device("cpu") if on_cpu else parameter.device
            return torch.empty(spec.shape, dtype=spec.torch_dtype, device=device)
        present = self._optimizer.state.get(parameter, {}).get(key)
        if isinstance(present, Tensor) and _can_hold(present, spec, parameter):
            return present
        if sharding is not None:
            return sharding.empty(spec.torch_dtype, parameter.device)
        return torch.empty(spec.shape, dtype=spec.torch_dtype, device=parameter.device)

    @cached_property
    def _steps_on_cpu(self) -> set[int]:
        """The ids of the parameters whose ``step`` no kernel reads: torch has it on the CPU."""
        pairs = zip(self._optimizer.param_groups, self._options, strict=True)
        groups = [own | options for own, options in pairs]  # as `assign` leaves them
        on_cpu = [one for one in groups if not (one.get("fused") or one.get("capturable"))]
        return {id(parameter) for group in on_cpu for parameter in group["params"]}


# Options that choose an implementation, and options that schedulers add. Any optimizer may have
# them, and they differ between releases of torch.
_SWITCHES = {"foreach", "fused", "capturable", "differentiable", "maximize"}
_SCHEDULED = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
_COMMON_OPTIONS = {"params", "decoupled_weight_decay"} | _SWITCHES | _SCHEDULED


def _check_kind(optimizer: Optimizer, encoded: Mapping[str, Any]) -> None:
    """Raise a CheckpointError if the states are of another kind of optimizer: its step would fail.

    The kinds differ if each side has options that the other lacks. Classes are not compared, so
    that the states of Adam can be loaded into AdamW.
    """
    groups = encoded["param_groups"]
    saved = {key for group in groups for key in group} - _COMMON_OPTIONS
    own = {key for group in optimizer.param_groups for key in group} - _COMMON_OPTIONS
    unknown, lacking = sorted(saved - own), sorted(set(optimizer.defaults) & own - saved)
    if groups and unknown and lacking:
        states = sorted({key for state in encoded["state"].values() for key in state})
        raise CheckpointError(
            "optimizer: the checkpoint was saved with another kind of optimizer, with the options "
            f"{', '.join(unknown)} and the states {', '.join(states) or '(none)'}; "
            f"{type(optimizer).__name__} has the options {', '.join(lacking)} instead; build the "
            "optimizer that was saved, or load without optimizer="
        )


def _is_same_kind(own: Any, saved: Any) -> bool:
    """Whether ``saved`` can replace the option ``own`` of an optimizer."""
    match own, saved:
        case (None, _) | (bool(), None):  # torch chooses an implementation
            return True
        case (bool(), _) | (_, bool()):
            return isinstance(own, bool) and isinstance(saved, bool)
        case (int() | float() | Tensor(), int() | float() | Tensor()):
            return True
        case (tuple() | list(), tuple() | list()):
            return len(own) == len(saved) and all(map(_is_same_kind, own, saved))
    return type(own) is type(saved)


def _can_hold(present: Tensor, spec: Spec, parameter: Tensor) -> bool:
    """Whether ``present``, the optimizer's current state, can receive the values."""
    if present.dtype is not spec.torch_dtype:
        return False
    sharding = sharding_of(parameter)
    if sharding is not None:
        return sharding.describes(present)
    return present.shape == parameter.shape and present.is_contiguous()


def _sizes(groups: list[list[str]]) -> str:
    return f"{len(groups)} groups of {', '.join(str(len(group)) for group in groups)}"

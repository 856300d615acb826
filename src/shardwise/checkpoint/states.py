"""The states of an optimizer: matched by the names of parameters, and laid out as these are."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint import tree
from shardwise.checkpoint.collect import parameter_names
from shardwise.checkpoint.files import Spec
from shardwise.checkpoint.report import Report
from shardwise.checkpoint.targets import Choice, Target
from shardwise.errors import CheckpointError
from shardwise.runtime.tensor import ShardedTensor

__all__ = ["States"]


class States:
    """What an optimizer will have: `targets` have to be read before `assign`."""

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        encoded: Mapping[str, Any],
        specs: Mapping[str, Spec],
    ) -> None:
        """``encoded`` is the component's tree, ``specs`` its tensors."""
        self.targets: list[Target] = []
        self._optimizer = optimizer
        self._parameters = parameter_names(optimizer, model)
        self._encoded = encoded
        self._specs = specs
        self._states: dict[Tensor, dict[str, Any]] = {}
        self._groups: list[dict[str, Any]] = []
        self._stale: list[Tensor] = []  # parameters that have a state and had none

    def match(self, choice: Choice, report: Report) -> None:
        """Make tensors for all that is to be read."""
        saved = self._encoded["state"]
        _check_kind(self._optimizer, self._encoded)
        for name, state in saved.items():
            if name in self._parameters and choice.takes(name):
                parameter = self._parameters[name]
                self._states[parameter] = {
                    key: self._decode(parameter, key, value) for key, value in state.items()
                }
        self._stale = [
            parameter
            for name, parameter in self._parameters.items()
            if name not in saved and choice.takes(name)
        ]
        self._match_groups(choice, report)

    def assign(self) -> None:
        """Give the optimizer its states, and the options of its groups."""
        for parameter in self._stale:
            self._optimizer.state.pop(parameter, None)
        self._optimizer.state.update(self._states)
        for group, options in zip(self._optimizer.param_groups, self._groups, strict=False):
            group.update(options)

    def _match_groups(self, choice: Choice, report: Report) -> None:
        """Options are restored where the groups have the same parameters."""
        saved = self._encoded["param_groups"]
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        own = [[names[id(p)] for p in group["params"]] for group in self._optimizer.param_groups]
        theirs = [group["params"] for group in saved]
        if own == theirs:
            self._groups = [
                tree.decode({k: v for k, v in group.items() if k != "params"}, self._whole)
                for group in saved
            ]
            return
        known = {name for group in theirs for name in group}
        missing = [name for name in self._parameters if name not in known]
        report.missing += [f"{name} in the optimizer" for name in missing if choice.takes(name)]
        report.unexpected += [
            f"{name} in the optimizer"
            for name in sorted(known)
            if name not in self._parameters and choice.takes(name)
        ]
        if not missing and known == set(self._parameters) and choice.only is None:
            report.missing.append(f"param_groups: of {_sizes(own)}, found {_sizes(theirs)}")

    def _decode(self, parameter: Tensor, key: str, value: Any) -> Any:
        known = self._optimizer.state.get(parameter, {}).get(key)

        def make(name: str) -> Tensor:
            spec = self._specs[name]
            # As torch: a count of steps is the optimizer's, though a scalar parameter is as large.
            if key == "step" or spec.shape != tuple(parameter.shape):
                return self._whole(name, self._device(parameter, key))
            tensor = known if _can_hold(known, spec, parameter) else _empty_like(parameter, spec)
            assert isinstance(tensor, Tensor)
            self.targets.append(Target(name, tensor))
            return tensor

        return tree.decode(value, make)

    def _whole(self, name: str, device: torch.device | None = None) -> Tensor:
        spec = self._specs[name]
        tensor = torch.empty(spec.shape, dtype=spec.torch_dtype, device=device or "cpu")
        self.targets.append(Target(name, tensor))
        return tensor

    def _device(self, parameter: Tensor, key: str) -> torch.device:
        """Where torch's optimizers want a state: counts on the CPU, unless a kernel reads them."""
        for group in self._optimizer.param_groups:
            if any(parameter is member for member in group["params"]):
                on_gpu = group.get("fused") or group.get("capturable")
                if key == "step" and not on_gpu:
                    return torch.device("cpu")
        return parameter.device


# Options that choose an implementation, and those that schedulers add: every optimizer may have
# them, and releases of torch differ in them.
_SWITCHES = {"foreach", "fused", "capturable", "differentiable", "maximize"}
_SCHEDULED = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
_COMMON_OPTIONS = {"params", "decoupled_weight_decay"} | _SWITCHES | _SCHEDULED


def _check_kind(optimizer: Optimizer, encoded: Mapping[str, Any]) -> None:
    """Refuse the states of another kind of optimizer, which fail in its first step.

    A checkpoint does not name the class, so that Adam's states can be loaded into AdamW. The kind
    is another one if each side has options that the other lacks.

    Raises:
        CheckpointError: names the options and states.
    """
    groups = encoded["param_groups"]
    saved = {key for group in groups for key in group} - _COMMON_OPTIONS
    own = {key for group in optimizer.param_groups for key in group} - _COMMON_OPTIONS
    unknown, lacking = sorted(saved - own), sorted(set(optimizer.defaults) & own - saved)
    if groups and unknown and lacking:
        states = sorted({key for state in encoded["state"].values() for key in state})
        kind = type(optimizer).__name__
        raise CheckpointError(
            "optimizer: the checkpoint is that of another kind of optimizer, with the options "
            f"{', '.join(unknown)} and the states {', '.join(states) or '(none)'}; {kind} has "
            f"the options {', '.join(lacking)} instead; build the optimizer that was saved, or "
            "load without optimizer="
        )


def _can_hold(known: Any, spec: Spec, parameter: Tensor) -> bool:
    """Whether the tensor that is there can take the values, and no other is needed."""
    if not isinstance(known, Tensor) or known.dtype is not spec.torch_dtype:
        return False
    if isinstance(parameter, ShardedTensor):
        return isinstance(known, ShardedTensor) and known.sharding.matches(parameter.sharding)
    return known.shape == parameter.shape and known.is_contiguous()


def _empty_like(parameter: Tensor, spec: Spec) -> Tensor:
    if not isinstance(parameter, ShardedTensor):
        return torch.empty(spec.shape, dtype=spec.torch_dtype, device=parameter.device)
    length = len(parameter.sharding.run)
    local = torch.empty(length, dtype=spec.torch_dtype, device=parameter.device)
    return ShardedTensor(local, parameter.sharding)


def _sizes(groups: list[list[str]]) -> str:
    return f"{len(groups)} groups of {', '.join(str(len(group)) for group in groups)}"

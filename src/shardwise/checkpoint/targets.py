"""What of a checkpoint goes where: names are matched before anything is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from shardwise.checkpoint.collect import check_idle, tensors_of
from shardwise.checkpoint.files import Spec
from shardwise.checkpoint.report import Report

__all__ = ["Choice", "Target", "match_module"]


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the checkpoint, and the one that takes its values."""

    name: str
    tensor: Tensor


@dataclass(frozen=True)
class Choice:
    """What the user wants of a checkpoint."""

    only: tuple[str, ...] | None = None  # patterns of names of tensors; None for all
    strict: bool = True
    cast: bool = False

    def takes(self, name: str) -> bool:
        return self.only is None or any(fnmatchcase(name, pattern) for pattern in self.only)


def match_module(
    module: nn.Module,
    specs: Mapping[str, Spec],
    aliases: Mapping[str, str],
    choice: Choice,
    report: Report,
) -> list[Target]:
    """The parameters and buffers of ``module``; tied ones are found under any of their names."""
    check_idle(module)
    tensors, other_names = tensors_of(module)
    names = {name: [name] for name in tensors}
    for other, name in other_names.items():
        names[name].append(other)
    targets, used = [], set()
    for name, tensor in tensors.items():
        known = [aliases.get(other, other) for other in names[name]]
        found = [other for other in known if other in specs]
        used.update(found)
        if not any(choice.takes(other) for other in names[name]):
            continue
        if not found:
            report.missing.append(name)
        elif _fits(specs[found[0]], tensor, report):
            targets.append(Target(found[0], tensor))
    report.unexpected += [name for name in specs if name not in used and choice.takes(name)]
    return targets


def _fits(spec: Spec, tensor: Tensor, report: Report) -> bool:
    """Whether it can be loaded, perhaps converted."""
    if spec.shape != tuple(tensor.shape):
        report.reshaped.append(f"{spec.name}: {tuple(tensor.shape)}, found {spec.shape}")
        return False
    if spec.torch_dtype is not tensor.dtype:
        text = f"{spec.name}: {tensor.dtype}, found {spec.torch_dtype}"
        is_wider = torch.promote_types(spec.torch_dtype, tensor.dtype) is tensor.dtype
        (report.retyped if is_wider else report.narrowed).append(text)
    return True

"""Parameters without a gradient after a backward: leave None, fill with zeros, or raise."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from shardwise.errors import StepError
from shardwise.runtime.gradients import GradientBuffer
from shardwise.runtime.observer import Backward, StepObserver
from shardwise.runtime.parameters import FSDPParameter
from shardwise.transport.api import Work
from shardwise.transport.communicator import Communicator

__all__ = [
    "UNUSED",
    "Unused",
    "UnusedParameters",
    "UsedParameterSync",
    "check_all_used",
    "launch_used_sync",
]

Unused = Literal["none", "zeros", "error"]
UNUSED: tuple[str, ...] = get_args(Unused)

_MOST_SHOWN = 20


@dataclass(frozen=True)
class UsedParameterSync:
    """An all-gather of the parameters that ranks used: flags [ranks, parameters]."""

    pending: Work | None  # None if this rank is alone
    flags: Tensor

    def wait(self, links: Communicator) -> list[list[int]]:
        """Wait for the flags of all ranks."""
        if self.pending is not None:
            links.wait(self.pending)
        flags: list[list[int]] = self.flags.tolist()
        return flags


def launch_used_sync(
    own: Sequence[bool], links: Communicator, device: torch.device, label: str
) -> UsedParameterSync:
    """Gather which parameters each rank used, after the reductions that were launched before."""
    flags = torch.zeros(links.num_ranks, len(own), dtype=torch.uint8, device=device)
    flags[links.rank] = torch.tensor(own, dtype=torch.uint8)
    if links.num_ranks == 1 or not own:
        return UsedParameterSync(None, flags)
    pending = links.reduce.all_gather(flags.view(-1), links.world, label)
    return UsedParameterSync(pending, flags)


def check_all_used(
    parameters: Sequence[FSDPParameter], used: Sequence[Sequence[bool | int]]
) -> None:
    """Refuse a backward that left out parameters that require gradients.

    Args:
        parameters: with room for gradients; those that were frozen since do not count.
        used: [ranks, parameters], whether the rank gave it a gradient.

    Raises:
        StepError: names the parameters, and for each the ranks.
    """
    if not any(map(any, used)):
        return  # `autograd.grad` for something other than parameters is no mistake
    missing = [
        f"  {parameter.name}: unused on {_shown(by_rank)}"
        for parameter, *by_rank in zip(parameters, *used, strict=True)
        if parameter.sharded.requires_grad and not all(by_rank)
    ]
    if not missing:
        return
    if len(missing) > _MOST_SHOWN:
        missing = [*missing[:_MOST_SHOWN], f"  and {len(missing) - _MOST_SHOWN} more"]
    raise StepError(
        "parameters that require gradients got none in this backward (unused='error'):\n"
        + "\n".join(missing)
        + "\nLet every rank use them, freeze them with requires_grad_(False), or pass "
        "unused='none' to fully_shard; zero_grad() drops what this backward left."
    )


class UnusedParameters(StepObserver):
    """At the end of a backward, ranks agree on the parameters that no rank used.

    Args:
        mode: as ``unused`` in `fully_shard`.
        device: of the model.
    """

    def __init__(self, mode: Unused, device: torch.device) -> None:
        self.mode: Unused = mode
        self.device = device
        self._sync: UsedParameterSync | None = None  # in flight

    def reductions_launched(self, backward: Backward) -> None:
        if self.mode != "zeros" and backward.complete:
            used = [used for each in _gradients(backward) for used in each.used]
            label = "agree on unused parameters"
            self._sync = launch_used_sync(used, backward.links, self.device, label)

    def step_end(self, backward: Backward) -> None:
        """Leave the gradient of a parameter alone if no rank used it, or refuse that.

        Raises:
            StepError: with ``unused="error"``, a rank did not use some parameters.
        """
        gradients = _gradients(backward)
        if self._sync is None:
            for each in gradients:
                if backward.complete:
                    each.shard.fill_with_zeros()
                each.forget()
            return
        used = self._sync.wait(backward.links)
        self._sync = None
        if self.mode == "error":
            check_all_used([p for each in gradients for p in each.parameters], used)
        used_anywhere = iter([any(by_rank) for by_rank in zip(*used, strict=True)])
        for each in gradients:
            each.settle([next(used_anywhere) for _ in each.used])

    def failed(self) -> list[object]:
        in_flight, self._sync = self._sync, None
        return [] if in_flight is None else [in_flight]


def _gradients(backward: Backward) -> list[GradientBuffer]:
    return [gradients for unit in backward.units for gradients in unit.gradients]


def _shown(by_rank: Sequence[bool | int]) -> str:
    missing = [str(rank) for rank, used in enumerate(by_rank) if not used]
    if len(missing) == len(by_rank):
        return "every rank"
    more = f" and {len(missing) - _MOST_SHOWN} more" if len(missing) > _MOST_SHOWN else ""
    return f"rank{'s' * (len(missing) > 1)} {', '.join(missing[:_MOST_SHOWN])}{more}"

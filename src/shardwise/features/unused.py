"""Parameters without a gradient after a backward: leave None, fill with zeros, or raise.

Ranks exchange which parameters they used in one all-reduce, with a byte per parameter. A rank that
used all of them knows the result in advance, so its host does not wait for the device.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from shardwise.comm.communicator import Communicator
from shardwise.errors import StepError
from shardwise.runtime.gradients import Gradients
from shardwise.runtime.ledger import count_sent
from shardwise.runtime.observer import Backward, StepObserver
from shardwise.runtime.parameters import FSDPParameter
from shardwise.runtime.unit import Unit

__all__ = [
    "UNUSED",
    "Unused",
    "UnusedParameters",
    "UsedParameterSync",
    "check_all_used",
    "gradients_of",
    "settle",
    "used_of",
]

Unused = Literal["none", "zeros", "error"]
UNUSED: tuple[str, ...] = get_args(Unused)

_MAX_SHOWN = 20


def gradients_of(units: Iterable[Unit]) -> list[Gradients]:
    """The gradients of all layouts of ``units``."""
    return [gradients for unit in units for gradients in unit.gradients]


def settle(gradients: Iterable[Gradients], used_anywhere: Iterable[bool]) -> None:
    """Finish ``gradients``: parameters that no rank used keep the gradient that they had."""
    flags = iter(used_anywhere)
    for each in gradients:
        each.settle([next(flags) for _ in each.used])


class UsedParameterSync:
    """A collective in flight that finds out which parameters of ``units`` any rank used."""

    def __init__(
        self, units: Iterable[Unit], comm: Communicator, device: torch.device, label: str
    ) -> None:
        units = list(units)
        self._gradients = gradients_of(units)
        # Parameters that get no gradient, because they are frozen, count as used.
        self._own = [
            is_used or not each.gets_gradient(position)
            for each in self._gradients
            for position, is_used in enumerate(each.used)
        ]
        self._flags = _flags(self._own, device)
        self._pending = None
        if comm.num_ranks > 1 and self._own:
            self._pending = comm.reduce.all_reduce_max(self._flags, comm.world, label)
            count_sent(self._gradients[0].mesh, self._pending)
        across = units[0].settings.across_replicas if units else None
        if across is not None and self._own:
            self._pending = across(self._pending, self._flags, is_max=True)

    def wait(self, comm: Communicator) -> list[bool]:
        """Whether any rank used each parameter."""
        if self._pending is not None:
            comm.wait(self._pending)
            if not all(self._own):
                return list(map(bool, self._flags.tolist()))
        return self._own

    def settle(self, comm: Communicator) -> None:
        """Wait, and leave the gradients of parameters that no rank used as they were."""
        settle(self._gradients, self.wait(comm))

    def abandon(self) -> "UsedParameterSync":
        """Stop waiting for the result. Keep the returned object until the ranks synchronize."""
        if self._pending is not None:
            self._pending.wait(0.0)
        return self


def used_of(gradients: Iterable[Gradients]) -> list[bool]:
    """Whether this rank used each parameter."""
    return [is_used for each in gradients for is_used in each.used]


def check_all_used(
    gradients: Iterable[Gradients], used: Sequence[bool], backward: Backward, device: torch.device
) -> list[bool]:
    """Raise if any rank computed no gradient for a parameter that requires one.

    All ranks call this; ``used`` says which parameters of ``gradients`` this rank used. A shadow
    computes nothing, so it misses none.

    Returns:
        Whether any rank used each parameter. Either all values are true or none is.

    Raises:
        StepError: names the parameters and, for each, the ranks.
    """
    parameters, comm = [p for each in gradients for p in each.parameters], backward.comm
    missing = [
        p.sharded.requires_grad and not (is_used or backward.is_shadow)
        for p, is_used in zip(parameters, used, strict=True)
    ]
    flags = _flags([*used, *missing], device)
    if comm.num_ranks > 1 and used:
        pending = comm.reduce.all_reduce_max(flags, comm.world, "agree on unused parameters")
        count_sent(parameters[0].sharding.mesh, pending)
        comm.wait(pending)
    used_anywhere, missing_anywhere = flags.bool().view(2, -1).tolist()
    # `autograd.grad` with respect to other tensors uses no parameter, which is not a mistake.
    if any(used_anywhere) and any(missing_anywhere):
        raise _unused_error(parameters, _by_rank(missing, comm, device))
    return list(used_anywhere)


def _flags(values: Sequence[bool], device: torch.device) -> Tensor:
    """One byte per value, in a tensor that a collective may write to."""
    with torch.inference_mode(mode=False):
        if all(values):  # no copy to the device
            return torch.ones(len(values), dtype=torch.uint8, device=device)
        return torch.tensor(values, dtype=torch.uint8, device="cpu").to(device, non_blocking=True)


def _by_rank(missing: Sequence[bool], comm: Communicator, device: torch.device) -> Tensor:
    """The ``missing`` flags of every rank: [ranks, parameters]."""
    rows = _flags(missing, device).repeat(comm.num_ranks, 1)
    if comm.num_ranks > 1:
        comm.wait(comm.reduce.all_gather(rows.view(-1), comm.world, "name unused parameters"))
    return rows


def _unused_error(parameters: Sequence[FSDPParameter], missing: Tensor) -> StepError:
    by_parameter = missing.bool().T.tolist()
    lines = [
        f"  {parameter.name}: unused on {_shown(by_rank)}"
        for parameter, by_rank in zip(parameters, by_parameter, strict=True)
        if any(by_rank)
    ]
    if len(lines) > _MAX_SHOWN:
        lines = [*lines[:_MAX_SHOWN], f"  and {len(lines) - _MAX_SHOWN} more"]
    return StepError(
        "parameters that require gradients got none in this backward (unused='error'):\n"
        + "\n".join(lines)
        + "\nLet every rank use them, freeze them with requires_grad_(False), or pass "
        "unused='none' to fully_shard; call zero_grad() to clear the gradients of this backward."
    )


def _shown(by_rank: Sequence[bool]) -> str:
    missing = [str(rank) for rank, is_missing in enumerate(by_rank) if is_missing]
    if len(missing) == len(by_rank):
        return "every rank"
    more = f" and {len(missing) - _MAX_SHOWN} more" if len(missing) > _MAX_SHOWN else ""
    return f"rank{'s' * (len(missing) > 1)} {', '.join(missing[:_MAX_SHOWN])}{more}"


class UnusedParameters(StepObserver):
    """Handles the parameters that no rank used, at the end of each backward."""

    def __init__(self, mode: Unused, device: torch.device) -> None:
        self.mode: Unused = mode  # as ``unused`` in `fully_shard`
        self.device = device
        self._sync: UsedParameterSync | None = None  # in flight

    def reductions_launched(self, backward: Backward) -> None:
        if self.mode == "none" and backward.complete:
            self._sync = UsedParameterSync(
                backward.units, backward.comm, self.device, "agree on unused parameters"
            )

    def step_end(self, backward: Backward) -> None:
        """Keep the gradients of parameters that no rank used, fill them with zeros, or raise."""
        gradients = gradients_of(backward.units)
        if self.mode == "zeros" or not backward.complete:
            for each in gradients:
                if backward.complete:
                    each.fill_with_zeros()
                each.forget()
            return
        if self.mode == "error":
            settle(gradients, check_all_used(gradients, used_of(gradients), backward, self.device))
        else:
            assert self._sync is not None
            self._sync.settle(backward.comm)
            self._sync = None

    def failed(self) -> list[object]:
        in_flight, self._sync = self._sync, None
        return [] if in_flight is None else [in_flight.abandon()]

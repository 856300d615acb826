"""Replicas that synchronize seldom: the others than this rank's, in this process."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from tests.fuzz.build import Fork, Net, build, halve_gradients, trainable
from tests.fuzz.losses import backwards, losses_of
from tests.fuzz.optimizers import make_optimizer
from tests.fuzz.programs import Case, Slow
from tests.runtime.one_process import runtime_of

__all__ = ["Replicas"]


class Replicas:
    """All of them with whole parameters; without an outer axis, the reference is the only one."""

    def __init__(
        self,
        case: Case,
        mesh: DeviceMesh | None,
        model: Net,
        optimizer: torch.optim.Optimizer,
        reference: Net,
    ) -> None:
        """``model``, whose twin is ``reference``, becomes a replica along a dim of ``mesh``."""
        self._case = case
        self._num = 1 if mesh is None else mesh.size(0)
        self.own = 0 if mesh is None else mesh.get_local_rank(0)
        nets = [reference if i == self.own else _twin(case, reference) for i in range(self._num)]
        self.others = [net for net in nets if net is not reference]
        self._optimizers = [make_optimizer(case.optimizer, trainable(net)) for net in self.others]
        self._num_steps = 0
        if case.outer is None or mesh is None:
            self._shared = None
            return
        # Imported here because it needs pydantic, and few cases need it.
        from shardwise.verification.replicas import (  # noqa: PLC0415
            SharedParameters,
            names_in_fragments,
        )

        row = _row(case.outer, model)
        self.handle = sw.outer_optimizer(model, optimizer, row, group=mesh.get_group(0))
        parameters = [dict(net.named_parameters()) for net in nets]
        self._shared = SharedParameters(row, parameters, names_in_fragments(model, row))

    def ranks(self, replica: int) -> range:
        """Those that have the parts of a batch for it."""
        size = dist.get_world_size() // self._num
        return range(replica * size, (replica + 1) * size)

    def run_others(self, kind: str, parts: Sequence[Sequence[Tensor]], model: Net) -> None:
        """Forwards and backwards of a ``kind`` in the other replicas."""
        numbers = [number for number in range(self._num) if number != self.own]
        for number, net in zip(numbers, self.others, strict=True):
            own = [[part[rank].clone() for rank in self.ranks(number)] for part in parts]
            for _ in backwards(kind, [partial(losses_of, net, part) for part in own]):
                self._fill_with_zeros(net, model)

    def clip(self, norm: float) -> None:
        for net in self.others:
            nn.utils.clip_grad_norm_(net.parameters(), norm)

    def step(self, *, set_to_none: bool) -> None:
        """Step the other replicas, and synchronize all."""
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        self._num_steps += 1
        if self._shared is not None:
            self._shared.synchronize(self._num_steps)

    def _fill_with_zeros(self, net: Net, model: Net) -> None:
        """Where the engine gave gradients that no part of a batch has."""
        if self._case.sharding.unused == "zeros":
            for parameter, sharded in zip(net.parameters(), model.parameters(), strict=True):
                if parameter.grad is None and sharded.grad is not None:
                    parameter.grad = torch.zeros_like(parameter)


def _twin(case: Case, reference: Net) -> Net:
    net = build(case.model, case.seed)
    halve_gradients(net, case.model.hooked)
    for module, like in zip(net.modules(), reference.modules(), strict=True):
        if isinstance(module, Fork) and isinstance(like, Fork):
            module.by_data = like.by_data
    return net


def _row(slow: Slow, model: Net) -> sw.Outer:
    units = runtime_of(model).units
    most = sum(any(p.sharded.requires_grad for p in unit.parameters) for unit in units)
    return sw.Outer(
        every=slow.every,
        fragments=1 + slow.fragments % min(most, slow.every),
        delay=slow.delay % slow.every,
        mixing=slow.mixing,
        dtype="float64",
    )

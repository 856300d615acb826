"""Replicas with an outer optimizer, simulated in one process: the reference of `sw.Outer`.

Every rank trains all replicas, each a `Reference` on its own parts of the batches, and applies the
outer optimizer to whole parameters. From `shardwise.optim`, the simulation takes only the
optimizer and the parameters of each fragment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shardwise.errors import PlanError
from shardwise.features.fsdp_module import FSDPModule
from shardwise.optim.fragments import fragments_of
from shardwise.optim.outer import Outer
from shardwise.optim.outer_optimizer import optimizer_of
from shardwise.replicas.local_steps import outer_optimizer
from shardwise.runtime.module import runtime_of_root
from shardwise.tensor.mesh import DataParallelMesh
from shardwise.verification.batches import Part
from shardwise.verification.exchange import RankExchange
from shardwise.verification.reference import Outcome, Reference, Training

__all__ = ["ReplicaTraining", "SharedParameters", "names_in_fragments"]


@dataclass(frozen=True, slots=True)
class ReplicaTraining(Training):
    """Training in which a sharded model is one of several replicas."""

    outer: Outer
    mesh: DeviceMesh  # (replicas, ranks of a replica)

    def optimizer(self, model: nn.Module) -> Optimizer:
        # super() does not work in a dataclass with slots.
        optimizer = Training.optimizer(self, model)
        if isinstance(model, FSDPModule):
            outer_optimizer(model, optimizer, self.outer, group=self.mesh.get_group(0))
        return optimizer

    def check(self, steps: int, *, is_ours: bool) -> None:
        """Raise a PlanError for another engine or if ``steps`` miss a fragment."""
        if not is_ours:
            raise PlanError("outer= works only with this engine; omit it to verify another one")
        least = self.outer.every + self.outer.delay
        if steps < least:
            raise PlanError(
                f"steps={steps}: with every={self.outer.every} and delay={self.outer.delay} all "
                f"fragments are synchronized after step {least}; pass steps={least} or more"
            )

    def outcomes(
        self,
        model: nn.Module,
        mesh: DataParallelMesh,
        exchange: RankExchange,
        batches: Sequence[Sequence[Part]],
        *,
        zeros: bool,
    ) -> list[Outcome]:
        """Train all replicas in this process; return the outcomes of this rank's replica, by step.

        Their loss is the mean over the replicas. The units of ``model`` determine the fragments;
        mesh, exchange and batches are those of all ranks.
        """
        parts = [[mesh.global_ranks.index(rank) for rank in row] for row in self.mesh.mesh.tolist()]
        replicas = [Reference(self, mesh, exchange, num_parts=len(row)) for row in parts]
        parameters = [replica.parameters for replica in replicas]
        shared = SharedParameters(self.outer, parameters, names_in_fragments(model, self.outer))
        own = self.mesh.get_local_rank(0)
        found = []
        for number, batch in enumerate(batches, start=1):
            outcomes = [
                replica.step([batch[part] for part in row], zeros=zeros)
                for replica, row in zip(replicas, parts, strict=True)
            ]
            shared.synchronize(number)
            loss = fsum(outcome.loss for outcome in outcomes) / len(outcomes)
            found.append(replace(outcomes[own], loss=loss, parameters=replicas[own].values()))
        return found


def names_in_fragments(model: nn.Module, outer: Outer) -> list[list[str]]:
    """Return the names of the parameters in each fragment of a sharded ``model``."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    fragments = fragments_of(runtime_of_root(model), outer)
    return [[names[parameter] for parameter in fragment.parameters] for fragment in fragments]


class SharedParameters:
    """The shared parameters of replicas with whole parameters, and their outer optimizer."""

    def __init__(
        self,
        outer: Outer,
        replicas: Sequence[Mapping[str, Tensor]],  # by name, with the same values
        fragments: Sequence[Sequence[str]],
    ) -> None:
        self._outer = outer
        self._replicas = replicas
        self._fragments = fragments
        self._values = {
            name: nn.Parameter(replicas[0][name].detach().clone())
            for fragment in fragments
            for name in fragment
        }
        self._optimizers = [
            optimizer_of(outer, [self._values[name] for name in one]) for one in fragments
        ]
        self._differences: dict[str, Tensor] = {}  # means over replicas, not applied yet

    def synchronize(self, step: int) -> None:
        """Synchronize what is due after step ``step`` of all replicas, counted from 1."""
        if self._outer.delay:
            self._apply(step)
        self._take_differences(step)
        if not self._outer.delay:
            self._apply(step)

    @torch.no_grad()
    def _take_differences(self, step: int) -> None:
        for fragment in self._outer.sent_after(step):
            for name in self._fragments[fragment]:
                own = torch.stack([replica[name] for replica in self._replicas])
                self._differences[name] = (self._values[name] - own).mean(0)

    def _apply(self, step: int) -> None:
        for fragment in self._outer.applied_after(step):
            for name in self._fragments[fragment]:
                self._values[name].grad = self._differences.pop(name)
            self._optimizers[fragment].step()
            for name in self._fragments[fragment]:
                for replica in self._replicas:
                    own, shared = replica[name].detach(), self._values[name].detach()
                    own.copy_(self._outer.mixing * own + (1 - self._outer.mixing) * shared)

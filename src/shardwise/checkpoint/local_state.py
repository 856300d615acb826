"""This rank's shards of a model and its optimizers as plain data, which another replica loads."""

import copy
import zlib
from collections.abc import Iterable
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from shardwise.comm.device import random_states, set_random_states
from shardwise.errors import PlanError
from shardwise.optim.states import check_options, load_local_states, local_states
from shardwise.runtime.module import runtime_of_root
from shardwise.tensor.sharding import local_of

__all__ = ["LocalState", "checksum_of"]


class LocalState:
    """What the same rank of a replica that joins takes from this one.

    Parameters and states of optimizers are those of the moment, which only a step that counts
    changes. Buffers, random states and registered objects are those of the last `mark`.
    """

    def __init__(self, model: nn.Module, *optimizers: Optimizer, trains_on: bool = False) -> None:
        """``trains_on``: the model is trained while another replica copies what `save` returns."""
        self.runtime = runtime_of_root(model)
        self._model = model
        self._optimizers = optimizers
        self._trains_on = trains_on
        self._registered: dict[str, Stateful] = {}
        self._marked: dict[str, Any] = {}

    @property
    def parameters(self) -> list[Tensor]:
        """The trainable parameters, which are all sharded."""
        sharded = (p.sharded for unit in self.runtime.units for p in unit.parameters)
        return [p for p in sharded if p.requires_grad]

    @property
    def description(self) -> str:
        """What must be the same in all replicas, in a line."""
        mesh, plan = self.runtime.mesh, self.runtime.plan
        names = [p.name for unit in self.runtime.units for p in unit.parameters]
        digest = sha256(repr((plan, names)).encode()).hexdigest()[:12]
        frozen = checksum_of(p for p in self._model.parameters() if not p.requires_grad)
        return (
            f"{len(names)} parameters on {mesh.num_ranks} ranks, {plan.strategy}, "
            f"{type(self._optimizers[0]).__name__}, plan {digest}, frozen values {frozen:08x}"
        )

    def register(self, name: str, stateful: Stateful) -> None:
        """Add an object that has a state.

        Raises:
            PlanError: there is another object with this name.
        """
        if name in self._registered:
            raise PlanError(f"register({name!r}): there is another object with this name")
        self._registered[name] = stateful

    def mark(self) -> None:
        """Copy what a step changes before it is decided, while another thread may `save`."""
        self._marked = {
            "buffers": [buffer.detach().clone() for buffer in self._model.buffers()],
            "random": random_states(self.runtime.pools.device),
            "registered": {
                name: copy.deepcopy(one.state_dict()) for name, one in self._registered.items()
            },
        }

    @torch.no_grad()
    def restore(self) -> None:
        """Load what the last `mark` has copied, or the last `load`."""
        for buffer, values in zip(self._model.buffers(), self._marked["buffers"], strict=True):
            buffer.copy_(values)
        set_random_states(self.runtime.pools.device, self._marked["random"])
        for name, state in self._marked["registered"].items():
            self._registered[name].load_state_dict(copy.deepcopy(state))

    def save(self) -> dict[str, Any]:
        """Tensors, numbers and texts in lists and dicts; the tensors share memory with the model.

        Not if the replica trains on: then they are copies, and the state of the moment.
        """
        if self._trains_on:
            self.mark()
        state = {
            "parameters": [local_of(p).detach() for p in self.parameters],
            "optimizers": [local_states(optimizer) for optimizer in self._optimizers],
        }
        return (copy.deepcopy(state) if self._trains_on else state) | self._marked

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Load what `save` returned on the same rank of another replica.

        Raises:
            PlanError: the replica has other objects, optimizers or shards. Nothing was loaded.
        """
        names, own = sorted(state["registered"]), sorted(self._registered)
        if names != own:
            raise PlanError(
                f"the other replica has registered {names}, this one {own}; register the same "
                "objects in all replicas"
            )
        if [p.shape for p in state["parameters"]] != [local_of(p).shape for p in self.parameters]:
            raise PlanError(
                "the state of another replica has other shards; start all replicas with the same "
                "model and options"
            )
        pairs = list(zip(self._optimizers, state["optimizers"], strict=True))
        for optimizer, saved in pairs:
            check_options(optimizer, saved["groups"])
        for parameter, values in zip(self.parameters, state["parameters"], strict=True):
            local_of(parameter).copy_(values)
            torch.autograd.graph.increment_version(parameter)
        for optimizer, saved in pairs:
            load_local_states(optimizer, saved)
        self._marked = {key: state[key] for key in ("buffers", "random", "registered")}
        self.restore()


def checksum_of(tensors: Iterable[Tensor]) -> int:
    """The checksum of this rank's shards of ``tensors``."""
    total = 0
    for tensor in tensors:
        flat = local_of(tensor).detach().cpu().contiguous().reshape(-1)
        total = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), total)
    return total

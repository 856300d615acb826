"""Strategies for Lightning: `Strategy` for its `Trainer`, `FabricStrategy` for Fabric::

    from shardwise.integrations.lightning import Strategy

    trainer = lightning.Trainer(strategy=Strategy(units=Block), devices=2)

Checkpoints are Lightning's own: directories that any number of ranks can load.
``python -m lightning.fabric.utilities.consolidate_checkpoint DIR`` converts one to a single file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import PackageMissing, PlanError, StepError

PackageMissing.check("lightning", extra="lightning", needed_for=__name__)

import torch
from lightning import LightningModule, Trainer
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from shardwise._private import pytree
from shardwise.api import fully_shard
from shardwise.checkpoint.collect import named_states
from shardwise.checkpoint.unpickling import DataReader
from shardwise.features.fsdp_module import FSDPModule
from shardwise.integrations.state import (
    load_full_state_dict,
    load_full_states,
    load_model,
    load_optimizer,
    load_optimizers,
)
from shardwise.runtime.attach import parameters_of
from shardwise.runtime.module import register_forward_method, runtime_of_root
from shardwise.tensor.sharding import sharding_of

__all__ = ["FabricStrategy", "Strategy"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_REST = "meta.pt"  # Lightning's file of what is neither a model nor an optimizer


class Strategy(ModelParallelStrategy):  # type: ignore[misc]
    """A strategy that shards the `LightningModule` before its optimizers are built.

    Args:
        timeout: timeout of the process group; None uses Lightning's.
        options: arguments of `sw.fully_shard`.
    """

    def __init__(self, *, timeout: Any = None, **options: Any) -> None:
        super().__init__(**({} if timeout is None else {"timeout": timeout}))
        self.shard_options = options

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every rank has data of its own."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup(self, trainer: Trainer) -> None:
        """Shard the module, then set up the rest like strategies without a mesh."""
        module = self.lightning_module
        if not isinstance(module, FSDPModule):
            if self._layer_sync is not None:  # `sync_batchnorm`, or a plugin
                self._layer_sync.apply(module)
            fully_shard(module, **self.shard_options)
            for name in _STEPS:  # Lightning calls these methods instead of forward
                if getattr(type(module), name) is not getattr(LightningModule, name):
                    register_forward_method(module, name)
        for average in filter(None, map(_average_of, trainer.callbacks)):
            fully_shard(average, **self.shard_options)
        super(ModelParallelStrategy, self).setup(trainer)

    # With manual optimization, backwards and steps of optimizers run inside `training_step`, where
    # the parameters of the root unit are gathered: what is computed with them after a step has old
    # values.

    _stepped: set[str] | None = None  # such parameters; None outside of `training_step`

    def training_step(self, *args: Any, **options: Any) -> Any:
        """As in Lightning."""
        self._stepped = set()
        try:
            return super().training_step(*args, **options)
        finally:
            self._stepped = None

    def optimizer_step(self, optimizer: Any, *args: Any, **options: Any) -> Any:
        """As in Lightning."""
        result = super().optimizer_step(optimizer, *args, **options)
        if self._stepped is not None and not self.lightning_module.automatic_optimization:
            root = runtime_of_root(self.lightning_module).plan.units[0]
            gathered = [
                extent for one in root.layouts if one.needs_gather for extent in one.extents
            ]
            shardings = filter(None, map(sharding_of, parameters_of(optimizer)))
            stepped = {one.name for one in shardings}
            self._stepped |= stepped & {extent.parameter.name for extent in gathered}
        return result

    def backward(self, *args: Any, **options: Any) -> Any:
        """As in Lightning.

        Raises:
            StepError: it may compute with parameters that an optimizer has changed since they were
                gathered.
        """
        if self._stepped:
            names = sorted(self._stepped)
            listed = ", ".join(names[:3]) + (", ..." if names[3:] else "")
            raise StepError(
                f"{listed}: an optimizer has stepped in this training_step, in which these "
                "parameters of the root unit stay gathered with their old values, and a backward "
                "follows; make the modules that training_step calls units, as in "
                "Strategy(units={Generator, Discriminator})"
            )
        return super().backward(*args, **options)

    # -- checkpoints -----------------------------------------------------------------------------

    # Lightning's own methods take the states of torch's `get_optimizer_state_dict`, which cannot be
    # loaded if there are none for some parameters.

    lightning_restore_optimizer = True  # after callbacks have restored the groups of parameters

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The states of ``optimizer`` by parameter names, in shards."""
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return named_states(inner, self.lightning_module)

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **options: Any) -> None:
        """As in Lightning.

        Tensors in shards that hooks or callbacks have added, such as those of an average, are
        gathered, one at a time, and kept by the first rank, which writes them.
        """
        sharded = {"state_dict", "optimizer_states"} & checkpoint.keys()
        rest = {key: value for key, value in checkpoint.items() if key not in sharded}
        whole = _whole(rest, self.root_device, keep=self.is_global_zero)
        super().save_checkpoint({key: checkpoint[key] for key in sharded} | whole, *args, **options)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the module; `load_optimizer_state_dict` loads the optimizers."""
        path, module = Path(self.broadcast(checkpoint_path)), self.lightning_module
        if path.is_file():  # of a run that did not shard
            whole = _load_file(path, weights_only)
            load_full_state_dict(module, whole["state_dict"], strict=module.strict_loading)
            return whole
        load_model(path, "state_dict", module, strict=module.strict_loading)
        loaded: dict[str, Any] = torch.load(path / _REST, weights_only=weights_only)
        names = DataReader(path).read_metadata().state_dict_metadata
        if any(name.startswith("optimizer_0.") for name in names):
            loaded["optimizer_states"] = path
        if "averaging_state" in loaded:  # WeightAveraging takes the average from the checkpoint
            loaded["state_dict"] = module.state_dict()
        return loaded

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of the optimizers."""
        states = checkpoint["optimizer_states"]
        if isinstance(states, Path):
            load_optimizers(states, self.lightning_module, self.optimizers)
        else:
            for optimizer, whole in zip(self.optimizers, states, strict=True):
                load_full_states(optimizer, whole)


class FabricStrategy(FabricModelParallel):  # type: ignore[misc]
    """A strategy that shards modules in ``fabric.setup``.

    Build optimizers from the module that ``fabric.setup`` returns. ``fabric.save`` and
    ``fabric.load`` take one sharded model, any optimizers of it, and anything else.

    Args:
        options: arguments of `sw.fully_shard`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(parallelize_fn=lambda module, _mesh: fully_shard(module, **options))

    distributed_sampler_kwargs = Strategy.distributed_sampler_kwargs

    def save_checkpoint(
        self, path: Any, state: Mapping[str, Any], *args: Any, **options: Any
    ) -> None:
        """As in Lightning."""
        if any(x is not None for x in (*args, *options.values())):
            super().save_checkpoint(path, state, *args, **options)  # which refuses them
        name, model = _model_in(state)
        values: dict[str, Any] = {
            name: get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
        }
        rest = {}
        for key, value in state.items():
            if isinstance(value, Optimizer):
                values[key] = named_states(value, model)
            elif key != name:
                rest[key] = value.state_dict() if hasattr(value, "state_dict") else value
        directory = Path(self.broadcast(path))
        if directory.is_file():
            directory.unlink()
        state_dict_saver.save(values, checkpoint_id=directory)
        whole = _whole(rest, self.root_device, keep=self.is_global_zero)
        if self.is_global_zero:
            torch.save(whole, directory / _REST)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """As in Lightning; with ``strict=False``, what the checkpoint lacks keeps its value."""
        directory = Path(self.broadcast(path))
        whole = _load_file(directory, weights_only) if directory.is_file() else None
        if isinstance(state, nn.Module) and whole is not None:
            load_full_state_dict(state, whole, strict=strict)
            return {}
        if not isinstance(state, dict):
            refused: dict[str, Any] = super().load_checkpoint(directory, state, strict)
            return refused
        name, model = _model_in(state)
        rest: dict[str, Any]
        if whole is None:
            load_model(directory, name, model, strict=strict)
            rest = torch.load(directory / _REST, weights_only=weights_only)
        else:
            load_full_state_dict(model, whole.pop(name), strict=strict)
            rest = whole
        for key, value in state.items():
            if isinstance(value, Optimizer) and whole is None:
                load_optimizer(directory, key, model, value)
            elif isinstance(value, Optimizer):
                load_full_states(value, rest.pop(key))
            elif key in rest and hasattr(value, "load_state_dict"):
                value.load_state_dict(rest.pop(key))
            elif key in rest:
                state[key] = rest.pop(key)
            elif key != name and strict:
                raise KeyError(f"{directory} has no {key!r}; pass strict=False to keep its value")
        return rest


def _load_file(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """A checkpoint of whole tensors, of a run that did not shard, mapped into memory."""
    whole: dict[str, Any] = torch.load(
        path, mmap=True, map_location="cpu", weights_only=weights_only
    )
    return whole


def _average_of(callback: Any) -> nn.Module | None:
    """The whole copy of the module that a callback averages into: WeightAveraging, SWA."""
    average = getattr(callback, "_average_model", None)
    if isinstance(average, AveragedModel):
        average = average.module
    is_whole = isinstance(average, nn.Module) and not isinstance(average, FSDPModule)
    return average if is_whole else None


def _whole(values: dict[str, Any], device: torch.device, *, keep: bool) -> dict[str, Any]:
    """``values`` with whole tensors on the host, if ``keep``, in place of shards.

    Every rank must call this with as many.
    """

    def gather(tensor: DTensor) -> Tensor:
        on_device: Any = tensor.detach().to(device)
        whole: Tensor = on_device.full_tensor()
        return whole.cpu() if keep else tensor

    gathered: dict[str, Any] = pytree.tree_map_only(DTensor, gather, values)
    return gathered


def _model_in(state: Mapping[str, Any]) -> tuple[str, nn.Module]:
    """The only sharded model in ``state``."""
    found = [(key, value) for key, value in state.items() if isinstance(value, nn.Module)]
    if len(found) != 1:
        raise PlanError(
            f"fabric.save and load: expected one model in the state, got {[*dict(found)]}; save "
            "each under a path of its own, or pass the state_dict() of those that are small"
        )
    return found[0]

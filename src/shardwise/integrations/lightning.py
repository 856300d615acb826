"""Strategies for Lightning: `Strategy` for its `Trainer`, `FabricStrategy` for Fabric::

    from shardwise.integrations.lightning import Strategy

    trainer = lightning.Trainer(strategy=Strategy(units=Block), devices=2)

Checkpoints are Lightning's own: directories that any number of ranks can load.
``python -m lightning.fabric.utilities.consolidate_checkpoint DIR`` converts one to a single file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import PackageMissing, StepError

PackageMissing.check("lightning", extra="lightning", needed_for=__name__)

from lightning import LightningModule, Trainer
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy

from shardwise.api import fully_shard
from shardwise.checkpoint.collect import named_states
from shardwise.checkpoint.unpickling import DataReader
from shardwise.features.fsdp_module import FSDPModule
from shardwise.integrations.state import load_optimizers
from shardwise.runtime.attach import parameters_of
from shardwise.runtime.module import register_forward_method, runtime_of_root
from shardwise.tensor.sharding import sharding_of

__all__ = ["FabricStrategy", "Strategy"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


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

    # Lightning's own methods take the states of torch's `get_optimizer_state_dict`, which cannot be
    # loaded if there are none for some parameters.

    lightning_restore_optimizer = True  # after callbacks have restored the groups of parameters

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The states of ``optimizer`` by parameter names, in shards."""
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return named_states(inner, self.lightning_module)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Load the module; `load_optimizer_state_dict` loads the optimizers."""
        path = Path(self.broadcast(checkpoint_path))
        is_sharded = path.is_dir()
        this: Any = self
        optimizers = this.optimizers
        if is_sharded:
            this.optimizers = []
        try:
            loaded: dict[str, Any] = super().load_checkpoint(path, *args, **options)
        finally:
            this.optimizers = optimizers
        names = DataReader(path).read_metadata().state_dict_metadata if is_sharded else ()
        if any(name.startswith("optimizer_0.") for name in names):
            loaded["optimizer_states"] = path
        return loaded

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of the optimizers."""
        path = checkpoint["optimizer_states"]
        if isinstance(path, Path):  # those of a single file are loaded
            load_optimizers(path, self.lightning_module, self.optimizers)


class FabricStrategy(FabricModelParallel):  # type: ignore[misc]
    """A strategy that shards modules in ``fabric.setup``.

    Build optimizers from the module that ``fabric.setup`` returns.

    Args:
        options: arguments of `sw.fully_shard`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(parallelize_fn=lambda module, _mesh: fully_shard(module, **options))

    distributed_sampler_kwargs = Strategy.distributed_sampler_kwargs

"""Strategies for Lightning: `Strategy` for its `Trainer`, `FabricStrategy` for Fabric::

    from shardwise.integrations.lightning import Strategy

    trainer = lightning.Trainer(strategy=Strategy(units=Block), devices=2)

Checkpoints are Lightning's own: directories that any number of ranks can load.
``python -m lightning.fabric.utilities.consolidate_checkpoint DIR`` converts one to a single file.
"""

from typing import Any

from shardwise.errors import PackageMissing

PackageMissing.check("lightning", extra="lightning", needed_for=__name__)

from lightning import LightningModule, Trainer
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch.strategies import ModelParallelStrategy

from shardwise.api import fully_shard
from shardwise.features.fsdp_module import FSDPModule
from shardwise.runtime.module import register_forward_method

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


class FabricStrategy(FabricModelParallel):  # type: ignore[misc]
    """A strategy that shards modules in ``fabric.setup``.

    Build optimizers from the module that ``fabric.setup`` returns.

    Args:
        options: arguments of `sw.fully_shard`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(parallelize_fn=lambda module, _mesh: fully_shard(module, **options))

    distributed_sampler_kwargs = Strategy.distributed_sampler_kwargs

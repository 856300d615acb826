"""The source of a run's model: the embedded GPT, or the directory of a Hugging Face model.

A source builds the model on the meta device, initializes the parameters and buffers of one module
at a time when sharding asks for it, loads weights into the shards, and calls the model. If it
passes positions, a new document begins where they are not consecutive, and no document attends to
another.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.train.config import Config
from shardwise.train.huggingface import HuggingFace
from shardwise.train.model import GPT, gpt_shape, prepare_blocks
from shardwise.train.tokenizer import vocabulary_of

__all__ = ["Gpt", "Source", "source_of"]


class Gpt:
    """The GPT of `model.py`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.num_layers, self.block_width = config.model.layers, config.model.width

    def build(self) -> GPT:
        """The model on the meta device; its values are initialized when it is sharded."""
        with torch.device("meta"):
            model = GPT(gpt_shape(vocabulary=vocabulary_of(self.config), **self._sizes))
        prepare_blocks(model, self.config.memory, compiles=self.config.train.compile)
        return model

    def filler(self, model: nn.Module) -> Callable[[nn.Module], None]:
        assert isinstance(model, GPT)
        return model.fill

    def load(self, model: nn.Module) -> None:
        """Do nothing, because the GPT is trained from its initial values."""

    @staticmethod
    def logits(model: nn.Module, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """[batch, time] token numbers to [batch, time, vocabulary] logits."""
        logits: Tensor = model(tokens, positions)
        return logits

    @property
    def identity(self) -> dict[str, Any]:
        """The values that must not change when a run is resumed."""
        return {f"model.{key}": value for key, value in self._sizes.items()}

    @property
    def _sizes(self) -> dict[str, int]:
        return self.config.model.model_dump(include={"layers", "heads", "width", "context"})


Source = Gpt | HuggingFace


def source_of(config: Config) -> Source:
    """The source that [model] names; a ConfigError if its directory contains no model."""
    return HuggingFace(config) if config.model.path else Gpt(config)

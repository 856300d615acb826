"""Models by name, by a Hugging Face configuration, or by a function that builds a module."""

import importlib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.errors import ConfigError
from shardwise.forecast.blocks import find_stacks, sample_of, with_blocks
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.hugging_face import read_hugging_face
from shardwise.forecast.parallel import Degrees
from shardwise.forecast.planned import precision_of
from shardwise.forecast.tracing import trace
from shardwise.forecast.transformer import Shape, Transformer, build
from shardwise.forecast.work import Workload
from shardwise.plan.spelling import did_you_mean
from shardwise.plan.units import choose_units

__all__ = ["Model", "known_models", "resolve_model", "workload_of"]


@dataclass(frozen=True)
class Model:
    """A model whose training is forecast."""

    name: str
    shape: Shape | None = None  # of a built-in model, or one like it
    factory: Callable[[], nn.Module] | None = None  # of any other, called under ``device("meta")``

    def is_built_in(self, configuration: Configuration) -> bool:
        """Whether `build` takes the shape: it does where several ranks share the model."""
        return self.factory is None or (
            self.shape is not None and not _degrees(configuration, 0).is_one
        )

    def build(self, configuration: Configuration, stage: int = 0) -> nn.Module:
        """What one rank computes with, on the meta device, in the dtype of its shards.

        Args:
            configuration: how the model is trained.
            stage: of the pipeline.

        Raises:
            ConfigError: the model cannot be divided so.
        """
        degrees = _degrees(configuration, stage)
        if not self.is_built_in(configuration):
            module = self._made(degrees)
        else:
            assert self.shape is not None
            positions = self.shape.positions and max(self.shape.positions, configuration.sequence)
            shape = replace(self.shape, positions=positions)
            module = build(shape, attention=configuration.attention, degrees=degrees)
        return module.to(configuration.master_dtype).train()

    def _made(self, degrees: Degrees) -> nn.Module:
        if not degrees.is_one:
            raise ConfigError(
                f"model {self.name!r} cannot be divided: {degrees}; only built-in models and "
                "those of Hugging Face that are like GPT-2 or Llama can, so use tensor=1, "
                "context=1, expert=1 and pipeline=1"
            )
        assert self.factory is not None
        with torch.device("meta"):
            return self.factory()

    @cached_property
    def num_parameters(self) -> int:
        """Those of the whole model, tied ones counted once."""
        return sum(one.numel() for one in self.build(Configuration(sequence=1)).parameters())

    @cached_property
    def layers(self) -> int:
        """Blocks of all its stacks."""
        return sum(len(stack.kinds) for stack in find_stacks(self.build(Configuration())))


def _degrees(configuration: Configuration, stage: int) -> Degrees:
    return Degrees(
        tensor=configuration.tensor,
        sequence_parallel=configuration.sequence_parallel,
        split_vocabulary=configuration.split_vocabulary,
        context=configuration.context,
        expert=configuration.expert,
        pipeline=configuration.pipeline,
        stage=stage,
        chunks=configuration.chunks,
    )


def workload_of(model: Model, configuration: Configuration, stage: int = 0) -> Workload:
    """What a rank of a pipeline's stage computes in one micro-batch of ``model``."""
    module = model.build(configuration, stage)
    names = choose_units(module, "auto")
    words = _words(configuration, names[1:])
    orders: dict[str, list[int]] = {}
    chosen: dict[str, list[int]] = {}
    traced = dict(zip(names, names, strict=True))  # by the name in the whole model
    for stack in find_stacks(module):
        kinds = [(kind, words[name]) for kind, name in zip(stack.kinds, stack.blocks, strict=True)]
        chosen[stack.name], orders[stack.name] = sample_of(kinds)
        for name in stack.blocks:
            del traced[name]
        for index, number in enumerate(chosen[stack.name]):
            traced[stack.blocks[number]] = f"{stack.name}.{index}"
    module = with_blocks(module, chosen)
    precision = precision_of(configuration)
    workload = trace(
        module,
        _batch_of(module, configuration, stage),
        units=[traced[name] for name in names if name in traced],
        loss=None if model.is_built_in(configuration) else _loss_of_logits,
        autocast=configuration.compute_dtype if configuration.autocast else None,
        precision=precision,
        checkpointing={traced[name]: word for name, word in words.items() if name in traced},
        is_stage=stage < configuration.pipeline - 1,
    )
    tokens = configuration.micro_batch * configuration.sequence // configuration.context
    workload = replace(workload, tokens=tokens, sent_bytes=_sent_bytes(module, configuration))
    for name, order in orders.items():
        workload = workload.repeated(name, order)
    return workload


def _words(configuration: Configuration, blocks: list[str]) -> dict[str, str]:
    words = configuration.checkpointing
    if isinstance(words, str):
        return dict.fromkeys(blocks, words)
    if len(words) != len(blocks):
        raise ConfigError(
            f"checkpointing: expected a word for each of the {len(blocks)} blocks, got {len(words)}"
        )
    return dict(zip(blocks, words, strict=True))


_Batch = Mapping[str, Any] | tuple[Any, ...]


def _batch_of(module: nn.Module, configuration: Configuration, stage: int) -> _Batch:
    """Arguments of the module's forward: tokens, and what they predict if it takes that."""
    batch, time = configuration.micro_batch, configuration.sequence // configuration.context
    if configuration.sequence % (configuration.context * configuration.tensor):
        raise ConfigError(
            f"sequence={configuration.sequence}: expected a multiple of context x tensor = "
            f"{configuration.context} x {configuration.tensor}"
        )
    tokens = torch.empty(batch, time, dtype=torch.long, device="meta")
    if stage:
        size, dtype = _boundary(module, configuration), configuration.compute_dtype
        return torch.empty(size, dtype=dtype, device="meta", requires_grad=True), tokens
    parameters = inspect.signature(module.forward).parameters
    if "labels" in parameters:  # of Hugging Face
        return {"input_ids": tokens, "labels": tokens, "use_cache": False}
    required = [one for one in parameters.values() if one.default is inspect.Parameter.empty]
    return (tokens,) * min(max(len(required), 1), 2)


def _boundary(module: nn.Module, configuration: Configuration) -> tuple[int, int, int]:
    """The shape of the activations between stages: [sequences, tokens, width]."""
    assert isinstance(module, Transformer)
    ranks = configuration.context * module.degrees.sequence_ranks
    return configuration.micro_batch, configuration.sequence // ranks, module.shape.hidden


def _sent_bytes(module: nn.Module, configuration: Configuration) -> int:
    if configuration.pipeline == 1:
        return 0
    return prod(_boundary(module, configuration)) * configuration.compute_dtype.itemsize


def _loss_of_logits(output: Any) -> Any:
    """The loss that a module returned, or that of the logits that it returned."""
    output = getattr(output, "loss", output)
    if not isinstance(output, Tensor) or not output.dim():
        return output
    logits = output.float().flatten(0, -2)
    targets = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    return F.cross_entropy(logits, targets)


# -- names ---------------------------------------------------------------------------------------


def known_models() -> dict[str, Shape]:
    """The shapes that are built in."""
    text = resources.files("shardwise.forecast").joinpath("models.json").read_text("utf-8")
    return {name: Shape(**fields) for name, fields in json.loads(text).items()}


def resolve_model(name: str) -> Model:
    """The model that ``name`` is for.

    Args:
        name: a built-in model ("llama-3-8b"), the path of a Hugging Face ``config.json`` or of its
            directory, or "package.module:function" for a function that returns a module. A module
            takes tokens [batch, time], and targets of that shape if it takes two arguments; it
            returns the loss, or logits.

    Raises:
        ConfigError: there is no such model, file or function.
    """
    path = Path(name)
    if path.suffix == ".json" or path.is_dir():
        return Model(*read_hugging_face(path))
    if ":" in name:
        return Model(name, factory=_function(name))
    known = known_models()
    by_key = {_key(one): one for one in known}
    key = _key(name.rpartition("/")[2])
    for spelled in (key, *(key.replace(*pair) for pair in _SAME_SHAPE)):
        if spelled in by_key:
            return Model(by_key[spelled], known[by_key[spelled]])
    raise ConfigError(
        f"model {name!r}: expected one of {', '.join(known)}, the path of a config.json, or "
        f"package.module:function{did_you_mean(name, known)}"
    )


# Names of other models of the same shape.
_SAME_SHAPE = (
    ("metallama", "llama"),
    ("llama3.1", "llama3"),
    ("llama3.3", "llama3"),
    ("metallama3.1", "llama3"),
    ("qwen2.5", "qwen2"),
)


def _key(name: str) -> str:
    """A name without what people write in different ways."""
    return re.sub("[-_ ]", "", name.lower().removesuffix("-hf"))


def _function(name: str) -> Callable[[], nn.Module]:
    module_name, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"model {name!r}: {error}") from error
    if not callable(function):
        raise ConfigError(f"model {name!r}: expected a function that returns a torch.nn.Module")
    return function  # type: ignore[no-any-return]

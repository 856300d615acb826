"""Models to forecast: by name, from a Hugging Face configuration, or from the user's function."""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.errors import ConfigError, ShardwiseError
from shardwise.forecast.adapters import Adapters
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.models.adapted import adapt
from shardwise.forecast.models.functions import find_function
from shardwise.forecast.models.hugging_face import read_hugging_face
from shardwise.forecast.models.parallel import ModelPart
from shardwise.forecast.models.transformer import Shape, Transformer, build
from shardwise.forecast.planned import precision_of, unit_names, units_of
from shardwise.forecast.trace.blocks import find_stacks, on_meta, sample_of, with_blocks
from shardwise.forecast.trace.recomputing import modes_by_name
from shardwise.forecast.trace.tracing import trace
from shardwise.forecast.work import Workload
from shardwise.plan.policies import choose_units, repeated_blocks
from shardwise.plan.precision import LOW_DTYPES
from shardwise.plan.spelling import did_you_mean, simplified

__all__ = ["Model", "known_models", "model_of", "resolve_model", "workload_of"]


@dataclass(frozen=True)
class Model:
    """A model whose training is forecast."""

    name: str
    shape: Shape | None = None  # for built-in models and similar ones
    factory: Callable[[], nn.Module] | None = None  # builds other models under ``device("meta")``
    # Whether the factory's parameters have the dtypes of training. Others get ``master_dtype``.
    keeps_dtypes: bool = False
    # The arguments of forward for a number of sequences and their length; None: tokens.
    inputs: Callable[[int, int], Any] | None = None
    loss: Callable[[Any], Tensor] | None = None  # of the output; None: the output or cross-entropy

    def is_built_in(self, configuration: Configuration) -> bool:
        """Whether `build` uses the shape, as it always does with model parallelism."""
        return self.factory is None or (
            self.shape is not None and not ModelPart(configuration).is_whole
        )

    def build(self, configuration: Configuration, stage: int = 0) -> nn.Module:
        """Build one rank's part of the model on the meta device, in the dtypes of its shards.

        Args:
            configuration: how the model is trained.
            stage: pipeline stage.

        Raises:
            ConfigError: the model cannot be divided in this way.
        """
        part = ModelPart(configuration, stage)
        if configuration.expert > 1 and self.shape is not None and not self.shape.experts:
            raise ConfigError(
                f"expert={configuration.expert}: model {self.name!r} has no experts; use expert=1"
            )
        if not self.is_built_in(configuration):
            module = self._from_factory(part)
        else:
            assert self.shape is not None
            positions = self.shape.positions and max(self.shape.positions, configuration.sequence)
            shape = replace(self.shape, positions=positions)
            module = build(shape, part)
        adapters, master = configuration.adapters, configuration.master_dtype
        if adapters is not None:
            module = adapt(module, adapters, base=configuration.compute_dtype, trained=master)
        elif not self.keeps_dtypes:
            module = module.to(master)
        return module.train()

    def _from_factory(self, part: ModelPart) -> nn.Module:
        if not part.is_whole:
            raise ConfigError(
                f"model {self.name!r} cannot be divided: {part}; use 1 for each of these, or a "
                "built-in model or a Hugging Face model like GPT-2 or Llama"
            )
        assert self.factory is not None
        try:
            with torch.device("meta"):
                module = self.factory()
        except ShardwiseError:
            raise
        except Exception as error:  # any error of the user's function
            raise ConfigError(
                f"model {self.name!r}: the function failed: {type(error).__name__}: {error}; "
                "expected one that needs no arguments and returns a torch.nn.Module"
            ) from error
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"model {self.name!r}: expected the function to return a torch.nn.Module, got "
                f"{type(module).__name__}"
            )
        return module

    @cached_property
    def _parameters(self) -> tuple[nn.Parameter, ...]:
        return tuple(self.build(Configuration(sequence=1)).parameters())

    @property
    def units(self) -> Literal["auto"] | None:
        """The units to plan: the repeated blocks, or None if there are none."""
        return "auto" if repeated_blocks(self.build(Configuration(sequence=1))) else None

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model; tied parameters count once."""
        return sum(parameter.numel() for parameter in self._parameters)

    def num_trained(self, adapters: Adapters | None = None) -> int:
        """Return the number of parameters that are trained, which are those of ``adapters``."""
        parameters: Iterable[nn.Parameter] = self._parameters
        if adapters is not None:
            parameters = self.build(Configuration(sequence=1, adapters=adapters)).parameters()
        return sum(one.numel() for one in parameters if one.requires_grad)

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype of the shards of trained parameters: float32, or 16 bits if some have them."""
        if not self.keeps_dtypes:
            return torch.float32
        low = (p.dtype for p in self._parameters if p.requires_grad and p.dtype in LOW_DTYPES)
        return next(low, torch.float32)


def workload_of(model: Model, configuration: Configuration, stage: int = 0) -> Workload:
    """Trace what one rank of a pipeline stage computes in one micro-batch of ``model``.

    Recent traces of shapes are kept. A function of the user may return something else each time.
    """
    if model.factory is None and model.inputs is None and model.loss is None:
        return _trace_of_shape(model, configuration, stage, torch.get_default_dtype())
    return _trace(model, configuration, stage)


@lru_cache(maxsize=128)
def _trace_of_shape(
    model: Model, configuration: Configuration, stage: int, _default_dtype: torch.dtype
) -> Workload:
    return _trace(model, configuration, stage)


def _trace(model: Model, configuration: Configuration, stage: int) -> Workload:
    module = model.build(configuration, stage)
    units, names = units_of(module, configuration), unit_names(module, configuration)
    blocks = repeated_blocks(module)
    if units != configuration.units:  # a stage of one block
        blocks = choose_units(module, units)[1:]
    modes = modes_by_name(configuration.checkpointing, blocks)
    orders: dict[str, list[int]] = {}
    chosen: dict[str, list[int]] = {}
    # Name in the whole model -> name when traced; without those in blocks that are not traced.
    traced = {name: name for name in (*names, *modes)}
    for stack in find_stacks(module):
        if not stack.is_repeatable(names):
            continue
        kinds = [(kind, modes[name]) for kind, name in zip(stack.kinds, stack.blocks, strict=True)]
        chosen[stack.name], orders[stack.name] = sample_of(kinds)
        place = {number: index for index, number in enumerate(chosen[stack.name])}
        for name in [name for name in traced if name.startswith(f"{stack.name}.")]:
            number, *inner = traced.pop(name)[len(stack.name) + 1 :].split(".")
            if int(number) in place:
                traced[name] = ".".join((stack.name, str(place[int(number)]), *inner))
    module = with_blocks(module, chosen)
    precision = precision_of(configuration)
    workload = trace(
        module,
        _batch_of(model, module, configuration, stage),
        units=[traced[name] for name in names if name in traced],
        loss=None if model.is_built_in(configuration) else model.loss or _loss_of_logits,
        autocast=configuration.compute_dtype if configuration.autocast else None,
        precision=precision,
        checkpointing={traced[name]: mode for name, mode in modes.items() if name in traced},
        is_stage=stage < configuration.pipeline - 1,
    )
    tokens = configuration.micro_batch * configuration.sequence // configuration.context
    sent = 0
    if configuration.pipeline > 1:
        sent = prod(_boundary(module, configuration)) * configuration.compute_dtype.itemsize
    workload = replace(workload, tokens=tokens, sent_bytes=sent)
    for name, order in orders.items():
        workload = workload.repeated(name, order)
    return workload


_Batch = Mapping[str, Any] | tuple[Any, ...]


def _batch_of(model: Model, module: nn.Module, configuration: Configuration, stage: int) -> _Batch:
    """Return the arguments of the module's forward: tokens, and targets if it takes them."""
    batch, time = configuration.micro_batch, configuration.sequence // configuration.context
    ranks = configuration.context, ModelPart(configuration).sequence_ranks
    if configuration.sequence % prod(ranks):
        raise ConfigError(
            f"sequence={configuration.sequence}: expected a multiple of context x tensor = "
            f"{ranks[0]} x {ranks[1]}"
        )
    if model.inputs is not None:
        given = model.inputs(batch, time)
        return given if isinstance(given, (Mapping, tuple)) else (given,)
    tokens = torch.empty(batch, time, dtype=torch.long, device="meta")
    if stage:
        size, dtype = _boundary(module, configuration), configuration.compute_dtype
        return torch.empty(size, dtype=dtype, device="meta", requires_grad=True), tokens
    base = getattr(module, "get_base_model", lambda: module)()  # peft's takes any arguments
    parameters = inspect.signature(base.forward).parameters
    if "labels" in parameters:  # a Hugging Face model
        return {"input_ids": tokens, "labels": tokens, "use_cache": False}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [
        one
        for one in parameters.values()
        if one.default is inspect.Parameter.empty and one.kind not in variadic
    ]
    return (tokens,) * min(max(len(required), 1), 2)


def _boundary(module: nn.Module, configuration: Configuration) -> tuple[int, int, int]:
    """Return the shape of the activations between stages: [sequences, tokens, width]."""
    assert isinstance(module, Transformer)
    ranks = configuration.context * module.part.sequence_ranks
    return configuration.micro_batch, configuration.sequence // ranks, module.shape.hidden


def _loss_of_logits(output: Any) -> Any:
    """Return the loss in a module's output, or compute it from the logits."""
    loss = getattr(output, "loss", None)
    output = getattr(output, "logits", output) if loss is None else loss
    if not isinstance(output, Tensor) or not output.dim():
        return output
    logits = output.float().flatten(0, -2)
    targets = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    return F.cross_entropy(logits, targets)


# -- names ---------------------------------------------------------------------------------------


def known_models() -> dict[str, Shape]:
    """Return the built-in shapes by name."""
    text = resources.files(__package__).joinpath("models.json").read_text("utf-8")
    return {name: Shape(**fields) for name, fields in json.loads(text).items()}


def model_of(
    given: str | nn.Module | Callable[[], nn.Module],
    *,
    inputs: Callable[[int, int], Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> Model:
    """Return the model that a name, a module or a function stands for.

    Args:
        given: a name as for `resolve_model`, a module on any device, which is not changed, or a
            function that returns one.
        inputs: see `Model`.
        loss: see `Model`.

    Raises:
        ConfigError: there is no such model.
    """
    for name, function in {"inputs": inputs, "loss": loss}.items():
        if function is not None and not callable(function):
            raise ConfigError(f"{name}={function!r}: expected a function")
    if isinstance(given, str):
        found = resolve_model(given)
        if loss is not None and found.factory is None:
            raise ConfigError(f"loss={loss!r}: model {found.name!r} computes its own; leave it out")
        return replace(found, inputs=inputs, loss=loss)
    if not callable(given):
        raise ConfigError(
            f"model {given!r}: expected a name, a torch.nn.Module or a function that returns one"
        )
    factory = partial(on_meta, given) if isinstance(given, nn.Module) else given
    name = type(given).__name__ if isinstance(given, nn.Module) else getattr(given, "__name__", "")
    return Model(name or repr(given), factory=factory, keeps_dtypes=True, inputs=inputs, loss=loss)


def resolve_model(name: str) -> Model:
    """Find the model called ``name``.

    Args:
        name: a built-in model ("llama-3-8b"), the path of a Hugging Face ``config.json`` or its
            directory, or "package.module:function" or "file.py:function" for a function that
            returns a module, whose parameters are frozen and have dtypes as in training. The
            module takes tokens [batch, time], and targets of that shape if it takes two arguments.
            It returns the loss or logits.

    Raises:
        ConfigError: there is no such model, file or function.
    """
    path = Path(name)
    if path.suffix == ".json" or path.is_dir():
        return Model(*read_hugging_face(path))
    if ":" in name:
        return Model(name, factory=find_function(name), keeps_dtypes=True)
    known = known_models()
    by_key = {_key(known_name): known_name for known_name in known}
    key = _key(name.rpartition("/")[2])
    for spelled in (key, *(key.replace(*pair) for pair in _SAME_SHAPE)):
        if spelled in by_key:
            return Model(by_key[spelled], known[by_key[spelled]])
    raise ConfigError(
        f"model {name!r}: expected one of {', '.join(known)}, the path of a config.json, or "
        f"package.module:function or file.py:function{did_you_mean(name, known)}"
    )


# Replacements in names of models that have the same shape.
_SAME_SHAPE = (
    ("metallama", "llama"),
    ("llama3.1", "llama3"),
    ("llama3.3", "llama3"),
    ("metallama3.1", "llama3"),
    ("qwen2.5", "qwen2"),
)


def _key(name: str) -> str:
    """Normalize a name, and remove the suffix "-hf"."""
    return simplified(name.lower().removesuffix("-hf"))

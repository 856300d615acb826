"""Models of transformers: built, adapted by LoRA, loaded and exported."""

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint.adapters import ADAPTER, adapted_weights, alone, merge
from shardwise.checkpoint.offline import write_hf
from shardwise.checkpoint.read import OpenComponent, open_checkpoint
from shardwise.checkpoint.stores import folder_at
from shardwise.errors import CheckpointError, ConfigError, PackageMissing
from shardwise.train.config import Config, ModelConfig
from shardwise.train.model import prepare_blocks
from shardwise.train.tokenizer import Subwords, Tokenizer, vocabulary_of

__all__ = ["HuggingFace", "are_same_settings", "settings_from"]

# Weights in formats that are not read.
_OTHER_WEIGHTS = ("pytorch_model*.bin", "*.pth", "*.gguf", "*.h5", "*.msgpack")


class HuggingFace:
    """A causal language model of `transformers` from a directory with at least its config."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.directory = Path(config.model.path).expanduser()
        if not (self.directory / "config.json").is_file():
            raise ConfigError(
                f"model.path={config.model.path!r}: expected a directory with a config.json"
            )
        self.num_layers = self.settings.num_hidden_layers
        self.block_width = self.settings.hidden_size

    @cached_property
    def settings(self) -> Any:
        PackageMissing.check("transformers", extra="hf", needed_for="model.path")
        from transformers import AutoConfig  # noqa: PLC0415 (optional, and takes seconds)

        try:
            settings = AutoConfig.from_pretrained(str(self.directory), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"model.path={self.config.model.path!r}: {error}") from None
        _check_causal(settings, f"{self.directory}/config.json")
        return settings

    @property
    def has_weights(self) -> bool:
        """Whether training starts from weights in the directory."""
        found = any(self.directory.glob("*.safetensors"))
        return found and not self.config.model.from_scratch

    def check_weights(self) -> None:
        """Raise a ConfigError if training would start from other weights than a user expects."""
        options, key = self.config.model, f"model.path={self.config.model.path!r}"
        if options.from_scratch:
            return
        advice = "or set model.from_scratch=true to train from random values"
        if self.has_weights:
            if getattr(self.settings, "quantization_config", None) is not None:
                raise ConfigError(
                    f"{key} has quantized weights, which cannot be trained; use weights that are "
                    f"not, {advice}"
                )
            return
        others = [file.name for form in _OTHER_WEIGHTS for file in self.directory.glob(form)]
        if others:
            raise ConfigError(
                f"{key} has weights in {min(others)}, but only *.safetensors are read; convert "
                f"them with save_pretrained of transformers, {advice}"
            )
        if options.lora_rank:
            raise ConfigError(
                f"{key} has no weights (*.safetensors) for model.lora_rank={options.lora_rank} to "
                f"adapt; add them, {advice}"
            )

    def check_learning_rate(self) -> None:
        """Raise a ConfigError if weights would be trained with the default for random values."""
        train = self.config.train
        if self.has_weights and "lr" not in train.model_fields_set:
            usual = "2e-4 for adapters" if self.config.model.lora_rank else "2e-5"
            raise ConfigError(
                f"train.lr is not set, and its default, {train.lr:g}, is for training from random "
                f"values; set it for the weights of model.path={self.config.model.path!r} (often "
                f"{usual})"
            )

    def check_sizes(self) -> None:
        """Raise a ConfigError if the model has too few positions or token ids for the run."""
        context = self.config.model.context
        longest = getattr(self.settings, "max_position_embeddings", context)
        for key, needed, has in (
            ("max_position_embeddings", context, longest),
            ("vocab_size", vocabulary_of(self.config), self.settings.vocab_size),
        ):
            if needed > has:
                raise ConfigError(
                    f"{self.directory}/config.json: {key}={has}, but model.context or the "
                    f"tokenizer needs {needed}"
                )

    def build(self) -> nn.Module:
        """The model on the meta device, in float32, the dtype of shards and optimizer states."""
        from transformers import AutoModelForCausalLM  # noqa: PLC0415

        options, settings = self.config.model, self.settings
        self.check_sizes()
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
        memory = self.config.memory
        if options.lora_rank and memory.checkpoint_every and memory.checkpoint == "reentrant":
            raise ConfigError(
                'memory.checkpoint="reentrant": no gradients would reach adapters, because the '
                'inputs of frozen blocks have none; use "full"'
            )
        built: nn.Module = self._with_adapters(model) if options.lora_rank else model
        prepare_blocks(built, memory, compiles=self.config.train.compile)
        return built

    def _with_adapters(self, model: nn.Module) -> nn.Module:
        PackageMissing.check("peft", extra="hf", needed_for="model.lora_rank")
        from peft import LoraConfig, get_peft_model  # noqa: PLC0415 (optional)

        options = self.config.model
        targets = options.lora_targets
        lora = LoraConfig(
            r=options.lora_rank,
            lora_alpha=options.lora_alpha,
            target_modules=targets if isinstance(targets, str) else list(targets),
            task_type="CAUSAL_LM",
            base_model_name_or_path=str(self.directory.resolve()),
        )
        try:
            adapted: nn.Module = get_peft_model(model, lora)
        except ValueError as error:  # no module has such a name, or adapters cannot be added to it
            raise ConfigError(f"model.lora_targets={targets!r}: {error}") from None
        dtype = getattr(torch, self.config.precision.compute)  # of the base, which is not updated
        for parameter in adapted.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
        unsupported = [
            name
            for name, parameter in adapted.named_parameters()
            if parameter.requires_grad and not (".lora_A." in name or ".lora_B." in name)
        ]
        if unsupported:
            raise ConfigError(f"model.lora_targets: {unsupported[0]}: expected only linear layers")
        return adapted

    def filler(self, model: nn.Module) -> Callable[[nn.Module], None]:
        """A function that initializes one module as transformers does, and adapters to add zero."""
        base: Any = model.get_base_model() if self.config.model.lora_rank else model  # type: ignore[operator]
        names = {module: name for name, module in model.named_modules()}

        def fill(module: nn.Module) -> None:
            name = names.get(module, "")
            if ".lora_B." in name:
                nn.init.zeros_(module.weight)  # type: ignore[arg-type]
            elif ".lora_A." in name:
                nn.init.kaiming_uniform_(module.weight, a=5**0.5)  # type: ignore[arg-type]
            else:
                base._init_weights(module)

        return fill

    def load(self, model: nn.Module) -> None:
        """Read each rank's shards of the weights, if training starts from them."""
        if not self.has_weights:
            return
        report = sw.load(self.directory, model=model, source="hf", strict=False, cast=True).report
        missing = [name for name in report.missing if ADAPTER not in name]
        if missing:
            raise CheckpointError(f"{self.directory}: the weights lack {', '.join(missing)}")

    @staticmethod
    def logits(model: nn.Module, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """As in `Gpt`."""
        logits: Tensor = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        return logits

    @property
    def identity(self) -> dict[str, Any]:
        """As in `Gpt`; the directory may be moved."""
        keys = {"context", "lora_rank", "from_scratch"}
        if self.config.model.lora_rank:
            keys.add("lora_alpha")
        options = self.config.model.model_dump(include=keys)
        shared = {f"model.{key}": value for key, value in options.items()}
        if self.config.model.lora_rank:
            shared["model.lora_targets"] = json.dumps(self.config.model.lora_targets)
        return {**shared, "model.path": json.dumps(_own_settings(self.settings), sort_keys=True)}

    def _has_tokens_of(self, tokenizer: Tokenizer) -> bool:
        """Whether the tokenizer in the directory has the tokens of ``tokenizer``."""
        try:
            own = Subwords.open(self.directory).hf_tokenizer.get_vocab()
        except ConfigError:
            return False
        return isinstance(tokenizer, Subwords) and own == tokenizer.hf_tokenizer.get_vocab()

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise a ConfigError if one that was trained does not fit the weights that are loaded."""
        size = self.config.tokenizer.vocabulary
        files = [*self.directory.glob("tokenizer*"), *self.directory.glob("vocab*")]
        if size and self.has_weights and files and not self._has_tokens_of(tokenizer):
            raise ConfigError(
                f"tokenizer.vocabulary={size} trains a tokenizer, whose numbers mean nothing to "
                f"the weights of model.path={self.config.model.path!r}; leave it out to use "
                f"{files[0].name}, or set model.from_scratch=true to train from random values"
            )

    def export(self, checkpoint: Path | str, directory: Path, tokenizer: Tokenizer) -> None:
        """Convert a checkpoint to a directory that transformers can load, in one process.

        Adapters are merged into the weights, and also written to `adapter`, which peft can load.
        """
        partial = directory.with_name(f"{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        with ExitStack() as cleanup:
            model = open_checkpoint(folder_at(checkpoint), cleanup).components["model"]
            _write_weights(model, partial, self.config.model)
        if self.config.model.lora_rank:
            adapted: Any = self.build()
            adapted.peft_config["default"].save_pretrained(str(partial / "adapter"))
        self.settings.save_pretrained(str(partial))
        generation = self.directory / "generation_config.json"  # with the tokens that end an answer
        if generation.exists() and self._has_tokens_of(tokenizer):
            shutil.copy(generation, partial)
        if isinstance(tokenizer, Subwords):
            tokenizer.save(partial)
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)


def are_same_settings(one: str, other: str) -> bool:
    """Whether two values of "model.path" in `HuggingFace.identity` describe the same model.

    Those of older checkpoints also have the directory, the version of transformers and defaults.
    """
    try:
        first, second = (_own_settings(settings_from(json.loads(value))) for value in (one, other))
    except (ValueError, TypeError, KeyError):
        return False
    return first == second


def _own_settings(settings: Any) -> dict[str, Any]:
    """What is not a default, without the directory and the version of transformers."""
    given: dict[str, Any] = settings.to_diff_dict()
    for name in ("_name_or_path", "transformers_version"):
        given.pop(name, None)
    return given


def settings_from(fields: Mapping[str, Any]) -> Any:
    PackageMissing.check("transformers", extra="hf", needed_for="model.path")
    from transformers import AutoConfig  # noqa: PLC0415 (optional, and takes seconds)

    return AutoConfig.for_model(**fields)


def _write_weights(model: OpenComponent, out: Path, options: ModelConfig) -> None:
    """Write the weights with merged adapters, and the adapters, one tensor at a time."""
    read, specs = model.reader.read_whole, model.specs
    weights, adapters = adapted_weights(specs), alone(specs)
    scaling = options.lora_alpha / max(1, options.lora_rank)

    def merged(name: str) -> Tensor:
        one = weights[name]
        weight = read(one.weight)
        return merge(weight, read(one.low), read(one.high), scaling) if one.low else weight

    whole = [replace(specs[one.weight], name=name) for name, one in weights.items()]
    write_hf(whole, merged, out)
    if adapters:
        write_hf(
            [replace(specs[own], name=name) for name, own in adapters.items()],
            lambda name: read(adapters[name]),
            out / "adapter",
            "adapter_model",
        )


def _check_causal(settings: Any, file: str) -> None:
    """Raise a ConfigError if the model is not a language model, or attends to later tokens."""
    from transformers.models.auto import modeling_auto as auto  # noqa: PLC0415 (takes seconds)

    kind = settings.model_type
    if kind not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            f"{file}: model_type={kind!r}: expected a causal language model of transformers"
        )
    is_encoder = kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if is_encoder and not getattr(settings, "is_decoder", False):
        raise ConfigError(
            f"{file}: model_type={kind!r} attends to later tokens, which a causal language model "
            'must not see; set "is_decoder": true in the file to train it as one'
        )

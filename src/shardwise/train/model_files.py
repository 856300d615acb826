"""The model of `shardwise plan`, in the files from which `shardwise train` builds it."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.models.hugging_face import settings_of
from shardwise.forecast.models.model import Model, resolve_model
from shardwise.train.build import check_combinations, forecast_model
from shardwise.train.config import Config, ModelConfig, TokenizerConfig, check_batch, read_config
from shardwise.train.huggingface import HuggingFace, settings_from
from shardwise.train.planned import averaged_replicas, config_of, shared_settings, toml_of
from shardwise.train.source import source_of
from shardwise.train.tensor_parallel import check_settings

__all__ = ["ModelFiles"]

_VOCABULARY = 8192  # largest vocabulary that is trained if the model has no tokenizer
_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class ModelFiles:
    """A model to forecast, and the configuration with which the trainer builds it."""

    model: Model
    base: Config | None = None  # None: the trainer cannot build the model
    directory: Path | None = None  # where `write_model` writes a config.json, if it does
    settings: Configuration | None = None  # how the TOML of a run trains; None: there is none

    @classmethod
    def of(cls, name: str, config: Path | None, changes: Iterable[str] = ()) -> "ModelFiles":
        """Find the model that ``name`` stands for: as in `resolve_model`, or the TOML of a run.

        A built-in model will be written beside the file ``config``. ``changes`` override values of
        the TOML, as in `read_config`.
        """
        path = Path(name)
        if path.suffix == ".toml":
            base = read_config(path, changes)
            # Tensor parallelism is forecast from the shape.
            is_divisible = base.model.path and not base.model.lora_rank
            shape = resolve_model(base.model.path).shape if is_divisible else None
            return cls(forecast_model(base, shape), base, settings=shared_settings(base))
        model = resolve_model(name)
        if path.is_dir() or path.suffix == ".json":
            directory = path if path.is_dir() else path.parent
            return cls(
                model, _base(directory, model, has_tokenizer=(directory / _TOKENIZER).exists())
            )
        if model.factory is not None or config is None:
            return cls(model)
        directory = config.with_name(f"{config.stem}-model")
        return cls(model, _base(directory, model, has_tokenizer=False), directory)

    @property
    def global_batch(self) -> int | None:
        """Sequences per step of a run, over all GPUs of a plan; None: there is no run."""
        if self.base is None or self.settings is None:
            return None
        replicas, train = averaged_replicas(self.base), self.base.train
        check_batch(train.model_copy(update={"micro_batch": 0}), replicas)
        return train.global_batch // replicas

    @property
    def tensor(self) -> int:
        """Ranks that compute a layer of a run together."""
        return 1 if self.base is None else self.base.shard.tensor

    def toml_of(self, configuration: Configuration) -> str:
        """The file with which `shardwise train` trains in this way; a ConfigError if it cannot."""
        if self.base is None:
            raise ConfigError(
                "shardwise train builds a GPT of its own, or models of transformers: pass the TOML "
                "file of a run, a built-in model with --config FILE, or a directory with a "
                "config.json"
            )
        config = config_of(configuration, self.base)
        settings: Any = None
        if self.directory is not None:
            assert self.model.shape is not None
            fields = settings_of(self.model.shape, configuration.sequence)
            if config.shard.tensor > 1:
                settings = settings_from(fields)
        elif isinstance(source := source_of(config), HuggingFace):
            source.check_sizes()
            settings = source.settings
        if config.shard.tensor > 1:
            check_settings(settings, config.shard.tensor)
        check_combinations(config)
        return toml_of(config)

    def write_model(self, sequence: int) -> None:
        if self.directory is not None:
            assert self.model.shape is not None
            self.directory.mkdir(exist_ok=True)
            fields = json.dumps(settings_of(self.model.shape, sequence), indent=2)
            (self.directory / "config.json").write_text(f"{fields}\n", "utf-8")


def _base(directory: Path, model: Model, *, has_tokenizer: bool) -> Config:
    vocabulary = 0
    if not has_tokenizer:
        vocabulary = min(_VOCABULARY, model.shape.vocab if model.shape else _VOCABULARY)
    return Config(
        model=ModelConfig(path=str(directory)), tokenizer=TokenizerConfig(vocabulary=vocabulary)
    )

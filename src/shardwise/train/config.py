"""The configuration of a training run: one frozen section for each table of the TOML file.

Every key has a default, so an empty file is valid: it trains on the Python standard library with
two local ranks.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from shardwise.errors import ConfigError

__all__ = ["Config"]

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
DType = Literal["float32", "bfloat16", "float16"]


class Section(BaseModel):
    """A table: unknown keys are errors, and values are not converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RunConfig(Section):
    """[run]: the run directory and the logs."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] = "stdlib"
    directory: str = ""  # "": runs/<name>-<time>; a directory with checkpoints is resumed
    overwrite: bool = False  # start over in a directory that has files
    log_every: Positive = 50  # steps between log lines where the output is not a terminal
    sinks: Annotated[tuple[Literal["tensorboard", "wandb"], ...], Field(strict=False)] = ()


class ModelConfig(Section):
    """[model]: the sizes of the GPT."""

    layers: Positive = 4
    heads: Positive = 4
    width: Positive = 128
    context: Positive = 128  # bytes

    @model_validator(mode="after")
    def _check_width(self) -> Self:
        multiple = 2 * self.heads
        if self.width % multiple:
            below = self.width // multiple * multiple
            valid = " or ".join(str(n) for n in (below, below + multiple) if n)
            raise ValueError(
                f"width={self.width}: expected a multiple of 2 * heads = {multiple} "
                f"(rotary embeddings rotate pairs), such as {valid}"
            )
        return self


class DataConfig(Section):
    """[data]: the text, read as bytes."""

    path: Annotated[str, Field(min_length=1)] = "stdlib"  # or a file, or a directory
    glob: Annotated[str, Field(min_length=1)] = "**/*.py"  # the files of a directory
    validation_share: Annotated[float, Field(gt=0, le=0.5)] = 0.05
    workers: NonNegative = 0  # DataLoader processes of each rank; 0 reads in the rank itself


class TrainConfig(Section):
    """[train]: AdamW with linear warm-up and cosine decay."""

    steps: Positive = 500
    global_batch: Positive = 16  # sequences in a step, over all ranks
    micro_batch: NonNegative = 0  # sequences in a forward of a rank; 0: its part of the batch
    lr: PositiveFloat = 4e-3
    final_lr_share: Fraction = 0.02  # of lr, at the last step
    warmup_steps: NonNegative = 50
    weight_decay: Annotated[float, Field(ge=0)] = 0.1  # of matrices and embeddings
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    grad_clip: Annotated[float, Field(ge=0)] = 1.0  # maximum gradient norm; 0: no clipping
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    validate_every: NonNegative = 0  # steps; 0: only after the last step
    validation_batches: Positive = 16

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        if self.warmup_steps >= self.steps and self.warmup_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps}: expected fewer than steps={self.steps}"
            )
        return self


class CheckpointConfig(Section):
    """[checkpoint]: what a run that was stopped or killed resumes from."""

    every: NonNegative = 200  # steps, and after the last one; 0: no checkpoints
    keep: Positive = 2  # number of checkpoints
    directory: str = ""  # or a URL that fsspec supports; "": `checkpoints` in run.directory
    wait: bool = True  # False: write in the background, from a copy in host memory


class SampleConfig(Section):
    """[sample]: the text that the trained model generates at the end."""

    prompt: Annotated[str, Field(min_length=1)] = "def "
    bytes: NonNegative = 300  # 0: no sample
    temperature: PositiveFloat = 0.8
    top_k: Annotated[int, Field(ge=1, le=256)] = 40


class ShardConfig(Section):
    """[shard]: how the model is sharded over the ranks."""

    nproc: Positive = 2  # local ranks; the WORLD_SIZE of a launcher takes precedence
    units: str | int = "auto"  # or a module class such as "Block", or a size in parameters
    strategy: str = "fsdp"  # or "ddp", "zero1", "zero2", "hsdp", "hfsdp"
    replicas: Positive = 1  # of the sharded model, for "hsdp" and "hfsdp"
    prefetch: NonNegative = 1  # units that are gathered ahead


class PrecisionConfig(Section):
    """[precision]: dtypes; shards and optimizer states stay in float32."""

    compute: DType = "float32"  # of gathered parameters, forward and backward
    reduce: DType = "float32"  # of gradients between ranks
    norms: Literal["float32", "compute"] = "float32"


class MemoryConfig(Section):
    """[memory]: memory traded for computation and copies."""

    checkpoint_every: NonNegative = 0  # recompute every n-th block in backward; 0: none
    checkpoint: Literal["full", "reentrant", "selective"] = "full"
    offload: Literal["none", "optimizer", "all"] = "none"  # to the host; "all": parameters too
    activations: Literal["device", "host"] = "device"
    step_in_backward: bool = False  # step each unit as soon as its gradients are reduced
    accumulate: Literal["shards", "whole"] = "shards"  # gradients of several micro batches


class Config(BaseSettings):
    """A run. ``--set`` overrides the file, which overrides the defaults.

    Environment variables are not read: they would change results without a trace in the run's
    config.toml.
    """

    model_config = SettingsConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    sample: SampleConfig = SampleConfig()
    shard: ShardConfig = ShardConfig()
    precision: PrecisionConfig = PrecisionConfig()
    memory: MemoryConfig = MemoryConfig()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, TomlConfigSettingsSource(settings_cls)

    @property
    def rank_batch(self) -> int:
        """Sequences of one rank in one step."""
        return self.train.global_batch // self.shard.nproc

    @property
    def micro_batch(self) -> int:
        """Sequences in one forward of one rank."""
        return self.train.micro_batch or self.rank_batch

    def with_ranks(self, num_ranks: int) -> "Config":
        """The same run on ``num_ranks`` ranks.

        Raises:
            ConfigError: the global batch does not divide into micro batches on that many ranks.
        """
        if num_ranks < 1:
            raise ConfigError(f"--nproc {num_ranks}: expected 1 or more ranks")
        check_batch(self.train, num_ranks)
        shard = self.shard.model_copy(update={"nproc": num_ranks})
        return self.model_copy(update={"shard": shard})


def check_batch(train: TrainConfig, num_ranks: int) -> None:
    """Raise a ConfigError if a rank would get a fraction of a micro batch."""
    micro_batch = train.micro_batch or 1
    multiple = num_ranks * micro_batch
    if train.global_batch % multiple == 0:
        return
    below = train.global_batch // multiple * multiple
    nearest = " or ".join(str(number) for number in (below, below + multiple) if number)
    way_out = f"set train.global_batch to {nearest}"
    if train.micro_batch and train.global_batch % num_ranks == 0:
        rank_batch = train.global_batch // num_ranks
        divisors = (n for n in range(1, min(micro_batch, rank_batch) + 1) if rank_batch % n == 0)
        way_out += f", or train.micro_batch to {max(divisors)}"
    batches = f" x micro batches of {micro_batch}" if train.micro_batch else ""
    raise ConfigError(
        f"train.global_batch={train.global_batch} does not divide into {num_ranks} ranks{batches}; "
        f"{way_out}"
    )

"""What a training run is made of: one frozen section for each table of the TOML file.

Every key has a default, so an empty file is a valid configuration: the Python standard library on
two local ranks.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shardwise.errors import ConfigError

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "MemoryConfig",
    "ModelConfig",
    "PrecisionConfig",
    "RunConfig",
    "SampleConfig",
    "ShardConfig",
    "TrainConfig",
]

Count = Annotated[int, Field(ge=1)]
CountOrNone = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A table whose unknown keys are errors and whose values are never converted silently."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RunConfig(Section):
    """[run]: where the results go and how often a line is shown."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] = "stdlib"
    directory: str = ""  # "" is runs/<name>-<time of the start>; one with checkpoints goes on
    overwrite: bool = False  # begin anew; else a directory with files of others is refused
    log_every: Count = 50  # steps between two lines where there is no terminal for a bar


class ModelConfig(Section):
    """[model]: the sizes of the GPT."""

    layers: Count = 4
    heads: Count = 4
    width: Count = 128
    context: Count = 128  # bytes that the model sees at once

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> Self:
        if self.width % (2 * self.heads):
            below = self.width // (2 * self.heads) * (2 * self.heads)
            valid = " or ".join(str(n) for n in (below, below + 2 * self.heads) if n)
            raise ValueError(
                f"width={self.width}: expected a multiple of 2 * heads = {2 * self.heads} "
                f"(rotary positions turn pairs), such as {valid}"
            )
        return self


class DataConfig(Section):
    """[data]: the text, read as bytes."""

    path: Annotated[str, Field(min_length=1)] = "stdlib"  # or a file, or a directory
    glob: Annotated[str, Field(min_length=1)] = "**/*.py"  # the files of a directory
    validation_share: Annotated[float, Field(gt=0, le=0.5)] = 0.05


class TrainConfig(Section):
    """[train]: AdamW with a warm-up and a cosine decay."""

    steps: Count = 1000
    global_batch: Count = 16  # sequences of all ranks together in one step
    micro_batch: CountOrNone = 0  # sequences in one forward of one rank; 0 is its whole share
    lr: Positive = 4e-3
    final_lr_share: Share = 0.02  # of lr, at the last step
    warmup_steps: CountOrNone = 50
    weight_decay: Annotated[float, Field(ge=0)] = 0.1  # of the matrices
    betas: Annotated[tuple[Share, Share], Field(strict=False)] = (0.9, 0.95)
    grad_clip: Annotated[float, Field(ge=0)] = 1.0  # of the norm of all gradients; 0 is none
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    validate_every: CountOrNone = 0  # steps; 0 is only at the end
    validation_batches: Count = 16

    @model_validator(mode="after")
    def _warmup_ends(self) -> Self:
        if self.warmup_steps >= self.steps and self.warmup_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps}: expected fewer than steps={self.steps}"
            )
        return self


class CheckpointConfig(Section):
    """[checkpoint]: what a run that was stopped or killed goes on from."""

    every: CountOrNone = 200  # steps; the last one is kept, too; 0 is no checkpoints at all
    keep: Count = 2  # the newest so many
    directory: str = ""  # or a URL that fsspec knows; "" is `checkpoints` in run.directory
    wait: bool = True  # False writes beside the next steps, from a copy in host memory


class SampleConfig(Section):
    """[sample]: the text that the trained model writes at the end."""

    prompt: Annotated[str, Field(min_length=1)] = "def "
    bytes: CountOrNone = 300  # 0 is no sample
    temperature: Positive = 0.8
    top_k: Annotated[int, Field(ge=1, le=256)] = 40


class ShardConfig(Section):
    """[shard]: how the model lies on the ranks."""

    nproc: Count = 2  # local ranks; a launcher that set WORLD_SIZE has the last word
    units: str | int = "auto"  # or a module class such as "Block", or a size in parameters
    strategy: str = "fsdp"  # or "ddp", "zero1", "zero2", "hsdp", "hfsdp"
    replicas: Count = 1  # of the sharded model, for "hsdp" and "hfsdp"
    prefetch: CountOrNone = 1  # units gathered ahead of the one that computes


class PrecisionConfig(Section):
    """[precision]: the dtypes; shards and optimizer states stay in float32."""

    compute: Literal["float32", "bfloat16", "float16"] = "float32"  # gathers, forward, backward
    reduce: Literal["float32", "bfloat16", "float16"] = "float32"  # of gradients between ranks
    norms: Literal["float32", "compute"] = "float32"


class MemoryConfig(Section):
    """[memory]: what is computed twice, or kept longer, for the sake of the other."""

    checkpoint_every: CountOrNone = 0  # recompute each n-th block in backward; 0 is none
    checkpoint: Literal["full", "reentrant", "selective"] = "full"  # what of these is recomputed
    offload: Literal["none", "optimizer", "all"] = "none"  # to the host; "all" is parameters, too
    activations: Literal["device", "host"] = "device"  # where they wait for backward
    step_in_backward: bool = False  # each unit as soon as its gradients are there
    accumulate: Literal["shards", "whole"] = "shards"  # gradients of several micro batches


class Config(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    sample: SampleConfig = SampleConfig()
    shard: ShardConfig = ShardConfig()
    precision: PrecisionConfig = PrecisionConfig()
    memory: MemoryConfig = MemoryConfig()

    @property
    def share(self) -> int:
        """Sequences of one rank in one step."""
        return self.train.global_batch // self.shard.nproc

    @property
    def micro_batch(self) -> int:
        """Sequences in one forward of one rank."""
        return self.train.micro_batch or self.share

    def on(self, num_ranks: int) -> "Config":
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
    """Refuse a global batch that leaves a rank with a part of a micro batch."""
    micro_batch = train.micro_batch or 1
    at_once = num_ranks * micro_batch
    if train.global_batch % at_once == 0:
        return
    below = train.global_batch // at_once * at_once
    nearest = " or ".join(str(number) for number in (below, below + at_once) if number)
    way_out = f"set train.global_batch to {nearest}"
    if train.micro_batch and train.global_batch % num_ranks == 0:
        share = train.global_batch // num_ranks
        fitting = max(n for n in range(1, min(micro_batch, share) + 1) if share % n == 0)
        way_out += f", or train.micro_batch to {fitting}"
    batches = f" x micro batches of {micro_batch}" if train.micro_batch else ""
    raise ConfigError(
        f"train.global_batch={train.global_batch} does not divide into {num_ranks} ranks{batches}; "
        f"{way_out}"
    )

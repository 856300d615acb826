"""The configuration of a training run: one frozen section for each table of a TOML file.

Every key has a default, so an empty file is valid: it trains on the source of Python's standard
library with a local rank for each GPU, or with two on CPUs.
"""

import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shardwise.errors import ConfigError
from shardwise.plan.spelling import did_you_mean, divisors

__all__ = ["Config", "changed_config", "read_config", "to_toml"]

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Names = Annotated[tuple[str, ...], Field(strict=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
DType = Literal["float32", "bfloat16", "float16"]


class Section(BaseModel):
    """A table: unknown keys are errors, and values are not converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for problem in self._problems():
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterable[str]:
        """Contradictions between the values of this section."""
        return ()


class RunConfig(Section):
    """[run]: the run directory and the logs."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] = "stdlib"  # name of the run
    directory: str = ""  # "": `runs/<name>-<time>`; a directory with checkpoints is resumed
    overwrite: bool = False  # start over in a directory that has files
    log_every: Positive = 50  # steps between log lines if the output is not a terminal
    sinks: Names = ()  # also log to "tensorboard", "wandb" or "package.module:Class"
    callbacks: Names = ()  # "package.module:Class", called after each step on every rank
    export: bool = True  # if model.path is set: write `model` in the run directory at the end


class ModelConfig(Section):
    """[model]: the sizes of the GPT, or the directory of a Hugging Face model."""

    path: str = ""  # a directory with config.json and, if there are any, weights; "": the GPT
    from_scratch: bool = False  # ignore the weights in model.path
    lora_rank: NonNegative = 0  # rank of LoRA adapters, with a frozen base; 0: no adapters
    lora_alpha: Positive = 16  # adapters are scaled by lora_alpha / lora_rank
    lora_targets: str | Names = "all-linear"  # peft's target_modules: modules that get adapters
    layers: Positive = 4  # number of blocks of the GPT
    heads: Positive = 4  # attention heads of the GPT
    width: Positive = 128  # hidden size of the GPT
    context: Positive = 128  # tokens per sequence

    def _problems(self) -> Iterator[str]:
        multiple = 2 * self.heads
        if self.width % multiple:
            yield (
                f"width={self.width}: expected a multiple of 2 * heads = {multiple} "
                f"(rotary embeddings rotate pairs), such as {_multiples_near(self.width, multiple)}"
            )
        if self.lora_rank and not self.path:
            yield (
                f"lora_rank={self.lora_rank}: expected the model of model.path to adapt, and the "
                "GPT is trained from its initial values; set model.path, or lora_rank=0"
            )


class TokenizerConfig(Section):
    """[tokenizer]: how text is converted to tokens. Without a tokenizer, each byte is a token."""

    path: str = ""  # the directory of a tokenizer; "": the one in model.path, if that is set
    vocabulary: NonNegative = 0  # train a byte-level BPE of this size on the documents; 0: do not

    def _problems(self) -> Iterator[str]:
        if self.path and self.vocabulary:
            yield "expected either a path or a vocabulary to train, got both"


class DataConfig(Section):
    """[data]: plain text, or documents and conversations (loss on the answers only)."""

    path: Annotated[str, Field(min_length=1)] = "stdlib"  # or a file, or a directory
    glob: str = ""  # which files of a directory; "": "**/*.py", or the extension of the format
    format: str = "auto"  # or "text", "jsonl", "parquet", "datasets", "package.module:function"
    column: str = "text"  # field of a record with a text or a list of messages (a conversation)
    validation: str = ""  # a path to validate on; "": hold out validation_share of data.path
    cache: str = ""  # directory for tokenized documents; "": `~/.cache/shardwise`
    validation_share: Annotated[float, Field(gt=0, le=0.5)] = 0.05  # held out for validation
    workers: NonNegative = 0  # DataLoader processes per rank; 0: read in the rank itself


class TrainConfig(Section):
    """[train]: the batch, the optimizer and its schedule after a linear warm-up, validation."""

    steps: Positive = 200  # optimizer steps
    global_batch: Positive = 16  # sequences per step, over all ranks
    micro_batch: NonNegative = 0  # sequences per forward of a rank; 0: no accumulation
    # Micro-batches per step over all ranks, a power of two: the run has the same bits on any number
    # of ranks that divides it; 0: it may not.
    reproducible: NonNegative = 0
    optimizer: str = "adamw"  # or "muon", "soap", another of torch's, "package.module:Class"
    optimizer_options: dict[str, Any] = {}  # such as `{momentum = 0.9}`
    schedule: str = "cosine"  # or "linear", "constant", "wsd", "package.module:function"
    lr: PositiveFloat = 4e-3  # peak learning rate; has to be set if weights are loaded
    final_lr_share: Fraction = 0.02  # learning rate of the last step, as a share of lr
    warmup_share: Fraction = 0.1  # share of the steps in which the learning rate rises
    weight_decay: Annotated[float, Field(ge=0)] = 0.1  # for parameters with 2 or more dims
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)  # Adam's betas
    compile: bool = False  # compile each block with torch.compile
    grad_clip: Annotated[float, Field(ge=0)] = 1.0  # maximum gradient norm; 0: no clipping
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0  # seed of the weights and the order of data
    validate_every: NonNegative = 0  # steps between validations; 0: only after the last step
    # Global batches per validation; 0: all sequences of the validation data, each once.
    validation_batches: NonNegative = 16
    patience: NonNegative = 0  # stop after this many validations without a lower loss; 0: do not

    def _problems(self) -> Iterator[str]:
        if self.patience and not self.validate_every:
            yield (
                f"patience={self.patience} counts validations, but validate_every=0 validates only "
                "after the last step; set validate_every"
            )
        leaves = self.reproducible
        if leaves & (leaves - 1):
            yield f"reproducible={leaves}: expected a power of two, or 0"
        if leaves and self.global_batch % leaves:
            yield (
                f"reproducible={leaves}: expected a number that divides "
                f"global_batch={self.global_batch}, such as {math.gcd(self.global_batch, leaves)}"
            )
        if leaves and self.micro_batch not in (0, self.global_batch // leaves):
            yield (
                f"micro_batch={self.micro_batch} with reproducible={leaves}: a step of "
                f"{self.global_batch} sequences has {leaves} micro-batches of "
                f"{self.global_batch // leaves}; leave out micro_batch"
            )

    @property
    def warmup_steps(self) -> int:
        """Number of warm-up steps, less than ``steps``."""
        return int(self.steps * self.warmup_share)

    def is_over(self, step: int, best_step: int) -> bool:
        """Whether training ends after ``step``.

        The lowest validation loss so far is that of ``best_step``, 0 if there is none.
        """
        waited = step - best_step >= self.patience * self.validate_every
        return step >= self.steps or bool(self.patience and best_step and waited)


class CheckpointConfig(Section):
    """[checkpoint]: the checkpoints from which a stopped or killed run resumes."""

    every: NonNegative = 100  # steps between checkpoints; the last step is always saved; 0: none
    keep: Positive = 2  # how many of the latest checkpoints to keep
    best: bool = False  # also keep the checkpoint with the lowest validation loss, in `best`
    # A path, or a URL that fsspec supports, in which each replica has a folder with its number; "":
    # `checkpoints` of the run.
    directory: str = ""
    wait: bool = True  # false: write in the background, from a copy in host memory


class RecordConfig(Section):
    """[record]: the recording for `shardwise report`, in `recording` of run.directory."""

    enabled: bool = True  # record the run
    # Steps of which every event is recorded: "some" chooses a few of the first steps and of every
    # hundred; or a list such as [10, 11, 12].
    steps: Literal["some"] | Annotated[tuple[Positive, ...], Field(strict=False)] = "some"


class SampleConfig(Section):
    """[sample]: the text that the trained model generates at the end."""

    prompt: Annotated[str, Field(min_length=1)] = "def "  # the text to continue
    bytes: NonNegative = 300  # length in bytes, or in tokens with a tokenizer; 0: no sample
    temperature: PositiveFloat = 0.8  # lower values give more likely text
    top_k: Positive = 40  # draw each token from the k most likely ones


class ShardConfig(Section):
    """[shard]: how the model is sharded over the ranks."""

    # Local ranks; if it is not set, one for each GPU, or 2 on CPUs. The WORLD_SIZE of a launcher
    # takes precedence.
    nproc: Positive = 2
    units: str | int = "auto"  # or a module class such as "Block", or a size in parameters
    strategy: str = "fsdp"  # or "ddp", "zero1", "zero2", "hsdp", "hsdp-zero2", "hfsdp"
    replicas: Positive = 1  # copies of the sharded model, for "hsdp", "hsdp-zero2" and "hfsdp"
    tensor: Positive = 1  # neighboring ranks that divide each layer of a Hugging Face model
    prefetch: NonNegative = 1  # units to gather ahead


class PrecisionConfig(Section):
    """[precision]: dtypes; shards and optimizer states stay in float32."""

    compute: DType = "float32"  # dtype of gathered parameters, forward and backward
    reduce: DType = "float32"  # dtype in which gradients are reduced
    norms: Literal["float32", "compute"] = "float32"  # dtype of layer norms


class MemoryConfig(Section):
    """[memory]: options that save memory at the cost of computation and copies."""

    checkpoint_every: NonNegative = 0  # recompute every n-th block in backward; 0: none
    # What these blocks keep: their inputs ("full", or "reentrant", PyTorch's older implementation),
    # also the results of matrix products ("products"), or of every second one ("selective").
    checkpoint: Literal["full", "reentrant", "products", "selective"] = "full"
    # Keep optimizer states and gradients in host memory; "all": parameters too.
    offload: Literal["none", "optimizer", "all"] = "none"
    # With offload, where the optimizer runs; on the "device", gradients are not in host memory.
    offload_step: Literal["host", "device"] = "host"
    activations: Literal["device", "host"] = "device"  # where activations are kept until backward
    step_in_backward: bool = False  # step each unit as soon as its gradients are reduced
    # Where gradients of micro-batches are summed: in shards, or in whole gradients, which take more
    # memory and are reduced once per step.
    accumulate: Literal["shards", "whole"] = "shards"


class ReplicasConfig(Section):
    """[replicas]: replicas that may die and come back; each is a separate run."""

    lighthouse: str = ""  # http://host:port of torchft's lighthouse; "": this is the only replica
    number: NonNegative = 0  # the number of this replica
    count: Positive = 1  # number of replicas, which divide train.global_batch
    minimum: Positive = 1  # replicas without which no step counts
    timeout: PositiveFloat = 60.0  # seconds for an answer of another replica
    quorum_timeout: PositiveFloat = 600.0  # seconds to wait for enough replicas
    retries: NonNegative = 10  # how often to ask a lighthouse that does not answer

    def _problems(self) -> Iterator[str]:
        if self.number >= self.count:
            yield f"number={self.number}: expected less than count={self.count}"
        if self.minimum > self.count:
            yield (
                f"minimum={self.minimum}: no step would ever count with count={self.count} replicas"
            )
        if self.count > 1 and not self.lighthouse:
            yield (
                f"count={self.count} needs a lighthouse; set replicas.lighthouse to "
                f"http://host:port, or run `shardwise train --replicas {self.count}`"
            )


class OuterConfig(Section):
    """[outer]: how replicas that train alone for many steps synchronize."""

    every: NonNegative = 0  # steps between two synchronizations of a fragment; 0: average gradients
    fragments: Positive = 1  # sets of units that are synchronized at different times
    delay: NonNegative = 0  # steps between sending a difference and applying the result
    dtype: str = "int4"  # dtype of differences: or "int8", "bfloat16", "float32", "float64"
    block: Positive = 128  # elements that share a scale, for integers
    mixing: Fraction = 0.0  # the share of its own parameters that a replica keeps
    lr: PositiveFloat = 0.7  # learning rate of the outer optimizer, SGD
    momentum: Fraction = 0.9  # Nesterov momentum of the outer optimizer; 0: none


class Config(Section):
    """The configuration of a run. ``--set`` overrides the file, which overrides the defaults.

    Environment variables are not read: they would change results without a trace in the run's
    config.toml.
    """

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    record: RecordConfig = RecordConfig()
    sample: SampleConfig = SampleConfig()
    shard: ShardConfig = ShardConfig()
    precision: PrecisionConfig = PrecisionConfig()
    memory: MemoryConfig = MemoryConfig()
    replicas: ReplicasConfig = ReplicasConfig()
    outer: OuterConfig = OuterConfig()

    @property
    def data_ranks(self) -> int:
        """Groups of ``shard.tensor`` ranks, each of which trains on its own sequences."""
        return self.shard.nproc // self.shard.tensor

    @property
    def rank_batch(self) -> int:
        """Sequences per rank and step."""
        return self.train.global_batch // (self.data_ranks * self.replicas.count)

    @property
    def micro_batch(self) -> int:
        if self.train.reproducible:
            return self.train.global_batch // self.train.reproducible
        return self.train.micro_batch or self.rank_batch

    @property
    def num_micro_batches(self) -> int:
        return self.rank_batch // self.micro_batch

    def with_ranks(self, num_ranks: int) -> "Config":
        """The same run on ``num_ranks`` ranks; a ConfigError if they cannot divide its batch."""
        if num_ranks < 1:
            raise ConfigError(f"--nproc {num_ranks}: expected 1 or more ranks")
        if num_ranks % self.shard.tensor:
            raise ConfigError(
                f"shard.tensor={self.shard.tensor} does not divide the {num_ranks} ranks; set it "
                f"to one of {divisors(num_ranks)}, or use {self.shard.tensor} ranks"
            )
        check_batch(self.train, num_ranks // self.shard.tensor * self.replicas.count)
        shard = self.shard.model_copy(update={"nproc": num_ranks})
        return self.model_copy(update={"shard": shard})


def check_batch(train: TrainConfig, num_ranks: int) -> None:
    """Raise a ConfigError if a rank would get a fraction of a micro-batch."""
    if train.reproducible and train.reproducible % num_ranks:
        raise ConfigError(
            f"train.reproducible={train.reproducible} is not divisible by {num_ranks} ranks; set "
            "--nproc to a power of two up to that number"
        )
    multiple = num_ranks * max(train.micro_batch, 1)
    if train.global_batch % multiple == 0:
        return
    remedy = f"set train.global_batch to {_multiples_near(train.global_batch, multiple)}"
    if train.micro_batch and train.global_batch % num_ranks == 0:
        rank_batch = train.global_batch // num_ranks
        divisors = (n for n in range(1, train.micro_batch) if rank_batch % n == 0)
        remedy += f", or train.micro_batch to {max(divisors)}"
    batches = f" x micro-batches of {train.micro_batch}" if train.micro_batch else ""
    raise ConfigError(
        f"train.global_batch={train.global_batch} is not divisible by {num_ranks} ranks{batches}; "
        f"{remedy}"
    )


def _multiples_near(number: int, of: int) -> str:
    """The multiples below and above ``number``, without 0."""
    below = number // of * of
    return " or ".join(str(multiple) for multiple in (below, below + of) if multiple)


# -- reading and writing --------------------------------------------------------------------------

_KEYS = {
    section: list(type(field.default).model_fields)
    for section, field in Config.model_fields.items()
}


def read_config(path: Path | None, overrides: Iterable[str] = ()) -> Config:
    """Read ``path``, or take the defaults, overridden by ``section.key=value`` texts."""
    given: dict[str, dict[str, Any]] = {}
    for text in overrides:
        section, key, value = _parse_override(text)
        given.setdefault(section, {})[key] = value
    try:
        values = {} if path is None else tomllib.loads(path.read_bytes().decode())
        for section, keys in given.items():
            if isinstance(values.setdefault(section, {}), dict):
                values[section] |= keys
        return Config.model_validate(values)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; expected a TOML configuration") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; expected a TOML configuration") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None
    except ValidationError as error:
        raise ConfigError(_explain(error, path, given)) from None


def changed_config(base: Config, changes: Mapping[str, dict[str, Any]]) -> Config:
    """Return ``base`` with other values, by section and key; a ConfigError if they are invalid."""
    given = base.model_dump(exclude_unset=True)  # so that the others remain defaults
    names = {*given, *changes}
    values = {name: given.get(name, {}) | changes.get(name, {}) for name in names}
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error, None, changes)) from None


def to_toml(config: Config) -> str:
    """The configuration as TOML, from which `read_config` restores an equal one."""
    return tomli_w.dumps(config.model_dump())


def _parse_override(text: str) -> tuple[str, str, object]:
    name, equals, raw = (part.strip() for part in text.partition("="))
    if not equals:
        raise ConfigError(f"--set {text}: expected section.key=value, such as train.steps=100")
    known = [f"{section}.{key}" for section, keys in _KEYS.items() for key in keys]
    if name not in known:
        raise ConfigError(f"--set {text}: unknown key {name!r}{_hint(name, known)}")
    section, key = name.split(".")
    field = type(Config.model_fields[section].default).model_fields[key]
    return section, key, _parse_value(raw, is_text=field.annotation is str)


def _parse_value(raw: str, *, is_text: bool) -> object:
    """A TOML value; or ``raw`` itself if it is not TOML, or if the key takes text (a name 7)."""
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw
    value = parsed["value"]
    is_one_value = len(parsed) == 1 and (isinstance(value, str) or not is_text)
    return value if is_one_value else raw


def _explain(
    error: ValidationError, path: Path | None, overrides: Mapping[str, Mapping[str, Any]]
) -> str:
    """All errors in one line; errors in the file start with its name."""
    problems: dict[str, str] = {}
    got: dict[str, str] = {}
    for detail in error.errors():
        section, *key = map(str, detail["loc"][:2])
        is_override = section in overrides and (not key or key[0] in overrides[section])
        name = ("" if is_override else f"{path}: ") + ".".join([section, *key])
        problem = _problem(section, key, dict(detail))
        if problem.startswith("expected"):
            got[name] = f", got {detail['input']!r}"
        if name in problems:  # one for each type of a union
            problem = f"{problems[name]} or {problem.removeprefix('expected ')}"
        problems[name] = problem
    return "; ".join(f"{name}: {text}{got.get(name, '')}" for name, text in problems.items())


def _problem(section: str, key: list[str], detail: dict[str, Any]) -> str:
    match detail["type"]:
        case "extra_forbidden" if key:
            return f"unknown key{_hint(key[0], _KEYS[section])}"
        case "extra_forbidden":
            return f"unknown section{_hint(section, list(_KEYS))}"
        case "value_error":  # raised by one of our validators, with a complete message
            return str(detail["ctx"]["error"])
        case "model_type":
            return f"expected a table [{section}]"
        case "missing":
            return "expected one more value"
        case _:
            expected = detail["msg"].replace("Input should be ", "expected ")
            return re.sub(r"expected (?=greater|less)", "expected a number ", expected)


def _hint(name: str, known: list[str]) -> str:
    for candidate in known:
        if candidate.endswith(f".{name}"):  # the section is missing or wrong
            return f"; did you mean {candidate!r}?"
    return did_you_mean(name, known) or f"; expected one of {', '.join(known)}"

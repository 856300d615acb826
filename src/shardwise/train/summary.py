"""The results of a run: its final losses, its speed and memory, and a generated sample."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import nn

from shardwise.local_devices import peak_memory_bytes
from shardwise.train.build import memory_of
from shardwise.train.sinks import StepMetrics
from shardwise.train.source import Source
from shardwise.train.tokenizer import Tokenizer
from shardwise.train.trainer import Trainer

__all__ = ["Summary", "generate", "summarize"]

SUMMARY_STEPS = 50  # steps of the mean loss, because the batch of a single step is small


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of a run that reached its last step."""

    loss: float  # mean over the last steps
    loss_steps: int  # number of steps in that mean
    validation_loss: float
    tokens: int
    tokens_per_second: float  # without validation
    seconds: float
    rank: dict[str, int]  # bytes of the rank that needs most, by use
    process: dict[str, int]  # bytes of one process without sharding
    resident_peaks: tuple[int, ...]  # measured peak bytes, by rank
    overlapped_share: float | None  # share of the gather time that overlapped compute, if timed
    sample: str


def summarize(trainer: Trainer, records: Sequence[StepMetrics]) -> Summary:
    """Generate the sample, and gather the measurements of all ranks."""
    config, world, runtime = trainer.config, trainer.world, trainer.runtime
    # Without sw.gathered: the whole model may not fit.
    sample = generate(trainer.model, trainer.source, trainer.corpus.tokenizer, world.device)
    rank, process = memory_of(config, world.device.type)
    transient = max(world.gather(runtime.pools.peak_bytes))
    shares = trainer.overlapped_shares
    overlapped = world.gather(sum(shares) / len(shares) if shares else math.nan)
    last = records[-SUMMARY_STEPS:]
    validation_loss = records[-1].validation_loss
    assert validation_loss is not None
    num_trained = len(trainer.step_seconds)
    step_tokens = config.train.global_batch * config.model.context
    return Summary(
        loss=sum(record.loss for record in last) / len(last),
        loss_steps=len(last),
        validation_loss=validation_loss,
        tokens=records[-1].tokens,
        tokens_per_second=num_trained * step_tokens / max(sum(trainer.step_seconds), 1e-9),
        seconds=records[-1].seconds,
        rank={**rank, "transient": transient},
        process=process,
        resident_peaks=tuple(world.gather(peak_memory_bytes(world.device))),
        overlapped_share=None if any(map(math.isnan, overlapped)) else fmean(overlapped),
        sample=sample,
    )


@torch.no_grad()
def generate(model: nn.Module, source: Source, tokenizer: Tokenizer, device: torch.device) -> str:
    """Return the prompt and ``sample.bytes`` generated tokens.

    Control characters are replaced by U+FFFD. A forward of a sharded model gathers units, so every
    rank must call this function. The result is the same on all ranks.
    """
    options, context = source.config.sample, source.config.model.context
    generator = torch.Generator().manual_seed(source.config.train.seed)
    tokens = tokenizer.encode(options.prompt)
    model.eval()
    for _ in range(options.bytes):
        window = torch.tensor([tokens[-context:]], device=device)  # [1, time]
        logits = source.logits(model, window)[0, -1].float().cpu()[: tokenizer.vocabulary]
        best = logits.topk(min(options.top_k, len(logits)))  # [top_k]
        probabilities = torch.softmax(best.values / options.temperature, dim=0)
        choice = torch.multinomial(probabilities, num_samples=1, generator=generator)
        tokens.append(int(best.indices[choice]))
    model.train()
    text = tokenizer.decode(tokens)
    # An untrained model may generate escape sequences, which a terminal would execute.
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )

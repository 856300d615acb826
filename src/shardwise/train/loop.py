"""Training: the steps, and what is measured around them. Every rank runs this."""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from shardwise.launch.world import World
from shardwise.plan.plan import Plan
from shardwise.runtime.module import runtime_of_root
from shardwise.runtime.reductions import across
from shardwise.train.baselines import measure_baselines
from shardwise.train.build import build_model, build_plan, find_units, offload_of, precision_of
from shardwise.train.config import Config
from shardwise.train.data import Corpus, Sampler, read_corpus
from shardwise.train.memory import foresee, one_process, one_rank
from shardwise.train.models import GPT
from shardwise.train.optimizer import learning_rate
from shardwise.train.records import Observer, Record, Start, Summary
from shardwise.train.run_directory import RunDirectory
from shardwise.train.sample import generate
from shardwise.train.saving import Saver
from shardwise.train.stopping import StopRequest
from shardwise.train.switches import weigh
from shardwise.train.update import Update
from shardwise.transport.device import peak_memory_bytes

__all__ = ["Trainer", "train"]

SUMMARY_STEPS = 50  # one step's batch is small, so the mean of the last ones is told
VALIDATION_SEED = 0  # the same sequences each time, whatever the run's own seed


def train(config: Config, ranks: World, observer: Observer, run: RunDirectory) -> int:
    """Train the model of ``config`` on ``ranks`` and tell ``observer``.

    Returns:
        the signal that stopped it, after a checkpoint; 0 if it came to its end.

    Raises:
        FloatingPointError: the loss or the gradient is no longer a number.
        CheckpointError: a checkpoint cannot be written, or is damaged.
    """
    corpus = read_corpus(config.data)
    model = build_model(config)
    plan = build_plan(model, config)
    baselines = measure_baselines(corpus.train)
    records = run.history()
    saver = Saver(config, ranks, run.saves_to)
    try:
        device = ranks.device.type
        switches = weigh(config, model, device)
        observer.begin(Start(config, plan, device, corpus.description, baselines, switches))
        with ranks.device:  # where the values are made
            shard(model, config)
        trainer = Trainer(config, ranks, model, corpus)
        if run.checkpoint is not None:
            saver.load(run.checkpoint, model, trainer.update)
        with trainer.stop.listening() if config.checkpoint.every else contextlib.nullcontext():
            for record in trainer.steps(saver.saved_step, records[-1].seconds if records else 0.0):
                records.append(record)
                observer.step(record)
                if saver.is_due(record.step, stops=bool(trainer.stopped_by)):
                    saver.save(record.step, model, trainer.update, corpus.digest)
                if trainer.stopped_by:
                    break
            saver.wait()
        if trainer.stopped_by and saver.saved_step < config.train.steps:
            observer.stop(trainer.stopped_by, saver.saved_step)
            return trainer.stopped_by
        observer.end(summarize(trainer, records, plan))
    finally:
        observer.close()
    return 0


def shard(model: GPT, config: Config) -> None:
    """Give ``model`` its values and this rank its part of them."""
    sw.fully_shard(
        model,
        units=find_units(model, config.shard.units),
        strategy=config.shard.strategy,
        prefetch=config.shard.prefetch,
        mp_policy=precision_of(config),
        offload_policy=offload_of(config),
        sharding_factor=config.shard.nproc // config.shard.replicas,
        init=sw.Initialization(config.train.seed, model.fill),
    )


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Of the global batch, the same on every rank."""

    loss: float
    grad_norm: float | None  # before clipping; None where units are stepped one by one
    stopped_by: int  # the signal that some rank got, or 0


class Trainer:
    """One rank's part in every step."""

    def __init__(self, config: Config, ranks: World, model: nn.Module, corpus: Corpus) -> None:
        self.config = config
        self.ranks = ranks
        self.model = model
        self.update = Update(model, config, ranks.device)
        self.stop = StopRequest()
        self.stopped_by = 0  # the signal that the ranks agreed to stop for
        self._trained_steps = 0  # by this process
        self._training_seconds = 0.0  # validation aside
        self._overlapped_shares: list[float] = []  # of the steps
        self._axis = runtime_of_root(model).axis
        batch, context = config.train.global_batch, config.model.context
        self._text = Sampler(corpus.train, context, batch, config.train.seed)
        self._held_out = Sampler(corpus.validation, context, batch, VALIDATION_SEED)

    @property
    def overlapped_share(self) -> float:
        """Of the time of this rank's gathers, what was hidden behind compute, in the mean step."""
        return sum(self._overlapped_shares) / max(1, len(self._overlapped_shares))

    @property
    def tokens_per_second(self) -> float:
        """Of the steps of this process, validation aside."""
        step_tokens = self.config.train.global_batch * self.config.model.context
        return self._trained_steps * step_tokens / max(self._training_seconds, 1e-9)

    def steps(self, after: int = 0, seconds: float = 0.0) -> Iterator[Record]:
        """Train, one record a step.

        Args:
            after: the step that is done already.
            seconds: what it took until then.
        """
        config = self.config.train
        step_tokens = config.global_batch * self.config.model.context
        began = time.perf_counter() - seconds
        for step in range(after + 1, config.steps + 1):
            step_began = time.perf_counter()
            lr = learning_rate(step, config)
            outcome = self._step(step, lr)
            step_seconds = time.perf_counter() - step_began
            self._training_seconds += step_seconds
            self._trained_steps += 1
            self.stopped_by = outcome.stopped_by
            validates = config.validate_every and step % config.validate_every == 0
            yield Record(
                step=step,
                loss=outcome.loss,
                grad_norm=outcome.grad_norm,
                lr=lr,
                loss_scale=self.update.loss_scale,
                tokens=step * step_tokens,
                tokens_per_second=step_tokens / step_seconds,
                validation_loss=self.validate() if validates or step == config.steps else None,
                seconds=time.perf_counter() - began,
            )

    @torch.no_grad()
    def validate(self) -> float:
        """The mean loss on text that is not trained on."""
        self.model.eval()
        num_batches = self.config.train.validation_batches
        total = torch.zeros((), device=self.ranks.device)
        for batch in range(num_batches):
            for part in self._parts(self._held_out, batch):
                total += self._loss(part)
        self.model.train()
        return float(across([total], self._axis, self._axis.world).mean()) / num_batches

    def sample(self) -> str:
        """Text that the model writes, the same on every rank."""
        # Not inside sw.gathered: what trains only because it is sharded would not fit whole.
        return generate(
            self.model,
            self.config.sample,
            context=self.config.model.context,
            seed=self.config.train.seed,
            device=self.ranks.device,
        )

    def _step(self, step: int, lr: float) -> StepOutcome:
        """Train on the global batch of ``step``."""
        self.update.begin(lr)
        total = torch.zeros((), device=self.ranks.device)
        parts = self._parts(self._text, step)
        for number, part in enumerate(parts, start=1):
            if self.config.memory.accumulate == "whole":
                assert isinstance(self.model, sw.FSDPModule)
                self.model.set_requires_gradient_sync(number == len(parts))
            with self._around_forward():
                loss = self._loss(part)
            self.update.scale(loss).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        self._overlapped_shares.append(sw.ledger(self.model).overlapped_share())
        norm = self.update.finish()
        # All ranks hear of a signal in the same step, in the exchange that the loss takes anyway.
        told = across([total, total.new_tensor(self.stop.signal)], self._axis, self._axis.world)
        loss, stopped_by = torch.stack([told[:, 0].mean(), told[:, 1].amax()]).tolist()
        grad_norm = None if norm is None else float(norm)
        outcome = StepOutcome(loss, grad_norm, int(stopped_by))
        if not self._is_finite(outcome):
            raise FloatingPointError(
                f"step {step}: loss {outcome.loss}, gradient norm {outcome.grad_norm}; "
                f"lower train.lr (now {self.config.train.lr}) or train.grad_clip"
            )
        return outcome

    def _around_forward(self) -> AbstractContextManager[None]:
        on_host = self.config.memory.activations == "host"
        return sw.offload_activations(self.model) if on_host else nullcontext()

    def _is_finite(self, outcome: StepOutcome) -> bool:
        is_scaled = self.update.loss_scale is not None  # then a norm without end is a skipped step
        norm = 0.0 if is_scaled or outcome.grad_norm is None else outcome.grad_norm
        return math.isfinite(outcome.loss + norm)

    def _parts(self, sampler: Sampler, step: int) -> Sequence[Tensor]:
        """This rank's micro batches of a step, int64 [micro_batch, context + 1] each."""
        share = sampler.share(step, rank=self.ranks.rank, num_ranks=self.ranks.size)
        return torch.split(share.to(self.ranks.device), self.config.micro_batch)

    def _loss(self, sequences: Tensor) -> Tensor:
        """The part of the rank's mean loss that these sequences give, so that parts add up."""
        logits = self.model(sequences[:, :-1])  # [micro_batch, context, vocabulary]
        mean = functional.cross_entropy(logits.flatten(0, 1).float(), sequences[:, 1:].flatten())
        return mean * (len(sequences) / self.config.share)


def summarize(trainer: Trainer, records: Sequence[Record], plan: Plan) -> Summary:
    """Measure what is left to measure; every rank calls it."""
    sample = trainer.sample()
    ledger = sw.ledger(trainer.model)
    ranks = trainer.ranks
    pools = runtime_of_root(trainer.model).pools
    foreseen = foresee(plan, trainer.config, ranks.device.type)
    last = records[-SUMMARY_STEPS:]
    tokens = records[-1].tokens
    validation_loss = records[-1].validation_loss
    if validation_loss is None:  # the run goes on from its end, and with more ``steps`` before
        validation_loss = trainer.validate()
    return Summary(
        loss=sum(record.loss for record in last) / len(last),
        loss_steps=len(last),
        validation_loss=validation_loss,
        tokens=tokens,
        tokens_per_second=trainer.tokens_per_second,
        seconds=records[-1].seconds,
        rank=one_rank(plan, foreseen, transient=max(ranks.gather(pools.peak_bytes))),
        process=one_process(plan),
        resident_peaks=tuple(ranks.gather(peak_memory_bytes(ranks.device))),
        overlapped_share=sum(ranks.gather(trainer.overlapped_share)) / ranks.size,
        sample=sample,
        ledger=ledger,
    )

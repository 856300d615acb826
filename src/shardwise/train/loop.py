"""The training loop; every rank runs it."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import shardwise as sw
from shardwise._warnings import warn_caller
from shardwise.checkpoint.stores import folder_at
from shardwise.comm.tree import tree_sum
from shardwise.launch.world import World
from shardwise.optim.nonfinite import describe_nonfinite
from shardwise.train.config import Config
from shardwise.train.data import Batch
from shardwise.train.documents import Documents
from shardwise.train.plugins import resolve
from shardwise.train.run_directory import RunDirectory
from shardwise.train.sinks import Sink, StepMetrics
from shardwise.train.source import Gpt
from shardwise.train.summary import Summary, summarize
from shardwise.train.trainer import StepResult, Trainer
from shardwise.train.utilization import wait_metrics

__all__ = ["Result", "steps", "train"]


@dataclass(frozen=True, slots=True)
class Result:
    stopped_by: int = 0  # number of the signal that stopped the run; 0 if it reached its last step
    summary: Summary | None = None  # None if the run was stopped


def train(config: Config, world: World, run: RunDirectory, sinks: Sequence[Sink] = ()) -> Result:
    """Train the model of ``config``, and log each step to ``sinks``."""
    trainer = Trainer(config, world)
    if run.checkpoint is not None:
        trainer.load(run.checkpoint)
    _warn_of_attention(trainer)
    records, every, pending = list(run.history), config.checkpoint.every, None
    callbacks = [
        resolve("run.callbacks", name, {})(config, run.path) for name in config.run.callbacks
    ]
    stop = trainer.stop.handled() if every else nullcontext()
    trainer.world.on_first(run.check_owner)  # of two jobs that began together, the last one stays
    with closing(trainer.replicas), trainer.recorded(run.path), stop:
        for trained in steps(trainer, records[-1].seconds if records else 0.0):
            for callback in callbacks:
                callback(trainer, trained)
            record = _validated(trainer, trained) if trainer.ends_early else trained
            records.append(record)
            for sink in sinks:
                sink.log(record)
            pending = _save_best(trainer, run) or pending
            if every and (trainer.is_done or record.step % every == 0):
                # After the best one: if the run is killed in between, it resumes from an older one.
                pending = _save(trainer, run, run.saves_to)
        if pending is not None:
            pending.wait()
    if trainer.stopped_by and trainer.step < config.train.steps:
        return Result(stopped_by=trainer.stopped_by)
    if records[-1].validation_loss is None:
        # No step was left to train, and the last record is from a run with more steps.
        records[-1] = _validated(trainer, records[-1])
        if saving := _save_best(trainer, run):
            saving.wait()
    return Result(summary=summarize(trainer, records))


def _warn_of_attention(trainer: Trainer) -> None:
    """Warn if the model lets a document attend to others; the embedded GPT does not."""
    is_packed = isinstance(trainer.corpus.train, Documents)
    # Replicas have no forwards outside of steps before they have met.
    if not is_packed or trainer.config.replicas.lighthouse or isinstance(trainer.source, Gpt):
        return
    if not trainer.separates_documents() and trainer.world.is_first:
        warn_caller(
            f"model.path={trainer.config.model.path!r}: this type of model does not keep documents "
            "apart that are packed into one sequence: each is trained with those before it as its "
            "context"
        )


def steps(trainer: Trainer, seconds: float = 0.0) -> Iterator[StepMetrics]:
    """Train until the last step; yield the metrics of each step.

    ``seconds`` is the duration of the steps before the run was resumed.
    """
    config = trainer.config.train
    step_tokens = config.global_batch * trainer.config.model.context
    began = time.perf_counter() - seconds
    batches = trainer.batches()
    while not trainer.is_done:
        step_began = time.perf_counter()
        results: list[StepResult] = []  # empty if the step does not count
        with trainer.replicas.step():
            if trainer.adopt_step():  # this replica has taken the state of another one
                batches = trainer.batches()
            lr = float(trainer.scheduler.get_last_lr()[0])
            trainer.step += 1
            with trainer.runtime.scheduler.ledger.span("data"):
                batch = next(batches)
            try:
                results.append(_step(trainer, batch))
            except BaseException as error:
                trainer.runtime.scheduler.explain(error)
                raise
        if trainer.adopt_step():
            batches = trainer.batches()
        if not results:
            continue
        [result] = results
        trainer.step_seconds.append(time.perf_counter() - step_began)
        validates = config.validate_every and trainer.step % config.validate_every == 0
        is_validated = validates or trainer.step == config.steps
        replicas = trainer.replicas.metrics()
        count = trainer.config.replicas.count
        trained = step_tokens * replicas.get("replicas", count) / count
        own_speed = step_tokens / count / trainer.step_seconds[-1]  # of this replica
        yield StepMetrics(
            step=trainer.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=lr,
            loss_scale=trainer.scaler.get_scale() if trainer.scaler.is_enabled() else None,
            tokens=trainer.step * step_tokens,
            tokens_per_second=trained / trainer.step_seconds[-1],
            validation_loss=trainer.validate() if is_validated else None,
            seconds=time.perf_counter() - began,
            mfu=trainer.share_of_peak and own_speed * trainer.share_of_peak,
            peak_memory_bytes=int(max(rank.peak_memory_bytes for rank in result.ranks)),
            free_memory_bytes=int(min(rank.free_memory_bytes for rank in result.ranks)),
            **({} if trainer.recorder is None else wait_metrics(result.ranks)),
            **replicas,
        )


def _save_best(trainer: Trainer, run: RunDirectory) -> sw.Save | None:
    """Save the model if the last step has the lowest validation loss so far."""
    if not trainer.config.checkpoint.best or trainer.best.step != trainer.step:
        return None
    trainer.world.on_first(partial(run.discard_best, f"step-{trainer.step:08}"))
    return _save(trainer, run, run.saves_best_to, keep=1)


def _save(
    trainer: Trainer, run: RunDirectory, place: Path | str, *, keep: int | None = None
) -> sw.Save:
    trainer.world.on_first(run.check_owner)
    return trainer.save((folder_at(place) / f"step-{trainer.step:08}").target, keep=keep)


def _validated(trainer: Trainer, record: StepMetrics) -> StepMetrics:
    """The metrics of the last step, with a validation loss."""
    if record.validation_loss is not None:
        return record
    return replace(record, validation_loss=trainer.validate())


def _step(trainer: Trainer, batch: Batch) -> StepResult:
    model, memory = trainer.model, trainer.config.memory
    losses: list[Tensor] = []
    weight = trainer.weight_of(batch)
    parts = trainer.micro_batches(batch)
    is_reproducible = trainer.config.train.reproducible > 0  # then the engine reduces once
    for number, part in enumerate(parts, start=1):
        if memory.accumulate == "whole" and not is_reproducible:
            assert isinstance(model, sw.FSDPModule)
            model.set_requires_gradient_sync(number == len(parts))
        if trainer.recorder is not None:
            trainer.recorder.count_tokens(part.targets.numel())
        with trainer.offloaded_activations(), trainer.random_numbers_of(number - 1):
            loss = trainer.loss_sum(part) * weight
        trainer.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    total = trainer.replicas.mean(tree_sum(torch.stack(losses)))
    norm = trainer.update()
    result = trainer.exchange(total, norm)
    _check_finite(trainer, result)
    trainer.optimizer.zero_grad()  # after the check, whose error names gradients
    return result


def _check_finite(trainer: Trainer, result: StepResult) -> None:
    """Raise an error if the loss or the gradient norm is not finite.

    With a loss scale, an infinite norm only means that the step is skipped.
    """
    norm = None if trainer.scaler.is_enabled() else result.grad_norm
    if math.isfinite(result.loss) and (norm is None or math.isfinite(norm)):
        return
    text = f"step {trainer.step}: loss {result.loss}, gradient norm {result.grad_norm}; "
    text += f"lower train.lr (now {trainer.config.train.lr}) or train.grad_clip"
    if result.grad_norm is not None and not math.isfinite(result.grad_norm):
        text += f". {describe_nonfinite(list(trainer.model.parameters()))}"
    raise FloatingPointError(text)

"""The training loop; every rank runs it."""

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional

import shardwise as sw
from shardwise.checkpoint.stores import folder_at
from shardwise.launch.stop_signal import StopSignal
from shardwise.launch.world import World
from shardwise.optim.nonfinite import describe_nonfinite
from shardwise.runtime.module import runtime_of_root
from shardwise.tensor.reductions import across
from shardwise.train.build import (
    Footprint,
    build_model,
    build_optimizer,
    build_scheduler,
    process_footprint,
    rank_footprint,
    shard_model,
)
from shardwise.train.config import Config, to_toml
from shardwise.train.data import Sequences, Text, open_corpus
from shardwise.train.model import generate
from shardwise.train.run_directory import RunDirectory, identity
from shardwise.train.sinks import Sink, StepMetrics
from shardwise.train.utilization import (
    RankFigures,
    StepsOfRun,
    flops_per_token,
    peak_flops,
    waits_of,
)
from shardwise.transport.device import peak_memory_bytes, random_states, set_random_states

__all__ = ["Result", "Summary", "Trainer", "train"]

SUMMARY_STEPS = 50  # the batch of one step is small, so the summary has the mean of several
VALIDATION_SEED = 0  # the same sequences in every run, whatever its own seed


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of a run that reached its last step."""

    loss: float  # mean of the last steps
    loss_steps: int  # their number
    validation_loss: float
    tokens: int
    tokens_per_second: float  # without validation
    seconds: float
    rank: Footprint  # of the rank that needs most
    process: Footprint  # of one process without sharding
    resident_peaks: tuple[int, ...]  # bytes, measured, by rank
    overlapped_share: float  # of the time of the gathers
    sample: str


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended on this rank."""

    saved_step: int
    stopped_by: int = 0  # the signal after which it stopped; 0 if it reached its last step
    summary: Summary | None = None  # unless it was stopped


@dataclass(frozen=True, slots=True)
class _StepResult:
    loss: float  # of the global batch
    grad_norm: float | None  # if it is known
    ranks: list[RankFigures]


def train(config: Config, world: World, run: RunDirectory, sinks: Sequence[Sink] = ()) -> Result:
    """Train the model of ``config``, and log each step to ``sinks``.

    Raises:
        FloatingPointError: the loss or the gradient norm is not finite.
        CheckpointError: a checkpoint cannot be written, or is damaged.
    """
    trainer = Trainer(config, world)
    if run.checkpoint is not None:
        trainer.load(run.checkpoint)
    records, saved_step, pending = list(run.history), run.step, None
    every, folder = config.checkpoint.every, folder_at(run.saves_to)
    with trainer.recorded(run.path), trainer.stop.handled() if every else nullcontext():
        for record in trainer.steps(records[-1].seconds if records else 0.0):
            records.append(record)
            for sink in sinks:
                sink.log(record)
            is_last = trainer.stopped_by or record.step == config.train.steps
            if every and (is_last or record.step % every == 0):
                with trainer.ledger.span("checkpoint"):
                    pending = trainer.save((folder / f"step-{record.step:08}").target)
                saved_step = record.step
            if trainer.stopped_by:
                break
        if pending is not None:
            pending.wait()
    if trainer.stopped_by and saved_step < config.train.steps:
        return Result(saved_step, trainer.stopped_by)
    return Result(saved_step, 0, trainer.summarize(records))


class Trainer:
    """The model, data and optimizer of one rank.

    With ``memory.step_in_backward`` parameters are updated during backward, so the gradient norm
    is not known. In float16 the loss is scaled so that gradients do not underflow, and steps whose
    gradients overflow are skipped.
    """

    def __init__(self, config: Config, world: World) -> None:
        self.config = config
        self.world = world
        self.corpus = open_corpus(config.data)
        self.model = build_model(config)
        with world.device:  # where the values are initialized
            shard_model(self.model, config)
        self.optimizer = build_optimizer(self.model, config.train)
        if config.memory.step_in_backward:
            sw.optimizer_in_backward(self.model, self.optimizer)
        self.scaler = GradScaler(world.device.type, enabled=config.precision.compute == "float16")
        self._scheduler = build_scheduler(self.optimizer, config.train)
        self.step = 0  # the last one that is done
        self.num_trained = 0  # steps, by this process
        self.stop = StopSignal()
        self.stopped_by = 0  # the signal for which all ranks stop
        self._training_seconds = 0.0  # without validation
        self._overlapped_shares: list[float] = []  # of the steps
        runtime = runtime_of_root(self.model)
        self._mesh, self._plan = runtime.mesh, runtime.plan
        self.ledger = runtime.scheduler.ledger
        self._recorder: sw.Recorder | None = None
        self._exposed_seconds = 0.0  # of all steps

    @contextmanager
    def recorded(self, directory: Path) -> Iterator[None]:
        """Record the run in ``directory``, if [record] says so."""
        options = self.config.record
        if not options.enabled:
            yield
            return
        num_passes = self.config.rank_batch // self.config.micro_batch
        steps = StepsOfRun(options.steps, self.step + 1, num_passes)
        with sw.record(
            self.model, directory, steps=steps, optimizer=self.optimizer
        ) as self._recorder:
            yield

    def save(self, path: Path | str) -> sw.Save:
        """Save model, optimizer, step, configuration and random states.

        The position in the data is not saved: it follows from the seed and the step.

        Raises:
            CheckpointError: this checkpoint, or the last one if it was saved in the background,
                cannot be written.
        """
        options = self.config.checkpoint
        return sw.save(
            path,
            model=self.model,
            optimizer=self.optimizer,
            wait=options.wait,
            retention=sw.Retention(last=options.keep),
            run={"step": self.step, "shared": identity(self.config, self.corpus)},
            config=to_toml(self.config),
            random=self.world.gather(random_states(self.world.device)),
            scaler=self.scaler.state_dict(),
        )

    def load(self, path: Path | str) -> None:
        """Load a checkpoint of any number of ranks, and continue after its step."""
        state = sw.load(path, model=self.model, optimizer=self.optimizer).state
        self.step = state["run"]["step"]
        self._scheduler = build_scheduler(self.optimizer, self.config.train, after=self.step)
        random, device = state["random"], self.world.device
        if len(random) == self.world.size and len(random[0]) == len(random_states(device)):
            set_random_states(device, random[self.world.rank])
        if state["scaler"] and self.scaler.is_enabled():  # else a run of another dtype saved it
            self.scaler.load_state_dict(state["scaler"])

    def steps(self, seconds: float = 0.0) -> Iterator[StepMetrics]:
        """Train until the last step, one record a step.

        Args:
            seconds: the time that the steps before took.
        """
        config = self.config.train
        step_tokens = config.global_batch * self.config.model.context
        began = time.perf_counter() - seconds
        data = self._sequences(self.corpus.train, config.seed)
        pin_memory = self.world.device.type == "cuda"
        steps = range(self.step + 1, config.steps + 1)
        batches = iter(data.loader(steps, self.config.data.workers, pin_memory=pin_memory))
        while self.step < config.steps:
            step_began = time.perf_counter()
            lr = float(self._scheduler.get_last_lr()[0])
            self.step += 1
            with self.ledger.span("data"):
                batch = next(batches)
            try:
                done = self._step(batch)
            except BaseException as error:
                runtime_of_root(self.model).scheduler.explain(error)
                raise
            step_seconds = time.perf_counter() - step_began
            self._training_seconds += step_seconds
            self.num_trained += 1
            validates = config.validate_every and self.step % config.validate_every == 0
            is_validated = validates or self.step == config.steps
            tokens_per_second = step_tokens / step_seconds
            yield StepMetrics(
                step=self.step,
                loss=done.loss,
                grad_norm=done.grad_norm,
                lr=lr,
                loss_scale=self.scaler.get_scale() if self.scaler.is_enabled() else None,
                tokens=self.step * step_tokens,
                tokens_per_second=tokens_per_second,
                validation_loss=self.validate() if is_validated else None,
                seconds=time.perf_counter() - began,
                mfu=self._mfu(tokens_per_second),
                peak_memory_bytes=int(max(one.peak_memory_bytes for one in done.ranks)),
                free_memory_bytes=int(min(one.free_memory_bytes for one in done.ranks)),
                **({} if self._recorder is None else waits_of(done.ranks)),
            )

    def _mfu(self, tokens_per_second: float) -> float | None:
        peak = peak_flops(self.world.device, self.config.precision.compute)
        flops = flops_per_token(self.config.model, self._plan.num_parameters)
        return None if peak is None else tokens_per_second * flops / (peak * self.world.size)

    @torch.no_grad()
    def validate(self) -> float:
        """The mean loss on the validation text."""
        with self.ledger.span("validation"):
            return self._validate()

    def _validate(self) -> float:
        self.model.eval()
        num_batches = self.config.train.validation_batches
        total = torch.zeros((), device=self.world.device)
        data = self._sequences(self.corpus.validation, VALIDATION_SEED)
        for number in range(num_batches):
            for sequences in self._micro_batches(data[number]):
                total += self._loss(sequences)
        self.model.train()
        return float(across([total], self._mesh, self._mesh.world).mean()) / num_batches

    def summarize(self, records: Sequence[StepMetrics]) -> Summary:
        """Generate the sample, and gather what the ranks have measured."""
        config, world = self.config, self.world
        sample = generate(  # without sw.gathered: the whole model may not fit
            self.model,
            config.sample,
            context=config.model.context,
            seed=config.train.seed,
            device=world.device,
        )
        runtime = runtime_of_root(self.model)
        forecast = rank_footprint(runtime.plan, config, world.device.type)
        transient = max(world.gather(runtime.pools.peak_bytes))
        overlapped = sum(self._overlapped_shares) / max(1, len(self._overlapped_shares))
        last = records[-SUMMARY_STEPS:]
        validation_loss = records[-1].validation_loss
        if validation_loss is None:  # the last record is of a run with more steps
            validation_loss = self.validate()
        step_tokens = config.train.global_batch * config.model.context
        return Summary(
            loss=sum(record.loss for record in last) / len(last),
            loss_steps=len(last),
            validation_loss=validation_loss,
            tokens=records[-1].tokens,
            tokens_per_second=self.num_trained * step_tokens / max(self._training_seconds, 1e-9),
            seconds=records[-1].seconds,
            rank=replace(forecast, transient=transient),
            process=process_footprint(runtime.plan),
            resident_peaks=tuple(world.gather(peak_memory_bytes(world.device))),
            overlapped_share=sum(world.gather(overlapped)) / world.size,
            sample=sample,
        )

    def _step(self, batch: Tensor) -> _StepResult:
        """Train on ``batch``."""
        total = torch.zeros((), device=self.world.device)
        parts = self._micro_batches(batch)
        for number, sequences in enumerate(parts, start=1):
            if self.config.memory.accumulate == "whole":
                assert isinstance(self.model, sw.FSDPModule)
                self.model.set_requires_gradient_sync(number == len(parts))
            if self._recorder is not None:
                self._recorder.count_tokens(sequences[:, 1:].numel())
            with self._offloaded_activations():
                loss = self._loss(sequences)
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        norm = self._update()
        # One exchange for all that the ranks have to know of each other, so that all of them stop
        # after the same step.
        own = total.new_tensor([self.stop.number, *astuple(self._measured())])
        values = across([total, *own.unbind()], self._mesh, self._mesh.world)
        figures = [values[:, 0].mean()] + ([] if norm is None else [norm.to(total)])
        # The only wait of the step for the device.
        flat = torch.cat([torch.stack(figures), values[:, 1:].flatten()]).tolist()
        mean_loss, *norms = flat[: len(figures)]
        signals, *measured = (flat[len(figures) + i :: len(own)] for i in range(len(own)))
        self._overlapped_shares.append(self.ledger.overlapped_share())
        self.stopped_by = int(max(signals))
        grad_norm = norms[0] if norms else None
        # With a loss scale an infinite norm is a skipped step.
        ignores_norm = grad_norm is None or self.scaler.is_enabled()
        if not (math.isfinite(mean_loss) and (ignores_norm or math.isfinite(norms[0]))):
            text = f"step {self.step}: loss {mean_loss}, gradient norm {grad_norm}; "
            text += f"lower train.lr (now {self.config.train.lr}) or train.grad_clip"
            if grad_norm is not None and not math.isfinite(grad_norm):
                text += f". {describe_nonfinite(list(self.model.parameters()))}"
            raise FloatingPointError(text)
        self.optimizer.zero_grad()  # not before, as the error names gradients
        return _StepResult(mean_loss, grad_norm, list(map(RankFigures, *measured)))

    def _measured(self) -> RankFigures:
        before = self._exposed_seconds
        self._exposed_seconds = 0.0 if self._recorder is None else self._recorder.exposed_seconds
        return RankFigures.measure(self.world.device, self._exposed_seconds - before)

    def _update(self) -> Tensor | None:
        """Update the parameters; the gradient norm before clipping, if it is known."""
        norm = None
        if not self.config.memory.step_in_backward:
            self.scaler.unscale_(self.optimizer)
            max_norm = self.config.train.grad_clip or math.inf
            norm = sw.clip_grad_norm_(self.model.parameters(), max_norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        with warnings.catch_warnings():  # in float16 the first steps may be skipped
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self._scheduler.step()
        return norm

    def _offloaded_activations(self) -> AbstractContextManager[None]:
        on_host = self.config.memory.activations == "host"
        return sw.offload_activations(self.model) if on_host else nullcontext()

    def _sequences(self, text: Text, seed: int) -> Sequences:
        return Sequences(
            text=text,
            context=self.config.model.context,
            global_batch=self.config.train.global_batch,
            seed=seed,
            rank=self.world.rank,
            world_size=self.world.size,
        )

    def _micro_batches(self, batch: Tensor) -> Sequence[Tensor]:
        """int64 [micro_batch, context + 1] each, on the device."""
        batch = batch.to(self.world.device, non_blocking=True)
        return torch.split(batch, self.config.micro_batch)

    def _loss(self, sequences: Tensor) -> Tensor:
        """The mean loss of ``sequences``, weighted so that micro batches sum to the rank's mean."""
        logits = self.model(sequences[:, :-1])  # [micro_batch, context, vocabulary]
        mean = functional.cross_entropy(logits.flatten(0, 1).float(), sequences[:, 1:].flatten())
        return mean * (len(sequences) / self.config.rank_batch)

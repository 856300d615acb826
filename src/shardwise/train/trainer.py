"""The training state of one rank (model, optimizer, data), which checkpoints save and restore."""

import math
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional

import shardwise as sw
from shardwise.checkpoint.read import read_manifest
from shardwise.checkpoint.stores import folder_at
from shardwise.comm.device import random_states, set_random_states
from shardwise.comm.tree import tree_sum
from shardwise.errors import ConfigError
from shardwise.launch.stop_signal import StopSignal
from shardwise.launch.world import World
from shardwise.optim.leaves import sum_over_leaves
from shardwise.runtime.engine import Runtime
from shardwise.runtime.ledger import is_timed
from shardwise.runtime.module import runtime_of_root
from shardwise.tensor.reductions import across
from shardwise.train.build import shard_model
from shardwise.train.config import Config, to_toml
from shardwise.train.data import IGNORED, Batch, Packed, Sequences, open_corpus
from shardwise.train.documents import Documents
from shardwise.train.optimizer import build_optimizer, build_scheduler
from shardwise.train.replicas import Replicas
from shardwise.train.run_directory import identity
from shardwise.train.source import source_of
from shardwise.train.tensor_parallel import TensorRanks
from shardwise.train.text import Text
from shardwise.train.tokenizer import vocabulary_of
from shardwise.train.utilization import RankFigures, StepsOfRun, share_of_peak

__all__ = ["StepResult", "Trainer"]

# Relative changes of logits that are rounding errors, in float32 and in half precision.
_EQUAL, _NEAR = 1e-5, 5e-3
VALIDATION_SEED = 0  # the same validation sequences in every run, whatever its own seed


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step, equal on all ranks."""

    loss: float  # mean over the global batch
    grad_norm: float | None  # None if it is not known
    ranks: list[RankFigures]


@dataclass
class Best:
    """The step with the lowest validation loss so far; replicas that join take it."""

    step: int = 0
    loss: float = math.inf

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.loss = state_dict["step"], state_dict["loss"]


class Trainer:
    """The state of one rank, and the parts of a step.

    With ``memory.step_in_backward``, parameters are updated during backward, so the gradient norm
    is not known. In float16, the loss is scaled so that gradients do not underflow, and steps whose
    gradients overflow are skipped.
    """

    def __init__(self, config: Config, world: World) -> None:
        self.config = config
        self.world = world
        self.ranks = TensorRanks(config, world)
        if config.train.reproducible:
            _use_reproducible_kernels(world.device)
        self.corpus = open_corpus(config)
        world.check(self._check_same_data)
        self.source = source_of(config)
        self.model = self.source.build()
        self.share_of_peak = share_of_peak(config, world, self.model, self.source)
        with world.device:  # the device on which values are initialized
            shard_model(self.model, self.source, self.ranks)
        self.optimizer = build_optimizer(self.model, config.train)
        if config.memory.step_in_backward:
            sw.optimizer_in_backward(self.model, self.optimizer)
        self.scheduler = build_scheduler(self.optimizer, config.train)
        self.replicas = Replicas(config, world, self.model, self.optimizer)
        self.scaler = GradScaler(world.device.type, enabled=config.precision.compute == "float16")
        self.step = 0  # the last completed step
        self.stop = StopSignal()
        self.stopped_by = 0  # number of the signal after which all ranks stop; 0 if none
        self.ends_early = False  # set by a callback, on all ranks
        self.best = Best()
        self.replicas.register("best", self.best)
        self.step_seconds: list[float] = []  # steps of this process, without validation
        self.overlapped_shares: list[float] = []  # overlapped share of the gather time, by step
        self.recorder: sw.Recorder | None = None
        self._exposed = 0.0, 0  # seconds in all steps that were timed, and their number

    def _check_same_data(self) -> None:
        """Raise a ConfigError if this rank's host has other files than that of rank 0."""
        first = self.world.gather(self.corpus.outline)[0]
        if self.corpus.outline != first:
            raise ConfigError(
                f"data.path={self.config.data.path!r}: has {len(self.corpus.train)} "
                f"{self.corpus.unit}s to train on, but {first[0]} on rank 0, or others; copy the "
                "same files, with the same tokenizer, to all hosts"
            )

    @property
    def runtime(self) -> Runtime:
        return runtime_of_root(self.model)

    @property
    def is_done(self) -> bool:
        """Whether training ends: at the last step, after a signal, or without progress."""
        is_over = self.config.train.is_over(self.step, self.best.step)
        return is_over or self.ends_early or self.stopped_by > 0

    @contextmanager
    def recorded(self, directory: Path) -> Iterator[None]:
        """Record the run in ``directory``, if [record] is enabled."""
        options = self.config.record
        if not options.enabled:
            yield
            return
        steps = StepsOfRun(options.steps, self.step + 1, self.config.num_micro_batches)
        place = directory if self.ranks.index == 0 else directory / f"tensor-{self.ranks.index}"
        with sw.record(self.model, place, steps=steps, optimizer=self.optimizer) as self.recorder:
            yield

    # -- replicas --------------------------------------------------------------------------------

    def adopt_step(self) -> bool:
        """Set the step to that of the other replicas; return whether it has changed."""
        step = self.replicas.step_of(self.step)
        if step == self.step:
            return False
        self.step = step
        self.scheduler = build_scheduler(self.optimizer, self.config.train, after=self.step)
        return True

    # -- checkpoints -----------------------------------------------------------------------------

    def save(self, path: Path | str, *, keep: int | None = None) -> sw.Save:
        """Save model, optimizer, step, configuration and random states.

        The position in the data is not saved, because it follows from the seed and the step.
        ``keep`` checkpoints are kept, including this one; None: ``checkpoint.keep``.
        """
        options = self.config.checkpoint
        outer: dict[str, Any] = {}
        if self.replicas.outer is not None:
            outer = {"outer": self.replicas.outer}
        with self.runtime.scheduler.ledger.span("checkpoint"):
            return sw.save(
                path,
                model=self.model,
                optimizer=self.optimizer,
                wait=options.wait,
                retention=sw.Retention(last=keep or options.keep),
                run={
                    "step": self.step,
                    "shared": identity(self.config, self.corpus),
                    "best": [self.best.step, self.best.loss],
                },
                config=to_toml(self.config),
                random=self.world.gather(random_states(self.world.device)),
                scaler=self.scaler.state_dict(),
                **outer,
            )

    def load(self, path: Path | str) -> None:
        """Load a checkpoint from any number of ranks, and continue after its step."""
        has_outer = "outer" in read_manifest(folder_at(path)).components
        outer = self.replicas.outer if has_outer else None
        state = sw.load(path, model=self.model, optimizer=self.optimizer, outer=outer).state
        self.step = state["run"]["step"]
        self.replicas.continue_after(self.step, has_outer=has_outer)
        self.best.step, self.best.loss = state["run"].get("best", (0, math.inf))
        self.scheduler = build_scheduler(self.optimizer, self.config.train, after=self.step)
        random, device = state["random"], self.world.device
        if len(random) == self.world.size and len(random[0]) == len(random_states(device)):
            # Ranks that divide layers draw the same numbers, also if the saved run did not divide.
            set_random_states(device, random[self.world.rank - self.ranks.index])
        if state["scaler"] and self.scaler.is_enabled():  # the saved run may have another dtype
            self.scaler.load_state_dict(state["scaler"])

    # -- data ------------------------------------------------------------------------------------

    def batches(self) -> Iterator[Batch]:
        """This rank's batches of the remaining steps."""
        replicas = self.config.replicas
        data = self._sequences(
            self.corpus.train,
            self.config.train.seed,
            first=replicas.number * self.ranks.num_data_ranks,
            replicas=replicas.count,
        )
        steps = range(self.step + 1, self.config.train.steps + 1)
        pin_memory = self.world.device.type == "cuda"
        return iter(data.loader(steps, self.config.data.workers, pin_memory=pin_memory))

    def _sequences(
        self, data: Text | Documents, seed: int, *, first: int = 0, replicas: int = 1
    ) -> Sequences:
        """The sequences of this rank, which follows ``first`` ranks of other replicas."""
        return (Packed if isinstance(data, Documents) else Sequences)(
            text=data,
            context=self.config.model.context,
            global_batch=self.config.train.global_batch,
            seed=seed,
            rank=self.ranks.data_rank + first,
            world_size=self.ranks.num_data_ranks * replicas,
        )

    def micro_batches(self, batch: Batch) -> list[Batch]:
        """Split ``batch`` into micro-batches on the device, [micro_batch, context] each."""
        size, device = self.config.micro_batch, self.world.device
        given = (x.to(device, non_blocking=True) for x in batch if x is not None)
        parts = zip(*(torch.split(x, size) for x in given), strict=True)
        return [Batch(*part) for part in parts]

    def weight_of(self, batch: Batch) -> float:
        """The factor that makes the mean of loss sums the mean over all targets.

        It is a mean over ranks or, in a reproducible run, over all micro-batches.
        """
        if batch.positions is None:  # every target counts
            return max(1, len(self.runtime.mesh.own_leaves)) / batch.targets.numel()
        return sw.token_weight(self.model, int((batch.targets != IGNORED).sum()))

    @torch.no_grad()
    def separates_documents(self) -> bool:
        """Whether the model keeps the documents of a sequence apart, found by two forwards.

        The second has another first document; the logits of the other document must not change.
        Many models of transformers derive their masks from positions; others ignore them, or carry
        a state over.
        """
        size = min(self.config.model.context, 64)
        half, generator = size // 2, torch.Generator().manual_seed(0)
        tokens = torch.randint(vocabulary_of(self.config), (2, size), generator=generator)
        tokens[1, half:] = tokens[0, half:]
        positions = torch.cat([torch.arange(half), torch.arange(size - half)])[None]
        on_device = [x.to(self.world.device) for x in (tokens[:1], tokens[1:], positions)]
        self.model.eval()
        # The size is not that of training, for which blocks will be compiled.
        compiles = self.config.train.compile
        with torch.compiler.set_stance("force_eager") if compiles else nullcontext():
            one, other = (
                self.source.logits(self.model, row, on_device[-1])[0, half:].float()
                for row in on_device[:-1]
            )
        self.model.train()
        change = ((one - other).norm(dim=1) / one.norm(dim=1)).median().nan_to_num()
        # Sums of experts may round in another way if they get other tokens.
        return float(change) < (_EQUAL if self.config.precision.compute == "float32" else _NEAR)

    # -- a step ----------------------------------------------------------------------------------

    def loss_sum(self, part: Batch) -> Tensor:
        logits = self.source.logits(self.model, part.inputs, part.positions)
        return functional.cross_entropy(  # [micro_batch, context, vocabulary]
            logits.flatten(0, 1).float(),
            part.targets.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )

    def random_numbers_of(self, number: int) -> AbstractContextManager[None]:
        """Seed the generators for this rank's ``number``-th micro-batch of a reproducible run."""
        leaves = self.runtime.mesh.own_leaves
        if not leaves:
            return nullcontext()
        return sw.leaf_rng(self.config.train.seed, self.step, leaves[number])

    def offloaded_activations(self) -> AbstractContextManager[None]:
        """Keep activations in host memory until backward, if [memory] sets it."""
        on_host = self.config.memory.activations == "host"
        return sw.offload_activations(self.model) if on_host else nullcontext()

    def update(self) -> Tensor | None:
        """Update the parameters; return the gradient norm before clipping, if it is known."""
        norm = None
        if not self.config.memory.step_in_backward:
            self.ranks.check_gradients(self.model)
            self.scaler.unscale_(self.optimizer)
            max_norm = self.config.train.grad_clip or math.inf
            norm = sw.clip_grad_norm_(self.model.parameters(), max_norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        with warnings.catch_warnings():  # in float16 the first steps may be skipped
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.scheduler.step()
        return norm

    def exchange(self, loss: Tensor, norm: Tensor | None) -> StepResult:
        """Exchange loss, figures and stop signals, so that all ranks stop after the same step."""
        (seconds, num_steps), recorder = self._exposed, self.recorder
        if recorder is not None:
            self._exposed = recorder.exposed_seconds, recorder.num_timed_steps
        is_known = recorder is None or self._exposed[1] > num_steps
        exposed = self._exposed[0] - seconds if is_known else math.nan
        measured = RankFigures.measure(self.world.device, exposed)
        own = loss.new_tensor([self.stop.number, *astuple(measured)])
        mesh, norms = self.runtime.mesh, [] if norm is None else [norm.to(loss)]
        values = across([loss, *own.unbind(), *norms], mesh, mesh.in_order)  # [data ranks, values]
        values[:, 0] = tree_sum(values[:, 0]) / mesh.num_addends
        values = self.ranks.gather(values)  # [ranks, values]
        rows = values.tolist()  # the only point of a step where the host waits for the device
        ledger = self.runtime.scheduler.ledger
        if is_timed(ledger.records()):
            self.overlapped_shares.append(ledger.overlapped_share())
        self.stopped_by = int(max(signal for _, signal, *_ in rows))
        ranks = [RankFigures(*row[2 : 1 + len(own)]) for row in rows]
        return StepResult(rows[0][0], rows[0][-1] if norms else None, ranks)

    # -- validation ------------------------------------------------------------------------------

    def validate(self) -> float:
        """Return the mean loss on the validation text, and record the step with the lowest one."""
        with self.runtime.scheduler.ledger.span("validation"), torch.no_grad():
            loss = self._validate()
        if loss < self.best.loss:
            self.best.step, self.best.loss = self.step, loss
        return loss

    def _validate(self) -> float:
        self.model.eval()
        data = self._sequences(self.corpus.validation, VALIDATION_SEED)
        # By micro-batch, of which each replica computes all: sum of losses, number of targets.
        num_parts = -(-data.global_batch // data.world_size // self.config.micro_batch)
        totals = torch.zeros(num_parts, 2, device=self.world.device)
        num_batches = self.config.train.validation_batches
        if num_batches >= data.num_batches:  # else some sequences would count more than others
            num_batches = 0
        for number in range(num_batches or data.num_batches):
            batch = data[number + 1] if num_batches else data.in_order(number)
            for total, part in zip(totals, self.micro_batches(batch), strict=True):
                total[0] += self.loss_sum(part)
                total[1] += (part.targets != IGNORED).sum()
        self.model.train()
        losses, count = sum_over_leaves(totals.unbind(), self.runtime.mesh).tolist()
        return float(losses / max(count, 1))


def _use_reproducible_kernels(device: torch.device) -> None:
    """Have torch compute the same results in every run."""
    torch.set_num_threads(1)  # results of the CPU depend on the number
    if device.type != "cpu":
        # Torch refuses matrix products without it. cuBLAS reads it at the first of them.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)

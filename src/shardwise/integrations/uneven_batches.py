"""Ranks with unequal numbers of batches in transformers' `Trainer`.

The loop of the `Trainer` stays the same on all ranks, with its clipping, steps, logs, callbacks and
checkpoints. Only the forwards and backwards of a step in which ranks have different numbers of
batches run inside `sw.join`::

    rank 0    batch 0   batch 1      clip   step   log
    rank 1    batch 0   (shadow)     clip   step   log
              '--- sw.join ----'

In an evaluation, a rank that has run out computes a batch again, and the results are left out.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from accelerate.data_loader import DataLoaderDispatcher, IterableDatasetShard
from accelerate.utils import broadcast_object_list, recursively_apply
from torch import Tensor
from transformers.trainer_pt_utils import find_batch_size

from shardwise.errors import PlanError
from shardwise.features.fsdp_module import FSDPModule
from shardwise.optim.join import join
from shardwise.runtime.module import runtime_of_root
from shardwise.tensor.reductions import across

__all__ = ["EpochBegins", "UnevenBatches"]


class UnevenBatches:
    """A mix-in for a `Trainer` whose ranks may have unequal numbers of batches.

    Its attributes have names of their own, as trainers of other libraries have many (``_step``).
    """

    _uneven_differs = False  # whether ranks may have different numbers of batches in training
    _uneven_epoch_ended = False  # on all ranks
    _uneven_step: "_Step | None" = None  # in which ranks have different numbers of batches
    _uneven_sizes: Sequence[int] = ()  # samples of each rank in a batch of an evaluation

    # -- training --------------------------------------------------------------------------------

    def set_initial_training_values(self, args: Any, dataloader: Any, *rest: Any) -> Any:
        """As in `transformers.Trainer`, with the number of batches of the longest rank."""
        trainer: Any = super()
        self._uneven_differs = _may_differ(self, dataloader)
        if self._uneven_differs and (length := _length(dataloader)) is not None:
            lengths = _across(self, length)
            sampler = getattr(dataloader, "batch_sampler", None)
            splits = getattr(sampler, "split_batches", False)  # its length is that of all ranks
            self._uneven_differs = len(set(lengths)) > 1 or splits
            if self._uneven_differs:
                _check_follows(self)
            # The loop of older versions, which pass more, ignores what is returned.
            if rest and len(set(lengths)) > 1:
                raise PlanError(
                    f"ranks have {lengths} batches, but the Trainer of transformers "
                    f"{transformers.__version__} counts the steps of an epoch on each rank alone; "
                    "update transformers, or set even_batches in accelerator_config"
                )
            dataloader = _OfLength(dataloader, max(lengths))
        return trainer.set_initial_training_values(args, dataloader, *rest)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The batches of a step, and the number of items in those of all ranks.

        Ranks with fewer batches than others get empty ones.
        """
        trainer: Any = super()
        self._uneven_step = None
        if not self._uneven_differs:
            found: tuple[list[Any], Any] = trainer.get_batch_samples(
                epoch_iterator, num_batches, device
            )
            return found
        if self._uneven_epoch_ended:
            return [], None
        this: Any = self
        args = this.args
        averages, args.average_tokens_across_devices = args.average_tokens_across_devices, False
        try:  # only the items of this rank: ranks without batches count none
            own, num_items = trainer.get_batch_samples(epoch_iterator, num_batches, device)
        finally:
            args.average_tokens_across_devices = averages
        main_input = getattr(this.model, "main_input_name", "input_ids")
        counted = any(main_input in batch for batch in own[:1])  # the ranks gather its size
        rows = _rows(self, len(own), counted, num_items is not None, num_items or 0)
        nums = [int(row[0]) for row in rows]
        if not any(nums):
            self._uneven_epoch_ended = True
            return [], None
        scale = len(nums) / sum(num > 0 for num in nums)
        if averages and any(row[2] for row in rows):
            num_items = torch.tensor(sum(row[3] for row in rows), device=device)
            if len(set(nums)) > 1:  # `sw.join` averages over the ranks that compute
                num_items = num_items.double() * scale
        if len(set(nums)) > 1:
            _check_follows(self)
            self._uneven_step = _Step(own, max(nums), scale)
        empty = {main_input: torch.zeros(0)} if any(row[1] for row in rows) else {}
        return own + [empty] * (max(nums) - len(own)), num_items

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As in `transformers.Trainer`.

        If ranks have different numbers of batches, the last call of a step computes all of them.
        """
        trainer: Any = super()
        this: Any = self
        step, zero = self._uneven_step, torch.zeros((), device=this.args.device)
        if step is None:
            loss: Tensor = trainer.training_step(model, inputs, num_items_in_batch)
            return loss
        step.remaining -= 1
        if step.remaining:
            return zero
        self._uneven_step, sharded = None, this.model
        self.current_gradient_accumulation_steps = len(step.batches)
        losses = [zero]
        if not step.batches:  # what the step of a batch would do
            model.train()
            if callable(getattr(this.optimizer, "train", None)):
                this.optimizer.train()
            if this.accelerator.scaler is not None:
                this.accelerator.scaler.scale(zero)  # creates its scale
        with join(sharded):
            try:
                for number, batch in enumerate(step.batches, start=1):
                    sharded.set_requires_gradient_sync(number == len(step.batches))
                    losses.append(trainer.training_step(model, batch, num_items_in_batch))
            finally:
                sharded.set_requires_gradient_sync(True)
        return torch.stack([loss.to(losses[-1]) for loss in losses]).sum() * step.scale

    # -- evaluation ------------------------------------------------------------------------------

    def evaluation_loop(self, dataloader: Any, *args: Any, **options: Any) -> Any:
        """As in `transformers.Trainer`, where ranks may have different numbers of batches."""
        trainer: Any = super()
        this: Any = self
        if not _may_differ(self, dataloader):
            return trainer.evaluation_loop(dataloader, *args, **options)
        names = ("batch_eval_metrics", "eval_use_gather_object")
        needs_even = next((name for name in names if getattr(this.args, name)), None)
        averages = this.args.average_tokens_across_devices
        this.args.average_tokens_across_devices = False  # a loss is the mean over its own batch
        if needs_even is None:
            this.gather_function = self._uneven_gather
        batches = _EvenedOut(dataloader, self, needs_even)
        try:
            return trainer.evaluation_loop(batches, *args, **options)
        finally:
            this.args.average_tokens_across_devices = averages
            this.gather_function = this.accelerator.gather_for_metrics

    def _uneven_gather(self, data: Any) -> Any:
        """Gather what all ranks computed; a rank without a batch has nothing."""
        this: Any = self
        accelerator, repeated = this.accelerator, this.args.eval_batch_size
        size = self._uneven_sizes[accelerator.process_index]

        def gather(own: Tensor) -> Tensor:
            if own.dim() == 0:
                own = own[None]
            if own.shape == (repeated,) != (size,):  # the loss, which counts once per sample
                own = own[:1].expand(size)
            if not size:  # otherwise all: the rows may be other things than samples
                own = own[:0]
            lengths = _across(self, len(own))
            padded = own.new_zeros(max(lengths), *own.shape[1:])
            padded[: len(own)] = own
            parts = accelerator.gather(padded).tensor_split(len(lengths))
            return torch.cat([part[:n] for part, n in zip(parts, lengths, strict=True)])

        return recursively_apply(gather, data)


class EpochBegins(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self, trainer: UnevenBatches) -> None:
        self._trainer = trainer

    def on_epoch_begin(self, *_: Any, **_options: Any) -> None:
        self._trainer._uneven_epoch_ended = False


class _Step:
    """The batches of a step in which ranks have different numbers of them."""

    def __init__(self, batches: list[Any], longest: int, scale: float) -> None:
        self.batches = batches  # of this rank
        self.remaining = longest  # calls of `training_step`
        self.scale = scale  # all ranks / ranks with batches: logs are means over all ranks


class _OfLength:
    def __init__(self, loader: Any, length: int | None) -> None:
        self._loader = loader
        self._num_batches = length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        if self._num_batches is None:
            raise TypeError("the data loader has no length")
        return self._num_batches


class _EvenedOut(_OfLength):
    """The batches of an evaluation; a rank that has run out repeats one."""

    def __init__(self, loader: Any, trainer: UnevenBatches, needs_even: str | None) -> None:
        length = _length(loader)
        super().__init__(loader, None if length is None else max(_across(trainer, length)))
        self._trainer = trainer
        self._needs_even = needs_even  # an option that works only with batches of equal sizes

    def __iter__(self) -> Iterator[Any]:
        batches, last = iter(self._loader), None
        for number in itertools.count():
            batch = next(batches, None)
            size = 0 if batch is None else find_batch_size(batch) or 1
            self._trainer._uneven_sizes = sizes = _across(self._trainer, size)
            if not any(sizes):
                return
            if self._needs_even and len(set(sizes)) > 1:
                raise PlanError(
                    f"{self._needs_even} does not work if ranks have batches of different sizes, "
                    f"here {sizes}; set even_batches in accelerator_config, and pass a loader of "
                    "your own to accelerator.prepare"
                )
            if number == 0 and not all(sizes):  # for ranks without any batch
                shared = [batch]
                broadcast_object_list(shared, next(r for r, size in enumerate(sizes) if size))
                last = shared[0]
            last = last if batch is None else batch
            yield last


def _may_differ(trainer: Any, loader: Any) -> bool:
    """Whether ranks may get different numbers of batches, or of samples in them."""
    if trainer.accelerator.num_processes == 1 or not isinstance(trainer.model, FSDPModule):
        return False
    repeats = isinstance(loader, DataLoaderDispatcher) or isinstance(
        getattr(loader, "dataset", None), IterableDatasetShard
    )
    sampler = getattr(loader, "batch_sampler", None)
    return not (repeats or getattr(sampler, "even_batches", False))


def _check_follows(trainer: Any) -> None:
    """Raise a PlanError if the forwards of ``trainer`` have collectives of their own."""
    for kind in type(trainer).__mro__:
        if kind.__module__.split(".")[0] == "trl":
            raise PlanError(
                f"{kind.__name__} of TRL gathers metrics in each forward, also from ranks without "
                "a batch, which would wait for ever; give all ranks as many batches (even_batches "
                "in accelerator_config)"
            )


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (NameError, TypeError):
        return None


def _across(trainer: Any, number: int) -> list[int]:
    return [int(own) for [own] in _rows(trainer, number)]


def _rows(trainer: Any, *numbers: float) -> list[list[float]]:
    runtime = runtime_of_root(trainer.model)
    own = torch.tensor([float(one) for one in numbers], dtype=torch.float64, device="cpu")
    values = own.to(runtime.pools.device).unbind()
    rows: list[list[float]] = across(values, runtime.mesh, runtime.mesh.world).tolist()
    return rows

"""transformers' `Trainer` on ranks with unequal numbers of batches equals one process."""

import random
from collections.abc import Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainingArguments

import shardwise as sw
from shardwise.integrations.accelerate import Accelerator
from shardwise.integrations.transformers import Trainer
from shardwise.integrations.uneven_batches import UnevenBatches
from tests.models import WIDTH, Block
from tests.ranks import on_ranks
from tests.runtime.one_process import adamw, assert_equal_models, options_of, rank, world_size
from tests.torchrun import torchrun_environment

Sample = dict[str, Tensor]
Batches = list[list[list[Sample]]]  # of every rank: its batches
CLASSES = 5


class Means(nn.Module):
    """Its loss is the mean over a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return self.run(input_ids, labels, None)

    def run(self, tokens: Tensor, labels: Tensor, num_items: Any) -> dict[str, Tensor]:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        count = (labels != -100).sum() if num_items is None else num_items
        return {"loss": total / count, "logits": logits}


class Tokens(Means):
    """Its loss is the mean over all tokens of a step."""

    def forward(self, input_ids: Tensor, labels: Tensor, **options: Any) -> dict[str, Tensor]:
        return self.run(input_ids, labels, options.get("num_items_in_batch"))


def build(kind: type[Means]) -> Means:
    torch.manual_seed(0)
    return kind().double()


def samples(count: int) -> list[Sample]:
    tokens = torch.randint(CLASSES, (count, 4))
    labels = tokens.roll(1).where(torch.rand(count, 4) < 0.8, -100)
    labels[:, 0] = 0
    return [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]


def stacked(batch: list[Sample]) -> Sample:
    return {key: torch.stack([one[key] for one in batch]) for key in batch[0]}


class Unsized(IterableDataset[Sample]):
    def __init__(self, batches: list[list[Sample]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(map(stacked, self.batches))


class Again:
    """A loader that is its own iterator, as those of persistent workers are."""

    def __init__(self, batches: list[list[Sample]]) -> None:
        self.batches = batches

    def __iter__(self) -> "Again":
        self.rest = iter(map(stacked, self.batches))
        return self

    def __next__(self) -> Any:
        return next(self.rest)


class OfIterables(Trainer):
    """Each rank reads data of its own, whose length is not known."""

    own: list[list[Sample]]
    again = False

    def get_train_dataloader(self) -> Any:
        return Again(self.own) if self.again else DataLoader(Unsized(self.own), batch_size=None)

    def get_eval_dataloader(self, *_: Any) -> DataLoader[Sample]:
        return DataLoader(Unsized(self.own), batch_size=None)


def dealt(data: list[Sample], batch: int) -> Batches:
    """As accelerate distributes batches."""
    every = [data[start : start + batch] for start in range(0, len(data), batch)]
    return [every[number :: world_size()] for number in range(world_size())]


def train_alone(
    model: Means, batches: Batches, epochs: int, accumulated: int, *, divides_by_own: bool = True
) -> list[dict[str, float]]:
    """Train in one process on the batches of all ranks.

    ``divides_by_own``: losses are divided by the number of batches of a rank in a step, as the
    `Trainer` does, and not by ``accumulated``, as accelerate does.
    """
    longest = max(map(len, batches))
    num_steps = epochs * -(-longest // accumulated)
    optimizer = adamw(model.parameters())
    scheduler = transformers.get_scheduler("linear", optimizer, 0, num_steps)
    history = []
    for _ in range(epochs):
        for start in range(0, longest, accumulated):
            steps = (own[start : start + accumulated] for own in batches)
            parts = [[stacked(batch) for batch in own] for own in steps if own]
            if isinstance(model, Tokens):
                num_items = sum((one["labels"] != -100).sum() for own in parts for one in own)
                losses = [
                    model(**one, num_items_in_batch=num_items)["loss"]
                    for own in parts
                    for one in own
                ]
                loss = torch.stack(losses).sum()
            else:
                means = [
                    torch.stack([model(**one)["loss"] for one in own]).sum()
                    / (len(own) if divides_by_own else accumulated)
                    for own in parts
                ]
                loss = torch.stack(means).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            history.append({"loss": float(loss), "grad_norm": float(norm)})
            history[-1]["learning_rate"] = scheduler.get_last_lr()[0]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return history


def trainer_of(
    kind: type[Means],
    strategy: str,
    path: Path,
    data: list[Sample],
    iterable: Batches | None = None,
    **options: Any,
) -> Any:
    model = sw.fully_shard(build(kind), units=Block, **options_of(strategy))
    arguments = TrainingArguments(
        output_dir=str(path),
        use_cpu=True,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        accelerator_config={"even_batches": False, **options.pop("accelerator_config", {})},
        train_sampling_strategy="sequential",
        lr_scheduler_type="linear",
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="no",
        include_num_input_tokens_seen="all",
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    trainer: Any = (Trainer if iterable is None else OfIterables)(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data,
        optimizers=(adamw(model.parameters()), None),
    )
    if iterable is not None:
        trainer.own = iterable[rank()]
    return trainer


ROWS = [
    (2, Tokens, 3, "fsdp", 9, False),
    (3, Means, 2, "zero2", 7, False),
    (2, Means, 1, "ddp", 3, True),
    (3, Tokens, 1, "fsdp", 2, False),
    (4, Tokens, 2, "hsdp", 11, True),
    (4, Means, 3, "hfsdp", 33, False),
    (3, Tokens, 4, "zero1", 25, True),
]


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "kind", "accumulated", "strategy", "count", "is_iterable"),
    [
        row if number < 3 else pytest.param(*row, marks=pytest.mark.thorough)
        for number, row in enumerate(ROWS)
    ],
)
def test_training(
    tmp_path: Path,
    kind: type[Means],
    accumulated: int,
    strategy: str,
    count: int,
    is_iterable: bool,
) -> None:
    torch.manual_seed(count)
    data = samples(count)
    batches = dealt(data, 2)
    if is_iterable:  # in sizes of their own
        numbers = random.Random(count)
        batches = [
            [samples(numbers.randint(1, 3)) for _ in own[: 4 - r]] for r, own in enumerate(batches)
        ]
    alone = build(kind)
    epochs = 2
    expected = train_alone(alone, batches, epochs, accumulated)
    options: dict[str, Any] = {"num_train_epochs": epochs}
    if is_iterable:
        options = {"max_steps": len(expected)}
    with torchrun_environment():
        trainer = trainer_of(
            kind,
            strategy,
            tmp_path,
            data,
            batches if is_iterable else None,
            gradient_accumulation_steps=accumulated,
            **options,
        )
        trainer.train()
    assert_equal_models(trainer.model, alone, 0)
    found = [line for line in trainer.state.log_history if "loss" in line]
    for line, other in zip_longest(found, expected):
        assert {key: line[key] for key in other} == pytest.approx(other, rel=1e-6)
    num_tokens = sum(one["input_ids"].numel() for own in batches for b in own for one in b)
    assert trainer.state.num_input_tokens_seen == epochs * num_tokens


@on_ranks(2, 3)
@pytest.mark.parametrize(("kind", "count"), [(Tokens, 7), (Means, 2)])
@pytest.mark.parametrize("is_iterable", [False, True])
def test_evaluation(tmp_path: Path, kind: type[Means], count: int, is_iterable: bool) -> None:
    torch.manual_seed(count)
    data = samples(count)
    alone, batches = build(kind), dealt(data, 2)
    every = [stacked(batch) for batch in chain(*zip_longest(*batches)) if batch is not None]
    with torch.no_grad():
        outputs = [alone(**batch) for batch in every]
    sizes = [len(batch["labels"]) for batch in every]
    loss = sum(float(out["loss"]) * n for out, n in zip(outputs, sizes, strict=True)) / sum(sizes)
    with torchrun_environment():
        trainer = trainer_of(kind, "fsdp", tmp_path, data, batches if is_iterable else None)
        for _ in range(2):
            assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-10)
        if not is_iterable:
            found = trainer.predict(data)
            expected = torch.cat([out["logits"] for out in outputs])
            torch.testing.assert_close(torch.from_numpy(found.predictions), expected)
            labels = torch.cat([one["labels"] for one in every])
            assert torch.equal(torch.from_numpy(found.label_ids), labels)
        trainer.args.batch_eval_metrics = True
        with pytest.raises(sw.PlanError, match="even_batches"):
            trainer.evaluate()


class Outputs(Means):
    """Also returns two rows for each sample, and a number for each batch."""

    def forward(self, input_ids: Tensor, labels: Tensor, names: Any = None) -> dict[str, Tensor]:
        del names
        found = self.run(input_ids, labels, None)
        return found | {"rows": found["logits"].repeat_interleave(2, 0), "number": found["loss"]}


@on_ranks(2)
@pytest.mark.parametrize("numbers", [[[3, 1], [4]], [[3, 1], [3, 1]]])
def test_evaluation_in_batches_of_other_sizes(tmp_path: Path, numbers: list[list[int]]) -> None:
    """Than ``per_device_eval_batch_size``; without a difference, every option works."""
    torch.manual_seed(0)
    batches = [[samples(size) for size in sizes] for sizes in numbers]
    alone = build(Outputs)
    every = [batch for both in zip_longest(*batches) for batch in both if batch is not None]
    with torch.no_grad():
        outputs = [alone(**stacked(batch)) for batch in every]
    losses = [float(out["loss"]) for out in outputs for _ in range(len(out["logits"]))]
    seen: list[Any] = []
    with torchrun_environment():
        trainer = trainer_of(Outputs, "fsdp", tmp_path, [], batches)

        def keep(found: Any, **_: Any) -> dict[str, float]:
            seen.append(found.predictions)
            return {}

        trainer.compute_metrics = keep
        own = [{"names": ["not", "tensors"]} | stacked(batch) for batch in trainer.own]
        trainer.get_eval_dataloader = lambda *_: own
        assert trainer.evaluate()["eval_loss"] == pytest.approx(sum(losses) / 8, rel=1e-10)
        for key, rows in zip(("logits", "rows", "number"), seen[0], strict=True):
            expected = torch.cat([out[key].reshape(-1, *out[key].shape[1:]) for out in outputs])
            torch.testing.assert_close(torch.from_numpy(rows), expected)
        trainer.args.batch_eval_metrics = True
        if numbers[0] == numbers[1]:
            trainer.evaluate()
        else:
            with pytest.raises(sw.PlanError, match=r"batch_eval_metrics .* sizes, here \[3, 4\]"):
                trainer.evaluate()


@on_ranks(2)
@pytest.mark.parametrize("case", ["split", "same iterator", "main input", "scaler"])
def test_training_with(tmp_path: Path, case: str) -> None:
    """Ranks stay together: rank 1 has no batch in the last step of an epoch, or none at all."""
    torch.manual_seed(0)
    count, batch, epochs = (2, 2, 1) if case == "scaler" else (3, 1, 2)
    data = samples(count)
    batches, alone = dealt(data, batch), build(Means)
    expected = train_alone(alone, batches, epochs, 1)
    own = None if case in ("split", "scaler") else batches
    options: dict[str, Any] = {"num_train_epochs": epochs, "max_steps": len(expected)}
    if case == "split":
        options = {"num_train_epochs": epochs, "accelerator_config": {"split_batches": True}}
    with torchrun_environment():
        trainer = trainer_of(Means, "fsdp", tmp_path, data, own, **options)
        if case == "same iterator":
            trainer.again = True
        elif case == "main input":
            trainer.model.main_input_name = "of another model"
        elif case == "scaler":
            trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
            trainer.accelerator.unscale_gradients = lambda *_: trainer.accelerator.scaler.unscale_(
                trainer.optimizer.optimizer
            )
            trainer.model.eval()
        trainer.train()
    assert trainer.model.training
    assert trainer.state.global_step == len(expected)
    assert_equal_models(trainer.model, alone, 0)
    if case == "main input":
        assert trainer.state.num_input_tokens_seen == 0


@on_ranks(2)
@pytest.mark.parametrize("is_iterable", [False, True])
def test_trainers_of_trl_are_refused(tmp_path: Path, is_iterable: bool) -> None:
    """Their forwards gather metrics from all ranks."""
    data = samples(2)
    batches = dealt(data, 2) if is_iterable else None
    with torchrun_environment(), pytest.MonkeyPatch.context() as patch:
        trainer = trainer_of(Means, "fsdp", tmp_path, data, batches, max_steps=1)
        patch.setattr(type(trainer), "__module__", "trl.trainer")
        with pytest.raises(sw.PlanError, match="of TRL gathers metrics"):
            trainer.train()


@on_ranks(2)
def test_older_versions_are_refused(tmp_path: Path) -> None:
    with torchrun_environment():
        trainer = trainer_of(Means, "fsdp", tmp_path, samples(5))
        loader = trainer.get_train_dataloader()
        with pytest.raises(sw.PlanError, match=r"ranks have \[2, 1\] batches, .* update trans"):
            trainer.set_initial_training_values(trainer.args, loader, 4)


@on_ranks(2, 3)
@pytest.mark.parametrize("count", [6, 17])
def test_accelerate(count: int) -> None:
    """`join_uneven_inputs`, with accumulation over two batches, clipping and a schedule."""
    torch.manual_seed(count)
    data = samples(count)
    alone, batches = build(Means), dealt(data, 2)
    expected = train_alone(alone, batches, 1, 2, divides_by_own=False)
    with torchrun_environment():
        accelerator = Accelerator(
            cpu=True, fully_shard={"units": Block}, gradient_accumulation_steps=2
        )
        model = build(Means)
        optimizer = adamw(model.parameters())
        schedule = transformers.get_scheduler("linear", optimizer, 0, len(expected) * world_size())
        loader: Any = DataLoader(data, batch_size=2, collate_fn=stacked)  # type: ignore[arg-type]
        model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
        norms = []
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch)["loss"])
                    if accelerator.sync_gradients:
                        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
        assert loader.batch_sampler.even_batches
        others = iter([model, optimizer])
        with (
            pytest.raises(sw.PlanError, match="AcceleratedOptimizer cannot be joined"),
            accelerator.join_uneven_inputs(others, even_batches=False),
        ):
            pass
        accelerator.prepare(DataLoader(Unsized([]), batch_size=None))
        with (
            pytest.warns(UserWarning, match="without a setting for even_batches"),
            accelerator.join_uneven_inputs(iter([model]), even_batches=False),
        ):
            pass
    assert_equal_models(model, alone, 0)
    assert schedule.scheduler.last_epoch == len(expected) * world_size()
    if rank() == 0:
        assert norms == pytest.approx([line["grad_norm"] for line in expected], rel=1e-10)


def test_private_attributes_have_names_that_no_other_trainer_uses() -> None:
    """TRL's GRPOTrainer counts in ``_step``."""
    own = [name for name in vars(UnevenBatches) if not name.startswith("__")]
    assert all(name.startswith("_uneven") or hasattr(transformers.Trainer, name) for name in own)

"""Units that are called outside of their model's forward, as heads are for chunks of a loss."""

import copy
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.schedule.events import EventKind
from tests.covering import covered_first
from tests.models import WIDTH, Block
from tests.ranks import on_ranks
from tests.runtime.one_process import (
    BATCH,
    adamw,
    assert_equal_models,
    mean_over_ranks,
    options_of,
    own_part,
)

WORDS, LENGTH, CHUNKS = 11, 6, 3


class Middle(nn.Module):
    """A unit around the head; it also holds a weight that only its own modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS)
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.last.weight = self.norm.weight

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.last(self.norm(x)))
        return logits


class Tied(nn.Module):
    """Its head has the weight of its embedding, so the root holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.out = Middle()
        self.out.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.penalty = torch.zeros(())

    def forward(self, tokens: Tensor, reentrant: bool | None = None) -> Tensor:
        """Run the head, too, under a checkpoint, if ``reentrant`` says of which kind."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        self.penalty = x.square().mean()  # a head that is called alone must not be taken for it
        scaled: Tensor = self.scale * x
        if reentrant is not None:
            logits: Tensor = checkpoint(self.out, scaled, use_reentrant=reentrant)
            return logits
        return scaled


def backward(model: Any, tokens: Tensor, reentrant: bool | None = None) -> Tensor:
    """Run a forward without the head, and the head on chunks, each with its own backward."""
    hidden: Tensor = model(tokens)
    gradients: list[Any] = []
    total: Tensor = torch.zeros(()).double()
    for chunk in hidden.detach().chunk(CHUNKS, dim=1):
        chunk.requires_grad_()
        head = model.out if len(gradients) % 2 else model.out.head
        logits = (
            head(chunk) if reentrant is None else checkpoint(head, chunk, use_reentrant=reentrant)
        )
        loss = logits.square().mean()
        loss.backward()
        gradients.append(chunk.grad)
        total = total + loss.detach()
    gradient = torch.cat(gradients, dim=1)
    (model.penalty + (hidden * gradient).sum()).backward()
    return total


@on_ranks(4)
@pytest.mark.parametrize(
    ("strategy", "reshards", "reentrant"),
    covered_first(product(["ddp", "zero2", "fsdp", "hsdp"], [True, False], [None, False, True])),
)
def test_a_tied_head_is_called_on_chunks(
    strategy: str, reshards: bool, reentrant: bool | None
) -> None:
    torch.manual_seed(0)
    reference: Any = Tied().double()
    # The head has no weight of its own, and is in a unit that holds another shared weight.
    model = sw.fully_shard(
        copy.deepcopy(reference),
        units=(Block, Middle, nn.Linear, nn.Embedding),
        reshard_after_forward=reshards,
        **options_of(strategy),
    )
    optimizers = [adamw(one.parameters()) for one in (reference, model)]
    for step in range(3):
        batches = [torch.randint(WORDS, (BATCH, LENGTH)) for _ in range(2)]
        for micro, batch in enumerate(batches):
            model.set_requires_gradient_sync(micro == 1)
            expected = backward(reference, batch)
            found = backward(model, own_part(batch), reentrant)
            torch.testing.assert_close(mean_over_ranks(found), expected, rtol=1e-10, atol=0)
            if reentrant is not None:
                reference(batch, False).square().mean().backward()
                model(own_part(batch), reentrant).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)
        assert_equal_models(model, reference, step)
    with torch.no_grad():
        hidden = torch.randn(2, WIDTH).double()
        torch.testing.assert_close(model.out(hidden), reference.out(hidden), rtol=1e-10, atol=1e-12)


@on_ranks(2)
@pytest.mark.parametrize("is_tied", [False, True])
def test_chunks_share_a_gather_and_a_reduction(is_tied: bool) -> None:
    """As docs/large-models.md has it."""
    torch.manual_seed(0)
    reference: Any = Tied().double()
    if not is_tied:
        reference.out.head.weight = nn.Parameter(reference.embed.weight.detach().clone())
    model = sw.fully_shard(copy.deepcopy(reference), units=(Block, nn.Linear, nn.Embedding))
    holder: Any = model if is_tied else model.out.head
    holder.set_reshard_after_backward(False)

    def run(one: Any, tokens: Tensor) -> Counter[EventKind]:
        """Return what happened between the first backward and the last."""
        hidden, found, gradients = one(tokens), Counter[EventKind](), []
        for i, chunk in enumerate(hidden.detach().chunk(CHUNKS, dim=1)):
            if one is model:
                holder.set_requires_gradient_sync(i == CHUNKS - 1)
            one.out.head(chunk.requires_grad_()).square().mean().backward()
            gradients.append(chunk.grad)
            if i and one is model:
                found.update(record.event.kind for record in sw.ledger(model).records())
        hidden.backward(torch.cat(gradients, dim=1))
        return found

    batch = torch.randint(WORDS, (BATCH, LENGTH))
    run(reference, batch)
    found = run(model, own_part(batch))
    assert found[EventKind.GATHER] == 0
    assert found[EventKind.REDUCE] == 1 + is_tied  # the bias is in the unit of the head
    used = [p for p in reference.parameters() if p.grad is not None]
    assert len(used) > 10
    assert_equal_models(model, reference, 0)


@on_ranks(2)
def test_the_next_forward_of_the_model_gathers_ahead() -> None:
    """The order of its units is not that of the call of the head."""
    model: Any = sw.fully_shard(Tied(), units=(Block, nn.Linear))
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    for _ in range(2):
        model.out.head(torch.randn(2, WIDTH)).sum().backward()
        model(tokens).sum().backward()
    kinds = [(record.event.kind, record.event.unit) for record in sw.ledger(model).records()]
    gathered = [unit for kind, unit in kinds if kind is EventKind.GATHER]
    assert (EventKind.FORWARD, gathered[1]) in kinds
    assert kinds.index((EventKind.GATHER, gathered[1])) < kinds.index((EventKind.FORWARD, 0))


@on_ranks(2)
def test_ranks_with_fewer_batches_join_calls_of_a_head() -> None:
    torch.manual_seed(0)
    reference: Any = Tied().double()
    model: Any = sw.fully_shard(copy.deepcopy(reference), units=(Block, Middle, nn.Linear))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (reference, model)]
    batches = [torch.randint(WORDS, (BATCH, LENGTH)) for _ in range(4)]
    with sw.join(model, optimizers[1]):
        for batch in batches[dist.get_rank() :: 2][: 1 + (dist.get_rank() == 0)]:
            backward(model, batch)
            optimizers[1].step()
            optimizers[1].zero_grad()
    for step in ((batches[0], batches[1]), (batches[2],)):
        for batch in step:
            backward(reference, batch)
        for parameter in reference.parameters():
            if parameter.grad is not None:
                parameter.grad /= len(step)
        optimizers[0].step()
        optimizers[0].zero_grad()
    assert_equal_models(model, reference, 1)


@on_ranks(2)
def test_conversions_are_those_of_the_called_unit() -> None:
    bf16 = torch.bfloat16
    model = sw.fully_shard(
        Tied(),
        units=(nn.Linear,),
        mp_policy=sw.MixedPrecisionPolicy(param_dtype=bf16, output_dtype=torch.float32),
    )
    hidden = model(torch.zeros(2, LENGTH, dtype=torch.long))
    assert hidden.dtype == torch.float32
    assert model.out.head(hidden.detach()).dtype == bf16

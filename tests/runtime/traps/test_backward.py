"""Traps: when the backward of a unit begins and ends."""

import math
import time
from collections import Counter
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.host.handshake import Host
from shardwise.runtime.buffers import FlatBuffer
from shardwise.runtime.codecs import RunCodec
from shardwise.runtime.memory import Pool
from tests.models import WIDTH, Block, Stack
from tests.ranks import on_ranks
from tests.runtime.one_process import (
    BATCH,
    assert_equal_models,
    assert_equal_steps,
    assert_equal_training,
    own_part,
    sharded_pair,
)
from tests.versions import needs_swap


@on_ranks(2)
def test_inputs_that_need_no_gradients() -> None:
    """Module backward hooks then run before the parameters' gradients, and hooks on inputs never
    run, so the first unit would be reduced too early, or not at all.
    """
    reference, model = sharded_pair("stack, every layer")
    assert_equal_steps(model, reference)
    assert _counts(model)["reduce first"] == 1


@on_ranks(2)
def test_an_output_that_is_a_view_may_be_changed_in_place() -> None:
    """FSDP2 loses its hook with the view's old node, and fails with "setStorage out of bounds"."""
    reference, model = sharded_pair(ChangesInPlace().double(), units=ReturnsView)
    assert_equal_steps(model, reference)


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputing_gathers_nothing_ahead_and_frees_nothing(reentrant: bool) -> None:
    """A recomputation is a forward inside backward. It would move too much if it prefetched in the
    order of forward, freed units that its backward needs, or registered its hooks again.
    """
    reference, model = sharded_pair(Recomputing(reentrant).double(), units=Block)
    assert_equal_steps(model, reference)
    counts = _counts(model)
    for layer in range(4):
        # The backward of the last unit, with its recomputation, may begin before it is freed.
        stays = layer == 3 and not reentrant  # reentrant checkpointing hides it from autograd
        assert counts[f"gather layers.{layer}"] == (1 if stays else 2), counts
        assert counts[f"forward layers.{layer}"] == 2
        assert counts[f"backward layers.{layer}"] <= 2
        assert counts[f"reduce layers.{layer}"] == 1


@on_ranks(2)
@pytest.mark.parametrize("way", ["one after the other", "reversed", "1F1B"])
def test_several_forwards_before_their_backwards(way: str) -> None:
    """As in pipelines: every backward is reduced, and no unit stays gathered."""
    reference, model = sharded_pair("stack")
    for step in range(3):
        batches = [torch.randn(BATCH, WIDTH).double() for _ in range(4)]

        def loss_of(batch: Tensor) -> Tensor:
            return model(own_part(batch)).square().mean()  # type: ignore[no-any-return]

        match way:
            case "1F1B":
                waiting = [loss_of(batch) for batch in batches[:2]]
                for batch in batches[2:]:
                    waiting.pop(0).backward()  # type: ignore[no-untyped-call]
                    waiting.append(loss_of(batch))
            case _:
                waiting = [loss_of(batch) for batch in batches]
                if way == "reversed":
                    waiting.reverse()
        for loss in waiting:
            loss.backward()  # type: ignore[no-untyped-call]
        sum(reference(batch).square().mean() for batch in batches).backward()
        assert_equal_models(model, reference, step)
        assert sw.ledger(model).gathered_bytes == 0
        assert _counts(model)["reduce layers.0"] == 1, "each backward is reduced, once"


@on_ranks(2)
@pytest.mark.parametrize("way", ["detached", "retained"])
def test_a_loss_in_chunks(way: str) -> None:
    """A loss for long sequences, with a separate backward for each chunk."""
    reference, model = sharded_pair("stack")
    for step in range(3):
        batch = torch.randn(BATCH, WIDTH).double()
        for m, x in ((reference, batch), (model, own_part(batch))):
            output = m(x)
            size = output.numel()
            whole = output.detach().requires_grad_() if way == "detached" else output
            chunks = whole.chunk(3)
            for position, chunk in enumerate(chunks):
                is_last = position == len(chunks) - 1
                loss = chunk.square().sum() / size
                loss.backward(retain_graph=not is_last)
            if way == "detached":
                output.backward(whole.grad)
        assert_equal_models(model, reference, step)


@on_ranks(2)
def test_units_that_were_gathered_ahead_in_vain_are_freed() -> None:
    """A pass in another order than the last one does not use the units that it prefetched."""
    reference, model = sharded_pair(Turns().double(), units=Block, prefetch=2)
    for step, order in enumerate([(0, 1, 2), (2, 0), (1,), (1, 1, 0, 2), (0, 1, 2)]):
        model.order = reference.order = order
        assert_equal_steps(model, reference, 1, zeroes=True)
        assert sw.ledger(model).gathered_bytes == 0
        if step == 1:
            events = sw.ledger(model).names()
            assert events.index("free layers.1") < events.index("forward layers.2")


@on_ranks(2, thorough=(4,))
def test_memory_that_was_given_back_is_used_by_nobody() -> None:
    """In peers, a reduce buffer that is freed before its work has ended, or parameters that are
    freed before their last use, sometimes give wrong results. Here freed memory is overwritten.
    """
    free = Pool.free

    def free_spoilt(pool: Pool, storage: torch.UntypedStorage, **options: bool) -> None:
        spoilt = torch.empty(0, dtype=torch.uint8).set_(storage)
        spoilt.fill_(0xFF)  # every number is a NaN
        free(pool, storage, **options)

    # Other ranks may still use shared memory; the next test covers it.
    without_sharing = mock.patch.object(Host, "can_share", return_value=False)
    with without_sharing, mock.patch.object(Pool, "free", free_spoilt):
        _train_in_many_ways()


@needs_swap
@on_ranks(2, thorough=(4,))
def test_memory_in_common_is_used_by_nobody_when_it_is_filled() -> None:
    """Memory is overwritten before it is filled, long enough for other ranks to read it."""
    bring = RunCodec.fill
    spoilt = 0

    def bring_late(codec: RunCodec, to: Tensor) -> Callable[[], None]:
        fill = bring(codec, to)

        def spoil() -> None:
            nonlocal spoilt
            to.fill_(math.nan)
            assert isinstance(codec.buffer, FlatBuffer)
            spoilt += codec.buffer._private is not None
            time.sleep(0.003)
            fill()

        return spoil

    with mock.patch.object(RunCodec, "fill", bring_late):
        _train_in_many_ways()
    assert (spoilt > 0) == (dist.get_rank() > 0), "all compute in the memory of the first"


def _counts(model: nn.Module) -> Counter[str]:
    return Counter(sw.ledger(model).names())


class ReturnsView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[:, :WIDTH]  # type: ignore[no-any-return]


class ChangesInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ReturnsView(), ReturnsView()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        y *= 2
        y.add_(1).sin_()
        z: Tensor = self.second(y)
        return z.tanh_()


class Recomputing(nn.Module):
    """Every block is a unit and runs under checkpointing."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class Turns(Stack):
    """Runs its blocks in the order that is set."""

    order: tuple[int, ...] = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for position in self.order:
            x = self.layers[position](x)
        y: Tensor = self.norm(x)
        return y


def _train_in_many_ways() -> None:
    for name in ("stack", "gpt", "two uses", "unused and reused", "checkpointed"):
        assert_equal_training(name)
    assert_equal_training("stack", accumulate=2, prefetch=0, clip=0.01)
    assert_equal_training("stack", set_to_none=False, strategy="zero2")

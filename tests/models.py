"""Models that are unlike each other, each with what an equality test needs of it.

All compute in float64, so that a real error cannot hide in rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardwise.plan.policies import Units

WIDTH = 6


@dataclass(frozen=True)
class Case:
    """A model, what it is fed, and what its loss is: a mean over the batch."""

    build: Callable[[], nn.Module]
    units: Units
    loss: Callable[[Any], Tensor] = lambda output: output.square().mean()
    batch: Callable[[int], Tensor] = lambda size: torch.randn(size, WIDTH, dtype=torch.float64)


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return x + y


class Stack(nn.Module):
    """Blocks between a first layer and a norm that the root owns."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.norm(x)
        return y


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return y


class GptBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads=2)
        self.mlp = Block(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = self.mlp(self.norm2(x))
        return y


class Gpt(nn.Module):
    """With the output projection tied to the embedding."""

    def __init__(self, vocabulary: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(GptBlock(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x[:, :-1]).transpose(1, 2), tokens[:, 1:])


class ConvNet(nn.Module):
    """Convolutions, and buffers that change in forward."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(
            nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU()),
            nn.Sequential(nn.Conv2d(4, 6, 3, stride=2), nn.GroupNorm(3, 6), nn.GELU()),
        )
        self.head = nn.Linear(6, 3)
        self.register_buffer("mean", torch.full((1,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        images = x[:, None, :, None] * x[:, None, None, :] - self.mean
        y: Tensor = self.head(self.stages(images).mean((2, 3)))
        return y


class UnusedAndReused(nn.Module):
    """One block called three times, one never, and a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Block()
        self.never = Block()
        self.other = Block()
        self.spare = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.shared(self.other(self.shared(self.shared(x))))
        return y


class Frozen(Stack):
    """Frozen weights and trainable biases in one unit, one block frozen as a whole."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            for name, parameter in layer.named_parameters():
                parameter.requires_grad = name.endswith("bias")
        self.layers[1].requires_grad_(False)
        self.first.requires_grad_(False)


class Lora(nn.Module):
    """A frozen base with trainable low-rank updates inside each unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LoraLinear() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class LoraLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, WIDTH) / 3)
        self.up = nn.Parameter(torch.randn(WIDTH, 2) / 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return y


class TiedAcrossUnits(nn.Module):
    """Two blocks share a matrix, and one block holds a matrix twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        first, second, third = self.layers
        assert isinstance(first, Block)
        assert isinstance(second, Block)
        assert isinstance(third, Block)
        first.up.weight = third.up.weight
        second.extra = second.up.weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Tiny(nn.Module):
    """Parameters smaller than the world size: a scalar, one element, none at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TinyLayer() for _ in range(2))
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.gain


class TinyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.bias = nn.Parameter(torch.tensor([0.1]))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.scale + self.bias) + self.nothing.sum()


class MixedDtypes(nn.Module):
    """Units with float64, float32 and int64 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MixedLayer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class MixedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(WIDTH, WIDTH)
        self.single = nn.Parameter(torch.ones(3, 2, dtype=torch.float32), requires_grad=False)
        self.table = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.weight(x)[:, self.table]) * self.single.sum().double()


@dataclass
class Answer:
    """What a model may return: tensors anywhere in a structure."""

    main: dict[str, list[Tensor]]
    auxiliary: tuple[Tensor, int]


class Structured(nn.Module):
    """Units that take and return nested containers and dataclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(StructuredLayer() for _ in range(3))

    def forward(self, x: Tensor) -> Answer:
        answer = Answer({"hidden": [x]}, (x.sum() * 0, 0))
        for layer in self.layers:
            answer = layer(answer)
        return answer


class StructuredLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, answer: Answer) -> Answer:
        x = self.block(answer.main["hidden"][-1])
        total, count = answer.auxiliary
        return Answer({"hidden": [*answer.main["hidden"], x]}, (total + x.abs().mean(), count + 1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, 4, num_layers=2, batch_first=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.rnn(torch.stack([x, x.flip(1), x.roll(1, 1)], dim=1))
        y: Tensor = self.head(outputs[:, -1])
        return y


class TwoUses(nn.Module):
    """An encoder's output is used by two decoders; one unit returns a view of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Block()
        self.left = Block()
        self.right = Block()
        self.pick = Pick()

    def forward(self, x: Tensor) -> list[Tensor]:
        memory = self.encoder(x)
        left = self.left(memory)
        right = self.right(memory + self.pick(left))
        right *= 2  # in place, on what a unit was given
        return [left.sum(1), right.mean(1)]


class Pick(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight)[:, :1].view(-1, 1)


class HiddenLoss(nn.Module):
    """A unit that keeps its loss in an attribute and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.probe = Probe()

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        self.probe(y)
        assert self.probe.loss is not None
        z: Tensor = y.mean(1) + self.probe.loss
        return z


class Probe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.3))
        self.loss: Tensor | None = None

    def forward(self, x: Tensor) -> None:
        self.loss = (x * self.weight).sum(1)


class Checkpointed(nn.Module):
    """Activation checkpointing around units, inside them, and around several at once."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(CheckpointedLayer(reentrant=reentrant) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        first, second, *rest = self.layers
        x = checkpoint(first, x, use_reentrant=self.reentrant)
        x = second(x)
        return self._run(lambda y: rest[1](rest[0](y)), x)

    def _run(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        y: Tensor = checkpoint(function, x, use_reentrant=self.reentrant)
        return y


class CheckpointedLayer(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.block = Block()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, self.norm(x), use_reentrant=self.reentrant)
        return y


def llama(**changes: Any) -> Any:
    """A small `LlamaForCausalLM` of transformers, with the same values each time.

    Args:
        changes: of its `LlamaConfig`.
    """
    from transformers import LlamaForCausalLM  # noqa: PLC0415 (takes seconds)

    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config(**changes))


def llama_config(**changes: Any) -> Any:
    """The configuration of `llama`."""
    from transformers import LlamaConfig  # noqa: PLC0415 (takes seconds)

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaConfig(**(sizes | heads | changes))


def _sum_of_means(outputs: list[Tensor]) -> Tensor:
    return outputs[0].square().mean() + outputs[1].sin().mean()


def _answer_loss(answer: Answer) -> Tensor:
    return answer.main["hidden"][-1].square().mean() + answer.auxiliary[0]


def _tokens(size: int) -> Tensor:
    return torch.randint(0, 11, (size, 7))


CASES: dict[str, Case] = {
    "stack": Case(Stack, Block),
    "stack, one unit": Case(Stack, None),
    "stack, every layer": Case(Stack, {Block, nn.Linear, nn.LayerNorm}),
    "stack, by size": Case(Stack, 100),
    "sequential": Case(
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in "abc")),
        "auto",
    ),
    "gpt": Case(Gpt, GptBlock, loss=lambda loss: loss, batch=_tokens),
    "conv": Case(ConvNet, "auto"),
    "unused and reused": Case(UnusedAndReused, Block),
    "frozen": Case(Frozen, Block),
    "lora": Case(Lora, LoraLinear),
    "tied": Case(TiedAcrossUnits, Block),
    "tiny": Case(Tiny, TinyLayer),
    "mixed dtypes": Case(MixedDtypes, MixedLayer),
    "structured": Case(Structured, {StructuredLayer, Block}, loss=_answer_loss),
    "recurrent": Case(Recurrent, nn.LSTM),
    "two uses": Case(TwoUses, {Block, Pick}, loss=_sum_of_means),
    "hidden loss": Case(HiddenLoss, {Block, Probe}),
    "checkpointed": Case(lambda: Checkpointed(reentrant=False), CheckpointedLayer),
    "checkpointed, reentrant": Case(lambda: Checkpointed(reentrant=True), CheckpointedLayer),
    "checkpointed inside": Case(lambda: Checkpointed(reentrant=False), {CheckpointedLayer, Block}),
    "checkpointed inside, reentrant": Case(
        lambda: Checkpointed(reentrant=True), {CheckpointedLayer, Block}
    ),
}


# What they do not share with these is shown by `tests/runtime/test_equality.py`.
_UNLIKE = ("stack", "gpt", "unused and reused", "tied", "lora", "mixed dtypes", "checkpointed")
LIKE_OTHERS = tuple(name for name in CASES if name not in _UNLIKE)


def build(name: str, seed: int = 0) -> Any:
    """The model of a case in float64, with the same values for the same seed."""
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` takes milliseconds
    model = CASES[name].build()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point() and not isinstance(module, MixedLayer):
                parameter.data = parameter.data.double()
        for key, buffer in module.named_buffers(recurse=False):
            setattr(module, key, buffer.double())
    return model

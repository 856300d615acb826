"""Training of reproducible models, with all that their bits may depend on."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from tests.models import GptBlock, llama

LEAVES = 8
VOCABULARY, LENGTH, WIDTH = 64, 12, 64


@dataclass(frozen=True)
class Options:
    """How a model is trained. The last three may not change a bit."""

    model: str = "gpt"
    optimizer: str = "adamw"
    dtype: torch.dtype = torch.float32
    strategy: str = "fsdp"
    replicas: int = 0  # rows of the mesh of "hsdp" and "hfsdp"
    prefetch: int = 1


@dataclass(frozen=True)
class Trained:
    """What has to have the same bits; digests of values in the order of the model."""

    losses: tuple[str, ...]
    norms: tuple[str, ...]
    parameters: str
    states: str


class Gpt(nn.Module):
    """With dropout, blocks that are recomputed, and an expert that some micro-batches skip."""

    def __init__(self, *, is_reentrant: bool = False) -> None:
        super().__init__()
        self.is_reentrant = is_reentrant
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(GptBlock(WIDTH) for _ in range(3))
        self.dropout = nn.Dropout(0.2)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            y = checkpoint(
                lambda x, layer=layer: self.dropout(layer(x)), x, use_reentrant=self.is_reentrant
            )
            assert isinstance(y, Tensor)
            x = y
        if tokens[0, 0] % 2:
            x = x + self.sometimes(x)
        x = x * self.scale
        return F.cross_entropy(self.head(x[:, :-1]).float().transpose(1, 2), tokens[:, 1:])


def build(name: str) -> nn.Module:
    """A small model whose parameters have several blocks of a sum each."""
    torch.manual_seed(0)
    if name.startswith("gpt"):
        return Gpt(is_reentrant="reentrant" in name)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "attention_dropout": 0.1,
    }
    if name == "llama":
        model: Any = llama(**sizes)
    else:
        from transformers import MixtralConfig, MixtralForCausalLM  # noqa: PLC0415 (takes seconds)

        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
        model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_experts_per_tok=2))
        model.set_experts_implementation("eager")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return model  # type: ignore[no-any-return]


def batch_of(step: int, leaf: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + leaf)
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    match name:
        case "adamw":
            return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        case "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        case "rmsprop":
            return torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)
        case "muon" | "soap":
            experts = any("experts" in name for name, _ in model.named_parameters())
            matrices = ["*.experts.*", "*.gate.weight"] if experts else []
            groups = sw.optim.parameter_groups(model, matrices=matrices)
            if name == "muon":
                return sw.optim.Muon(groups, lr=1e-2)
            return sw.optim.SOAP(groups, lr=1e-2, precondition_frequency=2)
        case _:
            return sw.optim.Adam8bit(model.parameters(), lr=1e-2)


def sharded(options: Options) -> nn.Module:
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    return sw.fully_shard(
        build(options.model).to(options.dtype),
        units=30_000,
        strategy=options.strategy,
        sharding_factor=num_ranks // options.replicas if options.replicas else None,
        prefetch=options.prefetch,
        reproducible=LEAVES,
    )


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> tuple[Tensor, Tensor]:
    """Take a step; return the loss and the norm of the gradients."""
    losses = []
    for leaf in sw.leaves(model):
        tokens = batch_of(step, leaf)
        with sw.leaf_rng(7, step, leaf):
            output = model(tokens) if isinstance(model, Gpt) else model(tokens, labels=tokens)
        loss = output if isinstance(output, Tensor) else output.loss
        loss.backward()
        losses.append(loss.detach())
    norm = sw.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return sw.leaf_mean(model, losses), norm


def train(
    options: Options, steps: range, load: Path | None = None, save: Path | None = None
) -> Trained:
    """Take ``steps``, the first ones or those that follow the checkpoint ``load``."""
    model = sharded(options)
    optimizer = optimizer_of(model, options.optimizer)
    if load is not None:
        assert sw.load(load, model=model, optimizer=optimizer).state["step"] == steps.start
    results = [step_of(model, optimizer, step) for step in steps]
    if save is not None:
        sw.save(save, model=model, optimizer=optimizer, step=steps.stop)
    losses, norms = (tuple(bits([x]) for x in column) for column in zip(*results, strict=True))
    states = [optimizer.state[p] for p in model.parameters() if p in optimizer.state]
    return Trained(
        losses, norms, bits(model.parameters()), bits(x for s in states for x in _tensors_in(s))
    )


def _tensors_in(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for key in sorted(state):
            yield from _tensors_in(state[key])
    elif isinstance(state, list | tuple):
        for one in state:
            yield from _tensors_in(one)


def bits(tensors: Any) -> str:
    """A digest of the values of ``tensors``; all ranks call this."""
    digest = hashlib.sha256()
    for tensor in tensors:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]

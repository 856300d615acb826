"""The models of `benchmarks.gpu`, with random batches.

In bfloat16 over float32 shards, with activation checkpointing and fused AdamW:

- *gpt-175b*: blocks of its shape, 12,288 wide with 96 heads, as many as fit;
- *llama-8b*: Llama-3.1-8B of `transformers`, whole;
- *tiny*: to test the scripts, on a CPU as well.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.bench.work import Work
from shardwise.train.model import GPT, Block, Shape

__all__ = ["MODELS", "make_work"]

LLAMA_VOCABULARY = 128_256


def gpt(shape: Shape) -> Callable[[int], tuple[nn.Module, type[nn.Module]]]:
    """GPTs of that shape and of any number of blocks, all of which are recomputed."""

    def build(blocks: int) -> tuple[nn.Module, type[nn.Module]]:
        model = GPT(replace(shape, layers=blocks))
        model.checkpoint_every = 1
        return model, Block

    return build


def llama_8b(blocks: int) -> tuple[nn.Module, type[nn.Module]]:
    """Llama-3.1-8B, if there are 32 blocks."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 (takes seconds)
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer  # noqa: PLC0415

    config = LlamaConfig(
        vocab_size=LLAMA_VOCABULARY,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=blocks,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, LlamaDecoderLayer


@dataclass(frozen=True, slots=True)
class Model:
    """What is trained; ``blocks`` are the units beside the root."""

    build: Callable[[int], tuple[nn.Module, type[nn.Module]]]  # of so many blocks
    blocks: int
    vocabulary: int
    context: int
    batch: int  # sequences of a rank in a step

    @property
    def tokens(self) -> int:
        """Of a rank in a step."""
        return self.batch * self.context


GPT_175B = Shape(vocabulary=51_200, context=2048, width=12_288, layers=6, heads=96)
TINY = Shape(vocabulary=512, context=64, width=64, layers=2, heads=2)
MODELS = {
    "gpt-175b": Model(gpt(GPT_175B), 6, GPT_175B.vocabulary, context=2048, batch=2),
    "llama-8b": Model(llama_8b, 32, LLAMA_VOCABULARY, context=2048, batch=4),
    "tiny": Model(gpt(TINY), 2, TINY.vocabulary, TINY.context, batch=2),
}


def make_work(name: str, blocks: int | None, device: torch.device) -> Work:
    """A model of `MODELS`, of so many blocks or its own number, on ``device``."""
    model = MODELS[name]
    size = (model.batch, model.context + 1)
    torch.manual_seed(0)
    with device:
        net, block = model.build(blocks or model.blocks)

    def draw(generator: torch.Generator) -> Tensor:
        return torch.randint(model.vocabulary, size, generator=generator).to(device)

    return Work(lambda: net, block, draw, next_token_loss, bf16=True)


def next_token_loss(net: nn.Module, tokens: Tensor) -> Tensor:
    """``tokens`` [batch, context + 1]."""
    output = net(tokens[:, :-1])
    logits = output if isinstance(output, Tensor) else output.logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

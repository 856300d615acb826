"""The models of `benchmarks.gpu`, with random batches."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.bench.work import Work
from shardwise.forecast.models.transformer import Shape
from shardwise.forecast.trace.recomputing import checkpoint_blocks
from shardwise.train.model import GPT, Block, gpt_shape

__all__ = ["MODELS", "make_work"]

LLAMA_VOCABULARY = 128_256


def gpt(shape: Shape) -> Callable[[int], tuple[nn.Module, type[nn.Module]]]:
    """Return a function that builds a GPT with a number of blocks, all recomputed in backward."""

    def build(blocks: int) -> tuple[nn.Module, type[nn.Module]]:
        model = GPT(replace(shape, layers=blocks))
        checkpoint_blocks(model, "full")
        return model, Block

    return build


def llama_8b(blocks: int) -> tuple[nn.Module, type[nn.Module]]:
    """Build Llama-3.1-8B, or a model of its shape if ``blocks`` is not 32."""
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
    """A model to train."""

    build: Callable[[int], tuple[nn.Module, type[nn.Module]]]  # number of blocks -> model, block
    blocks: int  # default number of blocks, which are the units besides the root
    vocabulary: int
    context: int
    batch: int  # sequences per rank and step

    @property
    def tokens(self) -> int:
        """Tokens per rank and step."""
        return self.batch * self.context


GPT_175B = gpt_shape(vocabulary=51_200, context=2048, width=12_288, layers=6, heads=96)
TINY = gpt_shape(vocabulary=512, context=64, width=64, layers=2, heads=2)
MODELS = {
    "gpt-175b": Model(gpt(GPT_175B), 6, GPT_175B.vocab, context=2048, batch=2),
    "llama-8b": Model(llama_8b, 32, LLAMA_VOCABULARY, context=2048, batch=4),
    "tiny": Model(gpt(TINY), 2, TINY.vocab, TINY.context, batch=2),
}


def make_work(name: str, blocks: int | None, device: torch.device) -> Work:
    """Build a model of `MODELS` on ``device``, with ``blocks`` blocks or its default number."""
    model = MODELS[name]
    size = (model.batch, model.context + 1)
    torch.manual_seed(0)
    with device:
        net, block = model.build(blocks or model.blocks)

    def draw(generator: torch.Generator) -> Tensor:
        return torch.randint(model.vocabulary, size, generator=generator).to(device)

    return Work(lambda: net, block, draw, next_token_loss, bf16=True)


def next_token_loss(net: nn.Module, tokens: Tensor) -> Tensor:
    """Compute the mean loss of ``tokens`` [batch, context + 1]."""
    output = net(tokens[:, :-1])
    logits = output if isinstance(output, Tensor) else output.logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

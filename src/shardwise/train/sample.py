"""Text written by the model."""

import torch
from torch import Tensor, nn

from shardwise.train.config import SampleConfig

__all__ = ["generate"]


@torch.no_grad()
def generate(
    model: nn.Module, config: SampleConfig, *, context: int, seed: int, device: torch.device
) -> str:
    """The prompt and ``config.bytes`` bytes after it; control characters are shown as U+FFFD.

    Every rank has to call it, for a forward of a sharded model gathers units; how many forwards
    there are depends on the configuration alone, so the ranks stay in step.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(config.prompt.encode())
    model.eval()
    for _ in range(config.bytes):
        window = torch.tensor([tokens[-context:]], device=device)  # [1, time]
        tokens.append(_choose(model(window)[0, -1], config, generator))
    model.train()
    return _printable(bytes(tokens).decode("utf-8", errors="replace"))


def _choose(logits: Tensor, config: SampleConfig, generator: torch.Generator) -> int:
    """One of the ``top_k`` likeliest bytes, by its probability."""
    best = logits.float().cpu().topk(config.top_k)  # [top_k]
    probabilities = torch.softmax(best.values / config.temperature, dim=0)
    choice = torch.multinomial(probabilities, num_samples=1, generator=generator)
    return int(best.indices[choice])


def _printable(text: str) -> str:
    """An escape sequence, which an untrained model may write, would reach the terminal."""
    shown = (c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return "".join(shown)

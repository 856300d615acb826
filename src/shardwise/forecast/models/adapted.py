"""Adapters on a frozen model: LoRA, DoRA and QLoRA, as peft and bitsandbytes run them.

`adapt` replaces linear layers of a model. The base has no gradients and no optimizer states. With
QLoRA its weights are codes of 4 bits: units gather the codes, and each product first dequantizes
its weight, in forward and again in backward::

    forward    y = x dequantize(codes)^T + scale * B(A(x))
    backward   dx = dy dequantize(codes) + ...; gradients of A and B alone

The modules compute, too: tests compare their memory with a real step.

Sources: LoRA, Hu et al., 2021 (arXiv 2106.09685); QLoRA, Dettmers et al., 2023 (arXiv 2305.14314);
DoRA, Liu et al., 2024 (arXiv 2402.09353).
"""

import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.errors import ConfigError
from shardwise.forecast.adapters import ALL_LINEAR, Adapters
from shardwise.plan.spelling import counted

__all__ = ["LoRALinear", "NF4Linear", "adapt", "dequantize_nf4", "quantize_nf4"]

_HEADS = ("head", "lm_head", "output", "embed_out")
# Names of projections in transformers, and in the built-in models.
_BUILT_IN = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "out", "gate_proj": "gate",
    "up_proj": "up", "down_proj": "down", "c_attn": "qkv",
}  # fmt: skip


def adapt(
    module: nn.Module, adapters: Adapters, *, base: torch.dtype, trained: torch.dtype
) -> nn.Module:
    """Freeze ``module``, convert it to the dtype ``base``, and add adapters in ``trained``.

    Raises:
        ConfigError: no layer has a name in ``adapters.targets``.
    """
    module.requires_grad_(requires_grad=False)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(base)
    plain = [(n, m) for n, m in module.named_modules() if isinstance(m, nn.Linear)]
    found = list(_targets(module, adapters.targets))
    for name, layer in found:
        module.set_submodule(name, LoRALinear(layer, adapters, trained))
    if adapters.quantized:  # the layers without adapters, too, as transformers and fsdp_qlora do
        targets = {layer for _, layer in found}
        for name, layer in plain:
            if layer not in targets and name.rpartition(".")[2] not in _HEADS:
                module.set_submodule(name, NF4Linear(layer))
    return module


def _targets(module: nn.Module, targets: str | tuple[str, ...]) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the layers that get adapters, with their names."""
    linear = [(n, m) for n, m in module.named_modules() if isinstance(m, nn.Linear)]
    last = {name: name.rpartition(".")[2] for name, _ in linear}
    if targets == ALL_LINEAR:
        chosen = [one for one in linear if last[one[0]] not in _HEADS]
    elif isinstance(targets, str):
        try:
            chosen = [one for one in linear if re.fullmatch(targets, one[0])]
        except re.error as error:
            raise ConfigError(f"targets={targets}: {error}, in a regular expression") from None
    else:  # names
        wanted = {*targets, *(_BUILT_IN[one] for one in targets if one in _BUILT_IN)}
        if {"q", "k", "v"} & wanted:  # a fused projection contains these
            wanted.add("qkv")
        suffixes = tuple(f".{one}" for one in wanted)
        chosen = [one for one in linear if f".{one[0]}".endswith(suffixes)]
    if not chosen:
        known = ", ".join(dict.fromkeys(last.values()))
        given = targets if isinstance(targets, str) else "+".join(targets)
        raise ConfigError(
            f"targets={given}: the model has no such linear layer; expected {ALL_LINEAR} or some "
            f"of {known}"
        )
    yield from chosen


class LoRALinear(nn.Module):
    """A frozen linear layer with an adapter, as peft's."""

    def __init__(self, base: nn.Linear, adapters: Adapters, dtype: torch.dtype) -> None:
        super().__init__()
        self.scaling, self.dropout = adapters.alpha / adapters.rank, adapters.dropout
        options: dict[str, Any] = {"bias": False, "dtype": dtype, "device": base.weight.device}
        self.base_layer = NF4Linear(base) if adapters.quantized else base
        self.lora_A = nn.Linear(base.in_features, adapters.rank, **options)
        self.lora_B = nn.Linear(adapters.rank, base.out_features, **options)
        nn.init.zeros_(self.lora_B.weight)
        self.magnitude: nn.Parameter | None = None
        if adapters.dora:
            norms = base.weight.detach().float().norm(dim=1).to(dtype)
            self.magnitude = nn.Parameter(norms)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the base plus that of the adapter."""
        result: Tensor = self.base_layer(x)
        a, b = self.lora_A.weight, self.lora_B.weight
        inner = self.lora_A(F.dropout(x.to(a.dtype), self.dropout, self.training))
        update: Tensor = self.lora_B(inner) * self.scaling
        if self.magnitude is None:
            return (result + update).to(result.dtype)
        share = self.magnitude / self._norms(a, b)  # of each output
        return (result * share + update * share).to(result.dtype)

    def _norms(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the norm of each row of the whole weight, which is a constant in backward."""
        with torch.no_grad():
            weight: Tensor = self.base_layer.weight
            norms: Tensor = (weight + self.scaling * (b @ a)).norm(dim=1)
            return norms.to(weight.dtype)


class NF4Linear(nn.Module):
    """A frozen linear layer with 4-bit weights: the codes are a parameter, so units gather them.

    The scales of blocks of 64 weights take one byte, with a float32 scale for 256 of them. They
    are buffers, as in bitsandbytes, so every rank has all of them.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.shape, self.dtype = linear.weight.shape, linear.weight.dtype
        codes, scales, offsets = quantize_nf4(linear.weight.detach())
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("scales", scales)
        self.register_buffer("offsets", offsets)
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """The weight as dequantized now."""
        weight: Tensor = dequantize_nf4(
            self.codes, self.scales, self.offsets, self.shape, self.dtype
        )
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the product with the dequantized weight."""
        stored = (self.codes, self.scales, self.offsets)
        result: Tensor = _FrozenProduct.apply(x, *stored, self.shape)  # type: ignore[no-untyped-call]
        return result if self.bias is None else result + self.bias


class _FrozenProduct(torch.autograd.Function):
    """A product that keeps the codes for backward, and not the weight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor, shape: torch.Size
    ) -> Tensor:
        ctx.save_for_backward(codes, scales, offsets)
        ctx.shape = shape
        return F.linear(x, dequantize_nf4(codes, scales, offsets, shape, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight = dequantize_nf4(*ctx.saved_tensors, ctx.shape, gradient.dtype)
        return gradient @ weight, None, None, None, None


# -- NF4 -------------------------------------------------------------------------------------------

_BLOCK, _OUTER_BLOCK = 64, 256
_PIECE = 1 << 16  # weights that are encoded or decoded at a time; a multiple of both blocks
# The quantiles of a normal distribution, scaled to [-1, 1] (arXiv 2305.14314, appendix E).
_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


def quantize_nf4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [n / 2] and scales [n / 64] as uint8, and the scales of scales in float32.

    Raises:
        ConfigError: the number of weights is odd.
    """
    size = weight.numel()
    if size % 2:
        raise ConfigError(f"{counted(size, 'weight')}: expected an even number to quantize")
    flat = F.pad(weight.flatten().float(), (0, -size % _BLOCK)).view(-1, _BLOCK)
    largest = flat.abs().amax(1)  # [scales]
    padded = F.pad(largest, (0, -len(largest) % _OUTER_BLOCK)).view(-1, _OUTER_BLOCK)
    outer = padded.amax(1)  # [outer]
    scales = (padded / outer.clamp(min=1e-30)[:, None] * 255).round().to(torch.uint8)
    scales = scales.flatten()[: len(largest)]
    decoded = _scales(scales, outer)
    levels = torch.tensor(_LEVELS, device=weight.device)
    middles = (levels[1:] + levels[:-1]) / 2
    indices = torch.bucketize(flat / decoded.clamp(min=1e-30)[:, None], middles)
    pairs = indices.to(torch.uint8).flatten()[:size].view(-1, 2)
    return pairs[:, 0] << 4 | pairs[:, 1], scales, outer


def _scales(scales: Tensor, outer: Tensor) -> Tensor:
    """Return the scales of blocks in float32."""
    return scales.float() * outer.repeat_interleave(_OUTER_BLOCK)[: len(scales)] / 255


@torch.library.custom_op("shardwise_adapters::dequantize_nf4", mutates_args=())
def dequantize_nf4(
    codes: Tensor, scales: Tensor, offsets: Tensor, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return the weight of ``shape`` in ``dtype``, decoded piece by piece."""
    weight = torch.empty(prod(shape), dtype=dtype, device=codes.device)
    levels = torch.tensor(_LEVELS, device=codes.device)
    for start in range(0, len(weight), _PIECE):
        piece = codes[start // 2 : (start + _PIECE) // 2]
        numbers = levels[torch.stack([piece >> 4, piece & 15], 1).flatten().int()]
        first = start // _BLOCK
        own = scales[first : first + _PIECE // _BLOCK]
        outer = offsets[first // _OUTER_BLOCK : (first + len(own) - 1) // _OUTER_BLOCK + 1]
        by_block = _scales(own, outer)
        weight[start : start + len(numbers)] = (
            numbers * by_block.repeat_interleave(_BLOCK)[: len(numbers)]
        )
    return weight.view(list(shape))


@dequantize_nf4.register_fake
def _(
    codes: Tensor,
    scales: Tensor,  # noqa: ARG001
    offsets: Tensor,  # noqa: ARG001
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    return codes.new_empty(list(shape), dtype=dtype)

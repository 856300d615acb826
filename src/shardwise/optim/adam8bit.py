"""Adam with 8-bit states, quantized in blocks that are never divided between ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.blockwise import Blocks
from shardwise.errors import CheckpointError, PlanError
from shardwise.optim.owner_optimizer import CheckedOptimizer, check_state_dict
from shardwise.plan.granularity import Dim
from shardwise.plan.layout import Layout, ParameterExtent, ParameterSpec, Run
from shardwise.tensor.sharded_tensor import RunSharding, ShardedTensor
from shardwise.tensor.sharding import Sharding, local_of, sharding_of

__all__ = ["Adam8bit"]

_Group = dict[str, Any]
_BITS = (8, 32)
_QUANTIZED = {"exp_avg": "dynamic", "exp_avg_sq": "dynamic_unsigned"}
_SCALES = {f"{name}_scale" for name in _QUANTIZED}


class Adam8bit(CheckedOptimizer):
    """AdamW whose two averages take one byte per element and a scale per block.

    A step dequantizes the averages, computes in single precision, element by element, and quantizes
    the results. Every granule of a parameter starts a new block (``granularity="row"``,
    `sw.block(n)`, "tensor" or "dim" of `fully_shard`), so states have the same bits on any number
    of ranks, and so do checkpoints. No scales are wasted if ``block`` divides the granules.

    Args:
        params: parameters or groups. A group may override the options below except
            ``min_elements``. ``state_bits=32`` keeps the states of a group in float32, which is
            recommended for embeddings.
        lr: learning rate.
        betas: decays of the averages of gradients and of their squares.
        eps: added to the square root of the second moment.
        weight_decay: weight decay.
        decoupled_weight_decay: whether weights decay independently of the gradient, as in AdamW.
            Otherwise, the decay is added to the gradient, as in Adam.
        block: number of elements in a block, an even number.
        min_elements: smaller parameters keep float32 states, with any granularity. So do vectors:
            a rank may hold any part of a vector, so that each element would need a scale.
        state_bits: 8 or 32.

    Raises:
        PlanError: an option is not valid, or a parameter is cut by element.

    Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021 (arXiv 2110.02861).
    """

    steps_units = True  # see `CPUOffloadPolicy`

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decoupled_weight_decay: bool = True,
        block: int = 256,
        min_elements: int = 4096,
        state_bits: int = 8,
    ) -> None:
        if not (0 <= betas[0] < 1 and 0 <= betas[1] < 1):
            raise PlanError(f"Adam8bit(betas={betas}): expected numbers from 0 to below 1")
        self._min_elements = min_elements
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "state_bits": state_bits,
            "block": block,
        }
        super().__init__(params, defaults)

    def _check_group(self, number: int, group: _Group) -> None:
        if group["state_bits"] not in _BITS:
            raise PlanError(f"Adam8bit(state_bits={group['state_bits']!r}): expected 8 or 32")
        if group["block"] < 2 or group["block"] % 2:  # noqa: PLR2004 - even
            raise PlanError(
                f"Adam8bit(block={group['block']}): expected an even number of elements"
            )
        for position, parameter in enumerate(group["params"]):
            if self._is_quantized(parameter, group):
                _check_uncut(parameter, f"parameter {position} of group {number}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have gradients."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state dict, as in torch, but keep the dtypes of its states.

        Raises:
            CheckpointError: the states are quantized in other blocks, or the state dict is of
                another kind of optimizer, or of one process.
        """
        check_state_dict(self, state_dict)
        saved = state_dict["state"]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        super().load_state_dict({**state_dict, "state": {}})
        own = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        for number, (parameter, group) in zip(numbers, own, strict=True):
            for key, value in saved.get(number, {}).items():
                if key in _SCALES:
                    _Granules(parameter, group["block"]).check_fit(value.shape)
                is_step = key == "step"
                copied = value.clone() if is_step else value.to(parameter.device, copy=True)
                self.state[parameter][key] = copied

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_min_elements": self._min_elements}

    def empty_state(
        self,
        parameter: Tensor,
        key: str,
        shape: Sequence[int],
        dtype: torch.dtype,  # noqa: ARG002
    ) -> Tensor | None:
        """Allocate scales to load values into; None for other states.

        Raises:
            CheckpointError: the states are quantized in other blocks.
        """
        if key not in _SCALES:
            return None
        granules = _Granules(parameter, self._block_of(parameter))
        granules.check_fit(shape)
        return granules.scales()

    def _block_of(self, parameter: Tensor) -> int:
        groups = (g for g in self.param_groups if any(p is parameter for p in g["params"]))
        block: int = next(groups)["block"]
        return block

    # -- a step ----------------------------------------------------------------------------------

    def _is_quantized(self, parameter: Tensor, group: _Group) -> bool:
        is_large = parameter.ndim > 1 and parameter.numel() >= self._min_elements
        return is_large and group["state_bits"] == 8  # noqa: PLR2004

    def _update(self, parameter: Tensor, group: _Group) -> None:
        state = self.state[parameter]
        if not state:
            self._initialize_state(parameter, group)
        state["step"] += 1
        assert parameter.grad is not None
        local, gradient = local_of(parameter), local_of(parameter.grad).float()
        weights = local.float()
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        if not group["decoupled_weight_decay"]:
            gradient = gradient.add(weights, alpha=group["weight_decay"])
        granules = _Granules(parameter, group["block"])
        average, squares = (self._read(granules, name) for name in _QUANTIZED)
        average.lerp_(gradient, 1 - beta1)
        squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        number = float(state["step"])
        root = squares.sqrt().div_((1 - beta2**number) ** 0.5).add_(group["eps"])
        if group["decoupled_weight_decay"]:
            weights = weights.mul(1 - lr * group["weight_decay"])
        local.copy_(torch.addcdiv(weights, average, root, value=-lr / (1 - beta1**number)))
        self._write(granules, "exp_avg", average)
        self._write(granules, "exp_avg_sq", squares)

    def _initialize_state(self, parameter: Tensor, group: _Group) -> None:
        is_quantized = self._is_quantized(parameter, group)
        if is_quantized:  # the parameter may have been sharded since its group was added
            _check_uncut(parameter, "a parameter")
        granules, state = _Granules(parameter, group["block"]), self.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        contiguous = parameter if isinstance(parameter, DTensor) else parameter.contiguous()
        for name in _QUANTIZED:
            dtype = torch.uint8 if is_quantized else torch.float32
            state[name] = torch.zeros_like(contiguous, dtype=dtype, requires_grad=False)
            if is_quantized:
                state[f"{name}_scale"] = granules.scales()
                local = local_of(parameter)
                zero = local.new_zeros((), dtype=torch.float32)
                self._write(granules, name, zero.expand_as(local))

    def _read(self, granules: "_Granules", name: str) -> Tensor:
        """This rank's elements of a state, in float32."""
        codes = local_of(self.state[granules.parameter][name])
        if codes.dtype is not torch.uint8:
            return codes
        blocks = Blocks(_QUANTIZED[name], granules.block)
        parts = self._quantized_parts(granules, name)
        numbers = [blocks.dequantize(*part).reshape(-1) for part in parts]
        return torch.cat([codes.new_empty(0, dtype=torch.float32), *numbers]).view(codes.shape)

    def _write(self, granules: "_Granules", name: str, numbers: Tensor) -> None:
        if local_of(self.state[granules.parameter][name]).dtype is not torch.uint8:
            return  # `numbers` is the state itself
        blocks = Blocks(_QUANTIZED[name], granules.block)
        into = self._quantized_parts(granules, name)
        for part, (codes, scales) in zip(granules.cut(numbers), into, strict=True):
            new_codes, new_scales = blocks.quantize(part)
            codes.copy_(new_codes)
            scales.copy_(new_scales)

    def _quantized_parts(self, granules: "_Granules", name: str) -> list[tuple[Tensor, Tensor]]:
        """The codes and scales of a state, divided as by `_Granules.cut`."""
        state = self.state[granules.parameter]
        codes = granules.cut(local_of(state[name]))
        scales = granules.cut_scales(local_of(state[f"{name}_scale"]))
        return list(zip(codes, scales, strict=True))


# -- blocks in parameters ------------------------------------------------------------------------


@dataclass(frozen=True)
class _ScaleLayout(Layout):
    """The layout of a parameter's scales: each rank has the scales of its own elements."""

    granules: "_Granules | None" = None

    def __post_init__(self) -> None:
        """Skip the checks of `Layout`: ranks may have different numbers of scales."""

    def run(self, extent: ParameterExtent, rank: int) -> Run:  # noqa: ARG002
        granules = self.granules
        assert granules is not None
        assert granules.sharding is not None
        own = granules.sharding.layout.run(granules.sharding.extent, rank)
        return Run(granules.num_blocks(own.start), granules.num_blocks(own.stop))


class _Granules:
    """This rank's elements of a parameter, as granules. The last one may be shorter."""

    def __init__(self, parameter: Tensor, block: int) -> None:
        self.parameter = parameter
        self.block = block
        self.sharding: Sharding | None = sharding_of(parameter)
        size = parameter.numel()
        if self.sharding is not None:
            spec = self.sharding.extent.parameter
            in_rows = isinstance(spec.granularity, Dim)
            size = prod(spec.shape[1:]) if in_rows else spec.granule_elements
        self._size = max(1, size)  # the parameter may have no elements
        self._blocks_per_granule = -(-self._size // block)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the scales: a row for each granule, if all have the same size."""
        num_elements = self.parameter.numel()
        if num_elements % self._size:
            return (self.num_blocks(num_elements),)
        return (num_elements // self._size, self._blocks_per_granule)

    def check_fit(self, saved: Sequence[int]) -> None:
        """Raise a CheckpointError unless ``saved`` is the shape of the scales."""
        if tuple(saved) != self.shape:
            name = "a parameter" if self.sharding is None else self.sharding.name
            raise CheckpointError(
                f"{name}: the checkpoint's 8-bit states have scales of shape {list(saved)}, "
                f"expected {list(self.shape)}: they were quantized in other blocks; shard with the "
                "granularity, and build Adam8bit with the block, of the run that saved them, or "
                "load without optimizer="
            )

    def num_blocks(self, num_elements: int) -> int:
        """The number of blocks in the first ``num_elements``: whole granules, or all elements."""
        full, rest = divmod(num_elements, self._size)
        return full * self._blocks_per_granule + -(-rest // self.block)

    def cut(self, elements: Tensor) -> list[Tensor]:
        """Views of the full granules [n, size], and of the last one [1, rest] if it is shorter."""
        return self._cut(elements.reshape(-1), self._size)

    def cut_scales(self, scales: Tensor) -> list[Tensor]:
        """The scales of each tensor that `cut` returns."""
        return self._cut(scales.reshape(-1), self._blocks_per_granule)

    def _cut(self, flat: Tensor, per_granule: int) -> list[Tensor]:
        num_full = local_of(self.parameter).numel() // self._size * per_granule
        parts = [flat[:num_full].view(-1, per_granule), flat[num_full:].view(1, -1)]
        return [part for part in parts if part.numel()]

    def scales(self) -> Tensor:
        """Zeros as scales: one for each block, on the rank that has the block."""
        local = local_of(self.parameter)
        num_blocks = self.num_blocks(local.numel())
        zeros = torch.zeros(num_blocks, dtype=torch.float32, device=local.device)
        sharding = self.sharding
        if sharding is None:
            return zeros.view(self.shape)
        if not isinstance(sharding, RunSharding):  # chunks of rows; each row has a row of scales
            assert isinstance(self.parameter, DTensor)
            return DTensor.from_local(
                zeros.view(-1, self._blocks_per_granule),
                self.parameter.device_mesh,
                self.parameter.placements,
                run_check=False,
                shape=torch.Size(self.shape),
                stride=(self._blocks_per_granule, 1),
            )
        spec = ParameterSpec((sharding.name,), self.shape, "float32", 4, trainable=False)
        extent = ParameterExtent(spec, 0)
        layout = _ScaleLayout((extent,), sharding.mesh.size, prod(self.shape), granules=self)
        name = f"{sharding.label} scales"
        return ShardedTensor(zeros, RunSharding(layout, extent, sharding.mesh, name, sharding.unit))


def _check_uncut(parameter: Tensor, what: str) -> None:
    """Raise a PlanError if ranks may divide a block of ``parameter``."""
    sharding = sharding_of(parameter)
    if sharding is None:
        if isinstance(parameter, DTensor):
            raise PlanError(
                f"{what}: Adam8bit supports no DTensors except those that fully_shard makes"
            )
        return
    granularity = sharding.extent.parameter.granularity
    if sharding.tensor_parallel is not None or (isinstance(granularity, Dim) and granularity.dim):
        raise PlanError(
            f"{sharding.name}: cut along another dim than the first, but Adam8bit needs whole rows "
            "on each rank; give its group state_bits=32"
        )
    if granularity == "element":
        raise PlanError(
            f"{sharding.name}: cut by element, so blocks of 8-bit states would depend on the "
            'number of ranks; pass granularity="row", or sw.block(n) for n rows, to fully_shard, '
            "or give its group state_bits=32"
        )

"""Adam with states in 8 bits, quantized in blocks that no cut between ranks divides."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.blockwise import Blocks
from shardwise.errors import CheckpointError, PlanError
from shardwise.optim.owner_optimizer import check_state_dict, local_part
from shardwise.plan.granularity import Dim
from shardwise.plan.layout import Layout, ParameterExtent, ParameterSpec, Run
from shardwise.tensor.sharded_tensor import RunSharding, ShardedTensor
from shardwise.tensor.sharding import Sharding, sharding_of

__all__ = ["Adam8bit"]

_Group = dict[str, Any]
_BITS = (8, 32)
_QUANTIZED = {"exp_avg": "dynamic", "exp_avg_sq": "dynamic_unsigned"}
_SCALES = {f"{name}_scale": name for name in _QUANTIZED}


class Adam8bit(Optimizer):
    """AdamW whose two averages take a byte for each element, and a scale for each block.

    A step reads them, computes in single precision, element by element, and quantizes the results.
    Blocks begin anew with each granule of a parameter (``granularity="row"``, `sw.block(n)`,
    "tensor" or "dim" of `fully_shard`), so a state has the same bits at any number of ranks, and
    a checkpoint fits them all. A granule that ``block`` divides wastes no scales.

    Args:
        params: parameters or groups; a group may have its own options. ``state_bits=32`` keeps the
            states of a group in float32, as is recommended for embeddings.
        lr: learning rate.
        betas: of the averages of gradients and of their squares.
        eps: added to the root of the second.
        weight_decay: as in AdamW, or added to gradients without ``decoupled_weight_decay``.
        decoupled_weight_decay: whether weights decay apart from the gradient's step.
        block: elements of a block.
        min_elements: parameters with fewer keep float32 states, in any granularity; so do vectors,
            of which a rank may hold any part, so that each element would need a scale.
        state_bits: 8 or 32.

    Raises:
        PlanError: an option is not valid, or a parameter is cut by element.

    Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021 (arXiv 2110.02861).
    """

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

    def add_param_group(self, param_group: _Group) -> None:
        """As in torch.

        Raises:
            PlanError: ``state_bits`` or ``block`` is not valid, or blocks of a parameter would be
                cut.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check(group, len(self.param_groups) - 1)
        except PlanError:
            self.param_groups.pop()
            raise

    def _check(self, group: _Group, number: int) -> None:
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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def load_state_dict(self, state_dict: Any) -> None:
        """As in torch, which would cast the states to the dtype of their parameters.

        Raises:
            CheckpointError: the states are quantized in other blocks, or of another kind of
                optimizer, or of one process.
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
        """Memory for a state of a checkpoint that is not cut as its parameter is.

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
            self._begin(parameter, group)
        state["step"] += 1
        assert parameter.grad is not None
        local, gradient = local_part(parameter), local_part(parameter.grad).float()
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

    def _begin(self, parameter: Tensor, group: _Group) -> None:
        is_quantized = self._is_quantized(parameter, group)
        if is_quantized:  # the parameter may have been sharded since it was added
            _check_uncut(parameter, "a parameter")
        state = self.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32)
        for name in _QUANTIZED:
            dtype = torch.uint8 if is_quantized else torch.float32
            contiguous = parameter if isinstance(parameter, DTensor) else parameter.contiguous()
            state[name] = torch.zeros_like(contiguous, dtype=dtype, requires_grad=False)
            if is_quantized:
                granules = _Granules(parameter, group["block"])
                state[f"{name}_scale"] = granules.scales()
                self._write(granules, name, torch.zeros(()).expand(local_part(parameter).shape))

    def _read(self, granules: "_Granules", name: str) -> Tensor:
        """A state in float32, this rank's elements."""
        codes = local_part(self.state[granules.parameter][name])
        if codes.dtype is not torch.uint8:
            return codes
        blocks = Blocks(_QUANTIZED[name], granules.block)
        parts = self._quantized_parts(granules, name)
        numbers = [blocks.dequantize(*part).reshape(-1) for part in parts]
        return torch.cat([codes.new_empty(0, dtype=torch.float32), *numbers]).view(codes.shape)

    def _write(self, granules: "_Granules", name: str, numbers: Tensor) -> None:
        if local_part(self.state[granules.parameter][name]).dtype is not torch.uint8:
            return  # `numbers` are the state
        blocks = Blocks(_QUANTIZED[name], granules.block)
        into = self._quantized_parts(granules, name)
        for part, (codes, scales) in zip(granules.cut(numbers), into, strict=True):
            new_codes, new_scales = blocks.quantize(part)
            codes.copy_(new_codes)
            scales.copy_(new_scales)

    def _quantized_parts(self, granules: "_Granules", name: str) -> list[tuple[Tensor, Tensor]]:
        """The codes of a state with their scales, in the parts of `_Granules.cut`."""
        state = self.state[granules.parameter]
        codes = granules.cut(local_part(state[name]))
        scales = granules.cut_scales(local_part(state[f"{name}_scale"]))
        return list(zip(codes, scales, strict=True))


# -- blocks in parameters ------------------------------------------------------------------------


@dataclass(frozen=True)
class _ScaleLayout(Layout):
    """Of the scales of a parameter's blocks: a rank has those of its elements."""

    granules: "_Granules | None" = None

    def __post_init__(self) -> None:
        """Its runs are not equal parts of a buffer."""

    def run(self, extent: ParameterExtent, rank: int) -> Run:  # noqa: ARG002
        granules = self.granules
        assert granules is not None
        assert granules.sharding is not None
        own = granules.sharding.layout.run(granules.sharding.extent, rank)
        return Run(granules.num_blocks(own.start), granules.num_blocks(own.stop))


class _Granules:
    """A parameter's elements on this rank as granules, of which all but the last are full."""

    def __init__(self, parameter: Tensor, block: int) -> None:
        self.parameter = parameter
        self.block = block
        self.sharding: Sharding | None = sharding_of(parameter)
        size = parameter.numel()
        if self.sharding is not None:
            spec = self.sharding.extent.parameter
            in_rows = isinstance(spec.granularity, Dim)
            size = prod(spec.shape[1:]) if in_rows else spec.granule_elements
        self._size = max(1, size)  # of a parameter without elements, too
        self._per_granule = -(-self._size // block)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the scales of all blocks: a row for each granule, if these are of the same size."""
        num_elements = self.parameter.numel()
        if num_elements % self._size:
            return (self.num_blocks(num_elements),)
        return (num_elements // self._size, self._per_granule)

    def check_fit(self, saved: Sequence[int]) -> None:
        """Raise a CheckpointError if scales of the shape ``saved`` are of other blocks."""
        if tuple(saved) != self.shape:
            name = "a parameter" if self.sharding is None else self.sharding.name
            raise CheckpointError(
                f"{name}: the checkpoint's 8-bit states have scales of shape {list(saved)}, "
                f"expected {list(self.shape)}: they were quantized in other blocks; shard with the "
                "granularity, and build Adam8bit with the block, of the run that saved them, or "
                "load without optimizer="
            )

    def num_blocks(self, stop: int) -> int:
        """Of elements [0, stop), which are full granules, or all elements."""
        full, rest = divmod(stop, self._size)
        return full * self._per_granule + -(-rest // self.block)

    def cut(self, elements: Tensor) -> list[Tensor]:
        """Full granules [n, size] as one tensor, and the last one [1, rest], of a view."""
        flat = elements.reshape(-1)
        num_full = len(flat) // self._size * self._size
        parts = [flat[:num_full].view(-1, self._size), flat[num_full:].view(1, -1)]
        return [part for part in parts if part.numel()]

    def cut_scales(self, scales: Tensor) -> list[Tensor]:
        """The scales of each of `cut`."""
        flat = scales.reshape(-1)
        num_full = local_part(self.parameter).numel() // self._size * self._per_granule
        parts = [flat[:num_full].view(-1, self._per_granule), flat[num_full:].view(1, -1)]
        return [part for part in parts if part.numel()]

    def scales(self) -> Tensor:
        """Zeros, one for each block, on the rank that has the block."""
        local = local_part(self.parameter)
        own = sum(part.shape[0] * -(-part.shape[1] // self.block) for part in self.cut(local))
        zeros = torch.zeros(own, dtype=torch.float32, device=local.device)
        sharding = self.sharding
        if sharding is None:
            return zeros.view(self.shape)
        if not isinstance(sharding, RunSharding):  # chunks of rows: scales have as many
            assert isinstance(self.parameter, DTensor)
            return DTensor.from_local(
                zeros.view(-1, self._per_granule),
                self.parameter.device_mesh,
                self.parameter.placements,
                run_check=False,
                shape=torch.Size(self.shape),
                stride=(self._per_granule, 1),
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
                f"{what}: Adam8bit does not know DTensors that fully_shard has not made"
            )
        return
    granularity = sharding.extent.parameter.granularity
    if sharding.tensor_parallel is not None or (isinstance(granularity, Dim) and granularity.dim):
        raise PlanError(
            f"{sharding.name}: Adam8bit needs whole rows on a rank, and this is cut along other "
            "dims than the first; give its group state_bits=32"
        )
    if granularity == "element":
        raise PlanError(
            f"{sharding.name}: cut by element, so blocks of 8-bit states would differ between "
            'numbers of ranks; pass granularity="row", or sw.block(n) for n rows, to fully_shard, '
            "or give its group state_bits=32"
        )

"""`full_tensors`: the whole tensors of a sharded model, in bounded memory."""

import contextlib
from collections.abc import Collection, Container, Generator, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardwise.checkpoint.adapters import Adapted, adapted_weights, alone, merge
from shardwise.checkpoint.collect import (
    check_kinds,
    check_sharded,
    check_storable,
    checkpoint_mesh,
    tensors_of,
)
from shardwise.checkpoint.coordination import coordinated
from shardwise.checkpoint.matching import without_adapter_names
from shardwise.errors import PlanError
from shardwise.runtime.engine import HANDLE, Handle
from shardwise.weights.gather import Output, Ranks, Source, gather_buckets
from shardwise.weights.updates import TensorInfo

__all__ = ["BUCKET_BYTES", "Adapters", "describe", "full_tensors", "outputs_of", "ranks_of"]

BUCKET_BYTES = 256 << 20
Adapters = Literal["merged", "alone"] | None


def full_tensors(
    model: nn.Module,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    names: Sequence[str] | None = None,
    to: int | Literal["all"] = "all",
    adapters: Adapters = None,
) -> Generator[tuple[str, Tensor], None, None]:
    """Iterate over the whole parameters and persistent buffers of a sharded model.

    The names and values are those that `sw.save` writes: a tied tensor comes once, buffers have the
    values of the first rank, and tensor- and expert-parallel parts are joined. Every rank must call
    this between steps, with the same arguments, and iterate. The next tensors are gathered while
    the caller uses these.

    A rank that leaves the loop early, by ``break`` or an exception, takes part in the gathers of
    the others until all have left or the last bucket is gathered.

    Args:
        model: sharded by `fully_shard`, or not sharded.
        bucket_bytes: a receiver holds at most twice as many bytes besides its shards, unless a
            single tensor has more than two thirds of a bucket. A tensor that the caller keeps is
            not counted. Other ranks hold at most their part of two buckets.
        dtype: floating-point tensors are cast to it before they are sent; None sends them in the
            dtype of the shards.
        names: fnmatch patterns of the names to yield; None yields all. A tied tensor comes under
            its first name if any of its names matches.
        to: ``"all"``, or the global rank of the only receiver. On the other ranks the iterator
            yields nothing: the loop takes part in the gathers and its body does not run.
        adapters: of a peft model with LoRA: None yields weights and adapters as they are,
            ``"merged"`` yields the weights with the active adapter added, under the names of the
            model without adapters, and ``"alone"`` yields the adapters under the names in peft's
            files. These two raise an error if they would leave out anything that is trained. Only
            ``"merged"`` dequantizes weights that bitsandbytes has packed in 4 bits.

    Yields:
        The name, and a tensor on the device of the model, which the caller may change. It views the
        memory of its bucket: ``clone()`` a small one to keep it.

    Raises:
        CheckpointError: a parameter is gathered, or has no elements that can be sent; or ranks pass
            different arguments.
        PlanError: an argument is invalid.
        StepError: another rank raised, or is lost.
    """
    check_kinds("full_tensors", model, None)
    ranks = ranks_of(model, to)
    outputs = outputs_of(model, dtype, names, adapters)
    action = f"gather {describe(outputs)} to {to} by {bucket_bytes} bytes"
    with coordinated(ranks.mesh, model, ranks.device, "sw.full_tensors", action):
        pass
    return _one_by_one(gather_buckets(outputs, ranks, bucket_bytes))


def describe(outputs: Sequence[Output]) -> list[tuple[object, ...]]:
    """What ranks must agree on."""
    return [(one.name, [x.num_bytes for x in one.sources], one.setting) for one in outputs]


def _one_by_one(
    buckets: Generator[list[tuple[str, Tensor]], None, None],
) -> Generator[tuple[str, Tensor], None, None]:
    with contextlib.closing(buckets):
        for bucket in buckets:
            while bucket:
                yield bucket.pop(0)


def ranks_of(model: nn.Module, to: int | Literal["all", "first"]) -> Ranks:
    """The ranks that hold a part of ``model``, and their device; ``"first"`` is the first one."""
    mesh = checkpoint_mesh([model])
    handles: list[Handle] = [vars(m)[HANDLE] for m in model.modules() if HANDLE in vars(m)]
    device = handles[0].runtime.pools.device if handles else None
    if device is None:  # not sharded
        plain = next((p.device for p in model.parameters()), torch.device("cpu"))
        device = mesh.accelerator or plain
    ranks = Ranks(mesh, device, mesh.global_ranks[0] if to == "first" else to)
    if ranks.to != "all" and ranks.to not in ranks.members:
        raise PlanError(f"to={to!r}: expected 'all' or one of the model's ranks {ranks.members}")
    return ranks


@torch.no_grad()
def outputs_of(
    model: nn.Module, dtype: torch.dtype | None, names: Sequence[str] | None, adapters: Adapters
) -> list[Output]:
    """The selected tensors of ``model``, in the order of its state dict.

    Raise a CheckpointError if one is gathered, or has no elements that can be sent, and a PlanError
    if ``dtype``, ``names`` or ``adapters`` do not fit the model.
    """
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise PlanError(f"dtype={dtype!r}: expected a floating-point dtype, such as torch.bfloat16")
    check_sharded(model)
    found = tensors_of(model)
    tensors, aliases = found.tensors, dict(found.aliases)
    packed = {name for name, tensor in tensors.items() if packing_of(tensor) is not None}
    if adapters is None:
        outputs = [  # the scales of packed weights are not cast
            _output(name, tensor, None if describes_packed(name, packed) else dtype)
            for name, tensor in tensors.items()
        ]
    elif adapters == "alone":
        own_names = alone(tensors, _adapter_of(model))
        _check_alone(tensors, {*own_names.values()}, _adapter_of(model))
        outputs = [_output(name, tensors[own], dtype) for name, own in own_names.items()]
    elif adapters == "merged":
        tensors = {n: tensor for n, tensor in tensors.items() if not describes_packed(n, packed)}
        adapted = adapted_weights(tensors, _adapter_of(model))
        _check_merges(tensors, adapted.values(), _adapter_of(model))
        outputs = [
            _merged(name, one, model, tensors, dtype)
            if one.low or one.weight in packed
            else _output(name, tensors[one.weight], dtype)
            for name, one in adapted.items()
        ]
        aliases = {
            without_adapter_names(alias): without_adapter_names(name)
            for alias, name in aliases.items()
        }
    else:
        raise PlanError(f"adapters={adapters!r}: expected None, 'merged' or 'alone'")
    if names is not None:
        if isinstance(names, str):
            raise PlanError(f"names={names!r}: expected a list of patterns, such as [{names!r}]")
        outputs = _selected(outputs, list(names), aliases)
    for output in outputs:
        for source in output.sources:
            check_storable(output.name, source.tensor)
    return outputs


def _selected(
    outputs: Sequence[Output], patterns: Sequence[str], aliases: Mapping[str, str]
) -> list[Output]:
    """The outputs one of whose names matches one of ``patterns``; tied tensors have several."""
    names = {one.name: [one.name] for one in outputs}
    for alias, name in aliases.items():
        if name in names:
            names[name].append(alias)
    chosen: set[str] = set()
    for pattern in patterns:
        matched = {n for n, own in names.items() if any(fnmatchcase(x, pattern) for x in own)}
        if not matched:
            raise PlanError(f"names={patterns}: no tensor has the name {pattern!r}")
        chosen |= matched
    return [one for one in outputs if one.name in chosen]


def _output(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Output:
    return Output(name, [Source(tensor, _cast(tensor, dtype))])


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    is_cast = tensor.is_floating_point() and packing_of(tensor) is None
    return dtype if dtype is not None and is_cast else tensor.dtype


# -- adapters ------------------------------------------------------------------------------------


def _adapter_of(model: nn.Module) -> str:
    """The name of the only active adapter."""
    active = getattr(model, "active_adapters", [])
    if len(active) != 1:
        raise PlanError(
            f"adapters=: expected a peft model with one active adapter, got {list(active)}; call "
            "model.set_adapter(name) first"
        )
    name: str = active[0]
    return name


def _merged(
    name: str, one: Adapted, model: nn.Module, tensors: dict[str, Tensor], dtype: torch.dtype | None
) -> Output:
    """A weight of the model without adapters: dequantized, and with the adapter added.

    The sum has the dtype of the weight; if that was packed, also the adapter's if it is wider.
    """
    weight, packing = tensors[one.weight], packing_of(tensors[one.weight])
    shape, own = (weight.shape, weight.dtype) if packing is None else (packing.shape, packing.dtype)
    sources = [tensors[part] for part in (one.weight, one.low, one.high) if part]
    allocated = [] if packing is None else [own]
    total, setting = own, None
    if one.low:
        setting = _adapter_and_scaling(name, one, model, own)
        kind = sources[1].dtype
        allocated.append(kind)  # the product
        if packing is not None and kind != own:
            total = torch.promote_types(own, kind)
            allocated.append(total)
    final = own if dtype is None else dtype
    if final != total:
        allocated.append(final)
    return Output(
        name,
        [Source(tensor, tensor.dtype) for tensor in sources],
        partial(_merge_and_cast, packing, None if setting is None else setting[1], total, final),
        prod(shape) * sum(kind.itemsize for kind in allocated),
        TensorInfo(tuple(shape), final),
        setting,
    )


def _adapter_and_scaling(
    name: str, one: Adapted, model: nn.Module, dtype: torch.dtype
) -> tuple[str, float]:
    """The adapter to add to a weight of ``dtype`` and its factor, or a PlanError."""
    layer: Any = model.get_submodule(one.layer)
    adapter = _adapter_of(model)
    if layer.merged_adapters:
        raise PlanError(
            f"{name}: an adapter has been added to it already; call model.unmerge_adapter() in "
            "sw.gathered(model, write_back=True), or pass adapters=None"
        )
    if layer.use_dora.get(adapter) or getattr(layer, "fan_in_fan_out", False):
        raise PlanError(
            f"{name}: only plain LoRA of linear layers can be merged; pass adapters=None"
        )
    if not dtype.is_floating_point:
        raise PlanError(
            f"{name}: an adapter cannot be added to {dtype}; pass adapters=None, or 'alone'"
        )
    return adapter, layer.scaling[adapter]


def _check_merges(tensors: Collection[str], adapted: Iterable[Adapted], adapter: str) -> None:
    """Raise a PlanError if the model has parts of ``adapter`` that `merge` does not know."""
    merged = {name for one in adapted for name in (one.low, one.high)}
    for name in tensors:
        is_other = ".modules_to_save." in name
        if is_other or (_belongs_to(adapter, name) and name not in merged):
            raise PlanError(
                f"{name}: only plain LoRA of linear layers can be merged; pass adapters=None, or "
                "'alone'"
            )


def _check_alone(tensors: Mapping[str, Tensor], own: Collection[str], adapter: str) -> None:
    """Raise a PlanError if other tensors than ``own`` are trained, or belong to ``adapter``."""
    for name, tensor in tensors.items():
        if name not in own and (tensor.requires_grad or _belongs_to(adapter, name)):
            raise PlanError(
                f"{name}: adapters='alone' yields only LoRA and modules_to_save, and would leave "
                "out this trained tensor; pass adapters=None"
            )


def _belongs_to(adapter: str, name: str) -> bool:
    """Whether a tensor is part of an adapter, as in ``"lora_A.default.weight"``."""
    return adapter in name.split(".")[-2:]  # further left, it may be a module of the model


@torch.no_grad()
def _merge_and_cast(
    packing: Any,
    scaling: float | None,
    total: torch.dtype,
    final: torch.dtype,
    parts: Sequence[Tensor],
) -> Tensor:
    weight = parts[0] if packing is None else dequantize(parts[0], packing).to(total)
    if scaling is not None:
        merge(weight, parts[1], parts[2], scaling)
    return weight.to(final)


# -- 4-bit weights of bitsandbytes: codes that are packed into other elements --------------------


def packing_of(tensor: Tensor) -> Any:
    """How the codes in ``tensor`` are packed: bitsandbytes' QuantState; None if it has none."""
    return getattr(tensor, "quant_state", None)


def describes_packed(name: str, packed: Container[str]) -> bool:
    """Whether ``name`` is what a state dict has of the packing of a weight, such as its scales."""
    layer, _, part = f".{name}".partition(".weight.")
    return bool(part) and f"{layer}.weight".removeprefix(".") in packed


def dequantize(codes: Tensor, packing: Any) -> Tensor:
    functional: Any = import_module("bitsandbytes.functional")
    values: Tensor = functional.dequantize_4bit(codes, packing)
    return values

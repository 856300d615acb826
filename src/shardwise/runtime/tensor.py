"""A parameter, gradient or optimizer state of which this rank holds one run of elements.

To the user it is the whole tensor (`.shape`, `.ndim`, `.numel()` are global); what is stored is
``to_local()``, 1-D. Three kinds of operations work on it, and everything else is refused:

- *element-wise* ones, ``foreach`` and ``fused`` optimizer kernels included, run on the runs;
- *reductions* (norm, sum, mean, max, min, all, any) combine the runs of all ranks, so every rank
  has to call them;
- *copies* (clone, detach, zeros_like, to, copy_);
- *random numbers in place* (normal_, uniform_, so the functions of ``torch.nn.init``) are those
  that one process would draw for the whole: every rank draws all and keeps its own.
"""

import copy
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.utils import _pytree as pytree

from shardwise.errors import ShardedTensorError
from shardwise.plan.layout import Layout, ParameterExtent, Run
from shardwise.runtime.distributed_checkpoint import chunks_of, items_of
from shardwise.runtime.mesh import DataParallelMesh
from shardwise.runtime.reductions import across, combine, gather_runs, norms
from shardwise.transport.device import random_states

__all__ = [
    "ShardedTensor",
    "Sharding",
    "apply_gradient_hooks",
    "draws",
    "run_accumulated_hooks",
    "written_tensors",
]


@dataclass(frozen=True, eq=False)
class Sharding:
    """How one parameter lies on the ranks of an axis; shared by its gradient and its states."""

    layout: Layout
    extent: ParameterExtent
    axis: DataParallelMesh

    @property
    def name(self) -> str:
        return self.extent.parameter.name

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.extent.parameter.shape)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The elements that each rank holds."""
        return self.layout.runs(self.extent)

    @property
    def run(self) -> Run:
        """The elements that this rank holds."""
        return self.layout.run(self.extent, self.axis.rank)

    def matches(self, other: "Sharding") -> bool:
        """Whether tensors of both have the same elements on the same ranks."""
        return self is other or (
            self.axis.is_same(other.axis) and self.shape == other.shape and self.runs == other.runs
        )


class ShardedTensor(torch.Tensor):
    """A tensor of ``sharding.shape`` of which ``local`` [run] is here.

    Made by `shardwise.fully_shard`. ``requires_grad``, names and ``.grad`` are as for any tensor.
    """

    _local: Tensor
    _sharding: Sharding
    steps_in_backward = False  # its gradient is gone when backward is over

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: "type[ShardedTensor]",
        local: Tensor,
        sharding: Sharding,
        *,
        requires_grad: bool = False,
    ) -> "ShardedTensor":
        assert local.shape == (len(sharding.run),), f"{sharding.name}: {tuple(local.shape)}"
        self: ShardedTensor = torch.Tensor._make_wrapper_subclass(
            cls, sharding.shape, dtype=local.dtype, device=local.device, requires_grad=requires_grad
        )
        self._local = local
        self._sharding = sharding
        return self

    def to_local(self) -> Tensor:
        """This rank's elements: 1-D, a run of the row-major tensor, sharing its memory."""
        return self._local

    def full_tensor(self) -> Tensor:
        """The whole tensor, the same on every rank; all ranks have to call this."""
        with torch.no_grad():
            runs, axis = self._sharding.runs, self._sharding.axis
            padded = gather_runs(self._local.detach(), runs, axis, self._sharding.name)
            pieces = [row[: len(run)] for row, run in zip(padded, runs, strict=True)]
            return torch.cat(pieces).view(self._sharding.shape)

    @property
    def sharding(self) -> Sharding:
        """Which elements are on which rank."""
        return self._sharding

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One for each dimension of `device_mesh`, as a DTensor has; runs may cut rows, though."""
        axis = self._sharding.axis
        inner: Placement = Shard(0) if axis.size > 1 or axis.num_ranks == 1 else Replicate()
        if axis.mesh is None or axis.mesh.ndim == 1:
            return (inner,)
        return (inner if axis.size == axis.num_ranks else Replicate(), inner)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that was passed to `fully_shard`, or one of all ranks.

        Raises:
            ShardedTensorError: there is no process group.
        """
        axis = self._sharding.axis
        if axis.mesh is not None:
            return axis.mesh
        if axis.group is None:
            raise ShardedTensorError(f"{self._sharding.name}: one process alone has no mesh")
        return DeviceMesh.from_group(axis.group, self.device.type)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        run, axis = self._sharding.run, self._sharding.axis
        return (
            f"ShardedTensor({self._sharding.name}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device={self.device}, elements {run.start}:{run.stop} on rank {axis.rank} of "
            f"{axis.size})"
        )

    # What `torch.distributed.checkpoint` asks of tensors that are on several ranks.

    def __create_write_items__(self, fqn: str, object: Any) -> list[object]:  # noqa: A002
        return items_of(fqn, self.shape, self._sharding.run, self._local)

    def __create_chunk_list__(self) -> list[object]:
        return [chunk for chunk, _ in self._chunks()]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return next(part for chunk, part in self._chunks() if chunk.offsets == index.offset)

    def _chunks(self) -> list[tuple[Any, Tensor]]:
        return chunks_of(self.shape, self._sharding.run, self._local.detach())

    def __tensor_flatten__(self) -> tuple[list[str], Sharding]:
        return ["_local"], self._sharding

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor],
        sharding: Sharding,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
    ) -> "ShardedTensor":
        return ShardedTensor(inner["_local"], sharding)

    def rebind(self, local: Tensor) -> None:
        """Let ``local``, of the same length and dtype, hold this rank's elements."""
        assert local.shape == self._local.shape
        assert local.dtype == self._local.dtype
        self._local = local

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) in memo:
            known: Tensor = memo[id(self)]
            return known
        local = self._local.detach().clone()
        twin: Tensor = ShardedTensor(local, self._sharding, requires_grad=self.requires_grad)
        if isinstance(self, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=self.requires_grad)
        if self.grad is not None:
            twin.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ShardedTensorError(
            f"{self._sharding.name}: a ShardedTensor cannot be pickled, for a rank has only "
            "a part of it; save `full_tensor()`, or the state dict under `sw.gathered(model)`"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: torch._ops.OpOverload,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        base = func.overloadpacket.__name__
        if base in _REDUCTIONS:
            return _reduce(func, *args, **kwargs)
        if base == "_foreach_norm":
            return _foreach_norm(*args, **kwargs)
        if base == "_amp_foreach_non_finite_check_and_unscale_":
            return _unscale(func, *args, **kwargs)
        if draws(func):
            return _draw(func, *args, **kwargs)
        if _works_on_runs(func, base) or _is_masked_fill(base, *args):
            return _on_runs(func, base, args, kwargs)
        if base in _SAME_SHAPE and tuple(args[1]) == tuple(args[0].shape):
            _check_not_recorded(args[0])
            return torch.ops.aten.alias(args[0])
        sharded = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, cls)]
        raise _refusal(func, sharded[0])


def apply_gradient_hooks(parameter: Tensor, gradient: Tensor) -> Tensor:
    """What the hooks that the user registered on ``parameter`` make of its gradient."""
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def run_accumulated_hooks(parameter: Tensor) -> None:
    """Call the user's hooks for a gradient that has been accumulated."""
    for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(parameter)


_WAY_OUT = (
    "use .full_tensor() for the whole, .to_local() for this rank's run, or `sw.gathered(model)`; "
    "in a forward it means that the module was not called through its unit"
)

# Not tagged as element-wise by torch, but they are, or make a tensor of the same shape.
_LIKE_ELEMENTWISE = {
    "_to_copy", "alias", "clone", "copy_", "detach", "detach_", "empty_like", "fill_", "full_like",
    "lift_fresh", "masked_fill", "masked_fill_", "ones_like", "zero_", "zeros_like",
}  # fmt: skip
_RANDOM = {
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_",
    "uniform_",
}  # fmt: skip
_SAME_SHAPE = {"view", "_unsafe_view", "reshape", "expand", "view_as"}
_NOT_ELEMENTWISE_BY_RANK = {"bernoulli", "dropout", "native_dropout", "rand_like"}


def _check_not_recorded(x: Tensor) -> None:
    """Refuse to reveal the AccumulateGrad node of a sharded parameter, which never runs.

    Zero-bubble pipeline schedules and others find it through a view of the parameter's own shape.
    """
    if isinstance(x, ShardedTensor) and x.requires_grad and torch.is_grad_enabled():
        raise ShardedTensorError(
            f"{x._sharding.name}: autograd would record a view of a sharded parameter, which gets "
            "its gradient from its unit and not from autograd. Take the view under "
            "torch.no_grad(); register hooks with register_post_accumulate_grad_hook; instead of a "
            "zero-bubble or ZBV pipeline schedule use Schedule1F1B or ScheduleInterleaved1F1B"
        )


def _works_on_runs(func: torch._ops.OpOverload, base: str) -> bool:
    if base in _NOT_ELEMENTWISE_BY_RANK:
        return False
    return (
        torch.Tag.pointwise in func.tags
        or base in _LIKE_ELEMENTWISE
        or base.startswith(("_foreach_", "_fused_ada", "_fused_sgd"))
    )


def _draw(
    func: torch._ops.OpOverload, x: ShardedTensor, *args: Any, **kwargs: Any
) -> ShardedTensor:
    """Fill ``x`` with the random numbers that one process would.

    Raises:
        ShardedTensorError: the generators of ranks differ, so that each would draw something else.
    """
    axis, run = x._sharding.axis, x._sharding.run
    generator = kwargs.get("generator")
    state = random_states(x.device)[-1] if generator is None else generator.get_state()
    digest = torch.tensor(zlib.crc32(bytes(state.tolist())))
    digests = across([digest], axis, axis.world).view(-1).tolist()
    if axis.backend("cpu") != "fake" and len(set(digests)) > 1:
        raise ShardedTensorError(
            f"{x._sharding.name}: {func} on ranks whose generators are in different states would "
            "make one tensor of several; call torch.manual_seed with one seed on every rank before"
        )
    whole = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    func(whole, *args, **kwargs)
    x._local.copy_(whole.view(-1)[run.start : run.stop])
    torch.autograd.graph.increment_version(x)
    return x


def _is_masked_fill(base: str, *args: Any) -> bool:
    """Whether it is ``x[mask] = number``, with a mask that is cut as ``x`` is."""
    if base not in ("index_put", "index_put_"):
        return False
    indices, value = args[1], args[2]
    masks = [x for x in indices if isinstance(x, ShardedTensor) and x.dtype is torch.bool]
    return len(masks) == len(indices) == 1 and value.numel() == 1


def _on_runs(
    func: torch._ops.OpOverload, base: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run ``func`` on the local runs and wrap what comes out."""
    leaves, tree = pytree.tree_flatten((list(args), dict(kwargs)))
    shardings = [x._sharding for x in leaves if isinstance(x, ShardedTensor)]
    written = written_tensors(func, args, kwargs)
    lists = base.startswith("_f")  # `foreach` and `fused` kernels: one sharding for each entry
    if not lists:
        for sharding in shardings[1:]:
            _check_matches(func, shardings[0], sharding)
        if not all(isinstance(x, ShardedTensor) for x in written):
            raise ShardedTensorError(
                f"{func} would write {shardings[0].name}, which is sharded, into a tensor that is "
                "not; use .full_tensor()"
            )
    local = [_to_run(func, x, None if lists else shardings[0]) for x in leaves]
    local_args, local_kwargs = pytree.tree_unflatten(local, tree)
    if lists:
        _check_lists(func, args)
    result = func(*local_args, **local_kwargs)
    if func._schema.is_mutable:
        for x in written:
            if isinstance(x, ShardedTensor):
                torch.autograd.graph.increment_version(x)
        return None if lists else written[0]
    if lists:
        return [
            ShardedTensor(local, x._sharding) if isinstance(x, ShardedTensor) else local
            for local, x in zip(result, args[0], strict=True)
        ]
    return pytree.tree_map_only(Tensor, lambda t: ShardedTensor(t, shardings[0]), result)


def _to_run(func: torch._ops.OpOverload, x: Any, sharding: Sharding | None) -> Any:
    """``x`` as the kernel on a run wants it."""
    if isinstance(x, ShardedTensor):
        return x._local
    if not isinstance(x, Tensor) or x.numel() == 1 or sharding is None:
        return x
    if x.ndim <= len(sharding.shape) and _broadcasts(x.shape, sharding.shape):
        run = sharding.run
        return x.expand(sharding.shape).reshape(-1)[run.start : run.stop]
    raise ShardedTensorError(
        f"{func}: a tensor of shape {tuple(x.shape)} does not fit {sharding.name} of shape "
        f"{tuple(sharding.shape)}, of which this rank has a shard; {_WAY_OUT}"
    )


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    trailing = list(to)[len(to) - len(shape) :]
    return all(size in (1, wanted) for size, wanted in zip(shape, trailing, strict=True))


def _check_matches(func: torch._ops.OpOverload, one: Sharding, other: Sharding) -> None:
    if not one.matches(other):
        raise ShardedTensorError(
            f"{func}: {one.name} of shape {tuple(one.shape)} and {other.name} of shape "
            f"{tuple(other.shape)} are cut differently; use full_tensor() on both"
        )


def _check_lists(func: torch._ops.OpOverload, args: Sequence[Any]) -> None:
    """Entries that are combined must be cut alike; entry i of every list belongs together."""
    cls: type[Tensor] = ShardedTensor
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and len(arg) == len(args[0])]
    for entries in zip(*lists, strict=True):
        sharded = [x for x in entries if isinstance(x, ShardedTensor)]
        for x in sharded[1:]:
            _check_matches(func, sharded[0]._sharding, x._sharding)
        for x in entries:
            is_plain = isinstance(x, Tensor) and not isinstance(x, cls)
            if sharded and is_plain and x.numel() != 1:
                raise ShardedTensorError(
                    f"{func}: {sharded[0]._sharding.name} is sharded, but a tensor of shape "
                    f"{tuple(x.shape)} that goes with it is not"
                )


def draws(func: torch._ops.OpOverload) -> bool:
    """Whether ``func`` fills a tensor with random numbers."""
    return func.overloadpacket.__name__ in _RANDOM


def written_tensors(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """The tensors that ``func`` changes."""
    changed = [
        args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [x for x in pytree.tree_leaves(changed) if isinstance(x, Tensor)]


# -- reductions ----------------------------------------------------------------------------------

_REDUCTIONS = {
    "linalg_vector_norm": "norm",
    "norm": "norm",
    "sum": "sum",
    "mean": "mean",
    "max": "max",
    "amax": "max",
    "min": "min",
    "amin": "min",
    "all": "all",
    "any": "any",
}


def _reduce(func: torch._ops.OpOverload, x: ShardedTensor, *args: Any, **kwargs: Any) -> Tensor:
    """A reduction over the whole tensor; one over some dims only is refused."""
    kind = _REDUCTIONS[func.overloadpacket.__name__]
    rest = list(args)
    order = _order(rest.pop(0)) if kind == "norm" and rest else 2.0
    dims = rest[0] if rest else kwargs.get("dim")
    num_dims = 1 if isinstance(dims, int) else len(dims or ())
    if num_dims not in (0, x.ndim) or (isinstance(dims, int) and x.ndim != 1):
        raise _refusal(func, x)
    dtype = kwargs.get("dtype")
    run = x._local if dtype is None else x._local.to(dtype)
    axis = x._sharding.axis
    return norms([run], axis, order)[0] if kind == "norm" else combine(kind, run, x.numel(), axis)


def _order(value: float | None) -> float:
    return 2.0 if value is None else float(value)


def _foreach_norm(
    tensors: Sequence[Tensor], order: float = 2, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The global norm of every tensor, in one exchange for each axis and dtype."""
    results: dict[int, Tensor] = {}
    groups: dict[tuple[int, torch.dtype], list[int]] = {}
    for i, x in enumerate(tensors):
        if isinstance(x, ShardedTensor):
            groups.setdefault((id(x._sharding.axis), x.dtype), []).append(i)
        else:
            results[i] = torch.linalg.vector_norm(x, order, dtype=dtype)
    for members in groups.values():
        sharded = [x for i in members if isinstance(x := tensors[i], ShardedTensor)]
        runs = [x._local.to(dtype or x.dtype) for x in sharded]
        found = norms(runs, sharded[0]._sharding.axis, order)
        results.update(zip(members, found, strict=True))
    return [results[i] for i in range(len(tensors))]


def _unscale(
    func: torch._ops.OpOverload, grads: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor
) -> None:
    """GradScaler's kernel: an overflow on one rank is one on all."""
    axes = {id(x._sharding.axis): x._sharding.axis for x in grads if isinstance(x, ShardedTensor)}
    func([x._local if isinstance(x, ShardedTensor) else x for x in grads], found_inf, inverse_scale)
    for axis in axes.values():
        found_inf.copy_(across([found_inf.reshape(())], axis).amax())


def _refusal(func: torch._ops.OpOverload, x: ShardedTensor) -> ShardedTensorError:
    return ShardedTensorError(
        f"{func} needs more of {x._sharding.name} {tuple(x.shape)} than this rank's shard; "
        f"{_WAY_OUT}"
    )

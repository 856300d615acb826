"""A parameter, gradient or optimizer state of which each rank stores one run of elements.

``.shape``, ``.ndim`` and ``.numel()`` describe the whole tensor; ``to_local()`` is what this rank
stores of it, 1-D. These operations are supported, and all others raise a `ShardedTensorError`:

- *element-wise* operations, ``foreach`` and ``fused`` optimizer kernels included, work on the runs;
- *reductions* over all dimensions (norm, sum, mean, max, min, all, any) combine the runs of all
  ranks, so every rank has to call them;
- *copies* (clone, detach, zeros_like, to, copy_, assigning ``.data``);
- *random numbers in place* (normal_, uniform_, hence ``torch.nn.init``) equal those of one process:
  every rank draws all of them and keeps its own.
"""

import copy
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from shardwise._private import (
    OpOverload,
    accumulated_gradient_hooks,
    disabled_torch_function,
    gradient_hooks,
    pytree,
)
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
    """Where the elements of one parameter are; shared by its gradient and its optimizer states."""

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
        """The elements that each rank stores."""
        return self.layout.runs(self.extent)

    @property
    def run(self) -> Run:
        """The elements that this rank stores."""
        return self.layout.run(self.extent, self.axis.rank)

    def matches(self, other: "Sharding") -> bool:
        """Whether tensors of both have the same elements on the same ranks."""
        return self is other or (
            self.axis.is_same(other.axis) and self.shape == other.shape and self.runs == other.runs
        )


class ShardedTensor(torch.Tensor):
    """A tensor of ``sharding.shape`` of which this rank stores ``local`` [run].

    Made by `shardwise.fully_shard`. ``requires_grad``, names and ``.grad`` are as for any tensor.
    """

    _local: Tensor
    _sharding: Sharding
    steps_in_backward = False  # the gradient is dropped before backward ends

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

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
        """This rank's elements, 1-D: a run of the row-major tensor, sharing its memory."""
        return self._local

    def full_tensor(self) -> Tensor:
        """Gather the whole tensor; every rank has to call this."""
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
        """A placement for each dimension of `device_mesh`, as of a DTensor; runs may cut rows."""
        axis = self._sharding.axis
        inner: Placement = Shard(0) if axis.size > 1 or axis.num_ranks == 1 else Replicate()
        if axis.mesh is None or axis.mesh.ndim == 1:
            return (inner,)
        return (inner if axis.size == axis.num_ranks else Replicate(), inner)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that was passed to `fully_shard`, or a mesh of all ranks.

        Raises:
            ShardedTensorError: there is no process group.
        """
        axis = self._sharding.axis
        if axis.mesh is not None:
            return axis.mesh
        if axis.group is None:
            raise ShardedTensorError(
                f"{self._sharding.name}: a model of one process has no device mesh"
            )
        return DeviceMesh.from_group(axis.group, self.device.type)

    @property
    def data(self) -> Tensor:
        """The tensor without its history; assigning a sharded or a whole tensor copies it."""
        data: Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return data

    @data.setter
    def data(self, value: Tensor) -> None:
        """Copy instead of taking the memory of ``value``, for the shard is a view of a buffer."""
        expected, got = ((x.dtype, tuple(x.shape)) for x in (self, value))
        if got != expected:
            raise ShardedTensorError(
                f"{self._sharding.name}.data: expected a tensor of {expected[0]} {expected[1]}, "
                f"got {got[0]} {got[1]}; convert the model before fully_shard"
            )
        with torch.no_grad():
            self.detach().copy_(value)

    def _refuse_memory(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise ShardedTensorError(
            f"{self._sharding.name}: this rank has no memory of the whole tensor; call "
            ".full_tensor() first, or save the model inside `with sw.gathered(model):`, or with "
            "sw.save, which gathers nothing"
        )

    # Libraries that save or share tensors, such as safetensors and transformers, ask for these.
    untyped_storage = storage = numpy = tolist = __array__ = __reduce_ex__ = _refuse_memory

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        run, axis = self._sharding.run, self._sharding.axis
        return (
            f"ShardedTensor({self._sharding.name}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device={self.device}, elements {run.start}:{run.stop} on rank {axis.rank} of "
            f"{axis.size})"
        )

    # The protocol of `torch.distributed.checkpoint` for tensors that are on several ranks.

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
        """Store this rank's elements in ``local``, of the same length and dtype."""
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

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _handler_of(func)(func, args, kwargs or {})


def apply_gradient_hooks(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Apply the hooks that the user registered on ``parameter`` to its gradient."""
    for hook in gradient_hooks(parameter):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def run_accumulated_hooks(parameter: Tensor) -> None:
    """Call the user's hooks for a gradient that has been accumulated."""
    for hook in accumulated_gradient_hooks(parameter):
        hook(parameter)


def draws(func: OpOverload) -> bool:
    """Whether ``func`` fills a tensor with random numbers."""
    return func.overloadpacket.__name__ in _RANDOM


def written_tensors(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """The tensors that ``func`` changes."""
    changed = [
        args[position] if position < len(args) else kwargs.get(name)
        for position, name in _written_arguments(func)
    ]
    return [x for x in pytree.tree_leaves(changed) if isinstance(x, Tensor)]


# -- dispatch ------------------------------------------------------------------------------------

Handler = Callable[[OpOverload, Sequence[Any], Mapping[str, Any]], Any]


@cache
def _handler_of(func: OpOverload) -> Handler:
    name = func.overloadpacket.__name__
    if name in _HANDLERS:
        return _HANDLERS[name]
    if name.startswith(("_foreach_", "_fused_ada", "_fused_sgd")):
        return _on_lists
    return _on_runs if torch.Tag.pointwise in func.tags else _refuse


@cache
def _written_arguments(func: OpOverload) -> tuple[tuple[int, str], ...]:
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _refuse(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NoReturn:
    leaves = pytree.tree_leaves((args, kwargs))
    raise _refusal(func, next(x for x in leaves if isinstance(x, ShardedTensor)))


def _refusal(
    func: OpOverload, x: ShardedTensor, why: str = "needs more than the shard of this rank"
) -> ShardedTensorError:
    return ShardedTensorError(
        f"{func} of {x._sharding.name} {tuple(x.shape)} {why}; use .full_tensor() for the whole, "
        ".to_local() for this rank's elements, or `sw.gathered(model)`; if it was raised in a "
        "forward, the module was not called through its unit"
    )


# -- element by element --------------------------------------------------------------------------


def _on_runs(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func`` on the runs of its arguments, which have to be cut in the same way."""
    leaves, tree = pytree.tree_flatten((list(args), dict(kwargs)))
    first = next(x for x in leaves if isinstance(x, ShardedTensor))
    written = written_tensors(func, args, kwargs) if func._schema.is_mutable else []
    if not all(isinstance(x, ShardedTensor) for x in written):
        raise _refusal(func, first, "would write a shard into a tensor that is not sharded")
    local_args, local_kwargs = tree.unflatten([_to_run(func, x, first) for x in leaves])
    result = func(*local_args, **local_kwargs)
    for x in written:
        torch.autograd.graph.increment_version(x)
    if written:
        return written[0]
    return pytree.tree_map_only(Tensor, lambda t: ShardedTensor(t, first._sharding), result)


def _to_run(func: OpOverload, x: Any, first: ShardedTensor) -> Any:
    """The elements of ``x`` that meet this rank's run of ``first``."""
    if isinstance(x, ShardedTensor):
        _check_matches(func, first, x)
        return x._local
    if not isinstance(x, Tensor) or x.ndim == 0:
        return x
    shape, run = first._sharding.shape, first._sharding.run
    trailing = shape[len(shape) - x.ndim :]
    broadcasts = x.ndim <= len(shape) and all(
        size in (1, wanted) for size, wanted in zip(x.shape, trailing, strict=True)
    )
    if not broadcasts:
        raise _refusal(func, first, f"with a tensor of shape {tuple(x.shape)}")
    if x.numel() == 1:
        return x.reshape(1)
    return x.expand(shape).reshape(-1)[run.start : run.stop]


def _alias(func: OpOverload, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> ShardedTensor:
    """As `_on_runs`, which is slower: every `nn.Parameter` and every optimizer step calls this."""
    return ShardedTensor(func(args[0]._local), args[0]._sharding)


def _on_lists(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`foreach` and `fused` kernels: entry i of every list belongs to the same parameter."""
    _check_lists(func, args)
    result = func(*map(_locals_of, args), **{key: _locals_of(x) for key, x in kwargs.items()})
    if func._schema.is_mutable:
        for x in written_tensors(func, args, kwargs):
            if isinstance(x, ShardedTensor):
                torch.autograd.graph.increment_version(x)
        return None
    for local, x in zip(result, args[0], strict=True):
        if isinstance(x, ShardedTensor) and local.shape != x._local.shape:
            raise _refusal(func, x)
    return [
        ShardedTensor(local, x._sharding) if isinstance(x, ShardedTensor) else local
        for local, x in zip(result, args[0], strict=True)
    ]


def _locals_of(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return [y._local if isinstance(y, ShardedTensor) else y for y in x]
    return x._local if isinstance(x, ShardedTensor) else x


def _check_lists(func: OpOverload, args: Sequence[Any]) -> None:
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and len(arg) == len(args[0])]
    for entries in zip(*lists, strict=True):
        first = next((x for x in entries if isinstance(x, ShardedTensor)), None)
        if first is None:
            continue
        for x in entries:
            if isinstance(x, ShardedTensor):
                _check_matches(func, first, x)
            elif isinstance(x, Tensor) and (x.numel() != 1 or x is entries[0]):
                raise _refusal(func, first, f"with an unsharded tensor of shape {tuple(x.shape)}")


def _check_matches(func: OpOverload, one: ShardedTensor, other: ShardedTensor) -> None:
    if not one._sharding.matches(other._sharding):
        name, shape = other._sharding.name, tuple(other.shape)
        raise _refusal(func, one, f"with {name} {shape}, which is cut differently")


def _view(func: OpOverload, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Tensor:
    x, shape = args[:2]
    if tuple(shape) != tuple(x.shape):
        raise _refusal(func, x)
    if x.requires_grad and torch.is_grad_enabled():
        # It would reveal the AccumulateGrad node, which never runs. Zero-bubble pipeline schedules
        # and others find it through a view of the parameter's own shape.
        raise ShardedTensorError(
            f"{x._sharding.name}: autograd would record a view of a sharded parameter, which gets "
            "its gradient from its unit and not from autograd. Take the view under "
            "torch.no_grad(); register hooks with register_post_accumulate_grad_hook; instead of a "
            "zero-bubble or ZBV pipeline schedule use Schedule1F1B or ScheduleInterleaved1F1B"
        )
    alias: Tensor = torch.ops.aten.alias(x)
    return alias


def _index_put(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``x[mask] = number``, with a mask that is cut as ``x`` is."""
    indices, value = args[1:3]
    is_mask = all(isinstance(x, ShardedTensor) and x.dtype is torch.bool for x in indices)
    if len(indices) != 1 or not is_mask or value.numel() != 1:
        _refuse(func, args, kwargs)
    return _on_runs(func, args, kwargs)


def _draw(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ShardedTensor:
    """Fill a tensor with the random numbers that one process would draw.

    Raises:
        ShardedTensorError: the generators of ranks differ, so that each would draw something else.
    """
    x: ShardedTensor = args[0]
    axis, run = x._sharding.axis, x._sharding.run
    generator = kwargs.get("generator")
    state = random_states(x.device)[-1] if generator is None else generator.get_state()
    digest = torch.tensor(zlib.crc32(bytes(state.tolist())))
    digests = across([digest], axis, axis.world).view(-1).tolist()
    if axis.backend("cpu") != "fake" and len(set(digests)) > 1:
        raise ShardedTensorError(
            f"{x._sharding.name}: {func} expects random generators in the same state on all ranks; "
            "call torch.manual_seed with one seed on every rank before"
        )
    whole = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    func(whole, *args[1:], **kwargs)
    x._local.copy_(whole.view(-1)[run.start : run.stop])
    torch.autograd.graph.increment_version(x)
    return x


# -- reductions ----------------------------------------------------------------------------------

_REDUCTIONS = {
    "linalg_vector_norm": "norm", "norm": "norm", "sum": "sum", "mean": "mean", "max": "max",
    "amax": "max", "min": "min", "amin": "min", "all": "all", "any": "any",
}  # fmt: skip


def _reduce(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """A reduction over all dimensions; one over some of them or with an index is refused."""
    x: ShardedTensor = args[0]
    kind, axis = _REDUCTIONS[func.overloadpacket.__name__], x._sharding.axis
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    dims = given.get("dim")
    dims = [dims] if isinstance(dims, int) else dims or range(x.ndim)
    if len(func._schema.returns) > 1 or len({dim % max(1, x.ndim) for dim in dims}) < x.ndim:
        raise _refusal(func, x)
    dtype, order = given.get("dtype"), given.get("ord", given.get("p", 2.0))
    run = x._local if dtype is None else x._local.to(dtype)
    if kind == "norm":
        result = norms([run], axis, 2.0 if order is None else float(order))[0]
    else:
        result = combine(kind, run, x.numel(), axis)
    return result.view([1] * x.ndim) if given.get("keepdim") else result


def _foreach_norm(
    _func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """The global norm of every tensor, in one exchange for each axis and dtype."""
    tensors, order = args[0], args[1] if len(args) > 1 else 2.0
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")  # noqa: PLR2004
    results: dict[int, Tensor] = {}
    groups: dict[tuple[int, torch.dtype], list[int]] = {}
    for i, x in enumerate(tensors):
        if isinstance(x, ShardedTensor):
            groups.setdefault((id(x._sharding.axis), x.dtype), []).append(i)
        else:
            results[i] = torch.linalg.vector_norm(x, order, dtype=dtype)
    for members in groups.values():
        runs = [tensors[i]._local.to(dtype or tensors[i].dtype) for i in members]
        found = norms(runs, tensors[members[0]]._sharding.axis, order)
        results.update(zip(members, found, strict=True))
    return [results[i] for i in range(len(tensors))]


def _foreach_max(_func: OpOverload, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Any:
    return [x.max() for x in args[0]]


def _unscale(func: OpOverload, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> None:
    """GradScaler's kernel: a non-finite gradient on any rank skips the step on every rank."""
    grads, found_inf, inverse_scale = args
    axes = {id(x._sharding.axis): x._sharding.axis for x in grads if isinstance(x, ShardedTensor)}
    func(_locals_of(grads), found_inf, inverse_scale)
    for axis in axes.values():
        found_inf.copy_(across([found_inf.reshape(())], axis).amax())


_RANDOM = {
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_",
    "uniform_",
}  # fmt: skip

# torch tags these as pointwise, but each rank would draw other numbers.
_DRAWN_BY_RANK = {"bernoulli", "dropout", "native_dropout", "rand_like"}

# torch does not tag these as pointwise, but they are, or they make a tensor of the same shape.
_LIKE_POINTWISE = {
    "_to_copy", "clone", "copy_", "detach_", "empty_like", "fill_", "full_like",
    "lift_fresh", "masked_fill", "masked_fill_", "ones_like", "zero_", "zeros_like",
}  # fmt: skip

# Handlers by the name of the operator; what is not here is decided in `_handler_of`.
_HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(_DRAWN_BY_RANK, _refuse),
    **dict.fromkeys(_LIKE_POINTWISE, _on_runs),
    **dict.fromkeys(("alias", "detach"), _alias),
    **dict.fromkeys(_RANDOM, _draw),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    **dict.fromkeys(("view", "_unsafe_view", "expand"), _view),
    **dict.fromkeys(("index_put", "index_put_"), _index_put),
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
    "_foreach_max": _foreach_max,
    "_foreach_norm": _foreach_norm,
}

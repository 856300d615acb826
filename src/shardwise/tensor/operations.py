"""The operations that `ShardedTensor` supports. All others raise a `ShardedTensorError`.

- *element-wise* operations, including ``foreach`` and ``fused`` optimizer kernels, act on the runs;
- *reductions* (norm, sum, mean, var, std, max, min, all, any, dot) and comparisons (equal,
  allclose) combine the runs of all ranks: every rank must call them, and gets the whole result;
- *copies* (clone, detach, zeros_like, to, copy_, assigning ``.data``), ``redistribute``, and other
  shapes of the same elements (view, flatten, unsqueeze);
- *in-place random numbers* (normal_, uniform_, hence ``torch.nn.init``) equal those of one process:
  every rank draws all of them and keeps its own.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise._private import OpOverload, own_operators, pytree
from shardwise.comm.device import random_states
from shardwise.errors import ShardedTensorError
from shardwise.tensor.reductions import OverDims, across, combine, norms, rows_of
from shardwise.tensor.sharded_tensor import Handler, ShardedTensor
from shardwise.tensor.sharding import local_of

__all__ = ["draws", "written_tensors"]


def draws(func: OpOverload) -> bool:
    """Whether ``func`` fills a tensor with random numbers."""
    return func.overloadpacket.__name__ in _RANDOM


def written_tensors(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """The tensors that ``func`` writes to."""
    found: list[Tensor] = []
    for position, name in _written_arguments(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        found += [value] if isinstance(value, Tensor) else value or []
    return found


@cache
def _handler_of(func: OpOverload) -> Handler:
    name = func.overloadpacket.__name__
    if name in _HANDLERS:
        return _HANDLERS[name]
    if name.startswith(("_foreach_", "_fused_ada", "_fused_sgd")):
        return _on_lists
    return _on_runs if _is_pointwise(func) else _decompose


def _is_pointwise(func: OpOverload) -> bool:
    """Whether ``func`` is tagged so, or in place and its functional form is: `abs_` has no tag."""
    namespace, name, overload = str(func).split(".")
    operators = getattr(torch.ops, namespace)
    functional = getattr(operators, name.removesuffix("_"), func.overloadpacket)
    return torch.Tag.pointwise in getattr(functional, overload, func).tags


@cache
def _written_arguments(func: OpOverload) -> tuple[tuple[int, str], ...]:
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _decompose(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """In inference mode torch calls this with operations that it otherwise decomposes before."""
    with own_operators(ShardedTensor):
        result = func.decompose(*args, **kwargs)
    return _refuse(func, args, kwargs) if result is NotImplemented else result


def _refuse(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NoReturn:
    leaves = pytree.tree_leaves((args, kwargs))
    raise _unsupported(func, next(x for x in leaves if isinstance(x, ShardedTensor)))


def _unsupported(
    func: OpOverload, x: ShardedTensor, why: str = "needs more than the shard of this rank"
) -> ShardedTensorError:
    return ShardedTensorError(
        f"{func} of {x._sharding.name} {tuple(x.shape)} {why}; use .full_tensor() for the whole "
        "tensor, .to_local() for this rank's elements, or `sw.gathered(model)`. If this was raised "
        "in a forward, the module was not called through its unit, or forward is a generator, "
        "whose body runs after the call: return a list; in another method, such as "
        "model.generate or model.get_text_features, gather the model for it: "
        "shardwise.fsdp.register_fsdp_forward_method(model, 'generate'); in the step of an "
        "optimizer, it needs whole parameters; and if it was raised in a loss that uses a weight, "
        "such as lm_head.weight, compute the loss in the model's forward"
    )


_COPY = torch.ops.aten.copy_.default

# -- element by element --------------------------------------------------------------------------


def _on_runs(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func`` on the runs of its arguments, which must all be cut in the same way."""
    leaves, tree = [*args, *kwargs.values()], None
    if any(isinstance(x, (list, tuple, dict)) for x in leaves):
        leaves, tree = pytree.tree_flatten((list(args), dict(kwargs)))
    first = next(x for x in leaves if isinstance(x, ShardedTensor))
    written = written_tensors(func, args, kwargs) if func._schema.is_mutable else []
    if not all(isinstance(x, ShardedTensor) for x in written):
        return _write_plain(func, first, args, kwargs)
    local = [_to_run(func, x, first) for x in leaves]
    if tree is None:  # the case of every optimizer step, where a tree would double the time
        local_args = local[: len(args)]
        local_kwargs = dict(zip(kwargs, local[len(args) :], strict=True))
    else:
        local_args, local_kwargs = tree.unflatten(local)
    result = func(*local_args, **local_kwargs)
    for x in written:
        torch.autograd.graph.increment_version(x)
    if written:
        return written[0]
    if isinstance(result, Tensor):
        return ShardedTensor(result, first._sharding)
    return pytree.tree_map_only(Tensor, lambda t: ShardedTensor(t, first._sharding), result)


def _write_plain(func: OpOverload, x: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Copy ``x`` into a tensor that is not sharded, if every rank stores all of it."""
    if func is not _COPY or isinstance(args[0], DTensor) or x.sharding.mesh.size > 1:
        raise _unsupported(func, x, "would write a shard into a tensor that is not sharded")
    return func(args[0], local_of(x).view(x.shape), *args[2:], **kwargs)


def _without_format(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`_on_runs` without the memory format: a run is 1-D, in the order of a contiguous tensor."""
    return _on_runs(func, args, {key: x for key, x in kwargs.items() if key != "memory_format"})


def _new(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ShardedTensor:
    """A new tensor of the same shape, as `torch.distributed.checkpoint.async_save` makes."""
    x, shape = args[:2]
    if tuple(shape) != tuple(x.shape):
        raise _unsupported(func, x)
    local = func(local_of(x), [len(x._sharding.run)], *args[2:], **kwargs)
    return ShardedTensor(local, x._sharding)


def _to_run(func: OpOverload, x: Any, first: ShardedTensor) -> Any:
    """The elements of ``x`` that correspond to this rank's run of ``first``."""
    if isinstance(x, ShardedTensor):
        if first._sharding.matches(x._sharding):
            return local_of(x)
        if func is not _COPY or x._sharding.mesh.size > 1:
            raise _mismatch(func, first, x)
        x = local_of(x).view(x.shape)  # whole on each rank, as of a model under "ddp"
    if isinstance(x, DTensor):
        if x.numel() != 1:
            raise _unsupported(func, first, f"with a DTensor of {x.placements}")
        x = x.full_tensor()
    if not isinstance(x, Tensor) or (
        x.ndim == 0 and (first.ndim or "out" not in func._overloadname)
    ):
        return x
    shape, run = first._sharding.shape, first._sharding.run
    trailing = shape[len(shape) - x.ndim :]
    broadcasts = x.ndim <= len(shape) and all(
        size in (1, wanted) for size, wanted in zip(x.shape, trailing, strict=True)
    )
    if not broadcasts:
        raise _unsupported(func, first, f"with a tensor of shape {tuple(x.shape)}")
    if x.numel() == 1:
        return x.reshape(1).expand(len(run))  # torch would give an empty output its one element
    width = math.prod(shape[1:])
    if not len(run):
        return x.new_empty(0)
    rows = rows_of(run, width)
    own = x.expand(shape)[rows.start : rows.stop].reshape(-1)  # a copy, if ``x`` is smaller
    return own[run.start - rows.start * width : run.stop - rows.start * width]


def _alias(func: OpOverload, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> ShardedTensor:
    """A faster `_on_runs`: every `nn.Parameter` and every optimizer step calls alias or detach."""
    return ShardedTensor(func(local_of(args[0])), args[0]._sharding)


def _on_lists(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a `foreach` or `fused` kernel: entry i of every list belongs to the same parameter."""
    _check_lists(func, args)
    result = func(*map(_locals_of, args), **{key: _locals_of(x) for key, x in kwargs.items()})
    if func._schema.is_mutable:
        written = written_tensors(func, args, kwargs)
        torch.autograd.graph.increment_version([x for x in written if isinstance(x, ShardedTensor)])
        return None
    for local, x in zip(result, args[0], strict=True):
        if isinstance(x, ShardedTensor) and local.shape != local_of(x).shape:
            raise _unsupported(func, x)
    return [_wrap_as(local, x) for local, x in zip(result, args[0], strict=True)]


def _wrap_as(local: Tensor, x: Tensor) -> Tensor:
    """Wrap ``local``, computed from this rank's part of ``x``, in a tensor distributed as ``x``."""
    if isinstance(x, ShardedTensor):
        return ShardedTensor(local, x._sharding)
    if isinstance(x, DTensor):
        return DTensor.from_local(
            local, x.device_mesh, x.placements, shape=x.shape, stride=x.stride()
        )
    return local


def _locals_of(x: Any) -> Any:
    return [local_of(y) for y in x] if isinstance(x, (list, tuple)) else local_of(x)


def _check_lists(func: OpOverload, args: Sequence[Any]) -> None:
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and len(arg) == len(args[0])]
    for entries in zip(*lists, strict=True):
        first = next((x for x in entries if isinstance(x, ShardedTensor)), None)
        if first is None:
            continue
        for x in entries:
            if isinstance(x, ShardedTensor):
                if x._sharding is not first._sharding:
                    _check_matches(func, first, x)
            elif isinstance(x, Tensor) and (x is entries[0] or x.numel() != 1):
                raise _unsupported(
                    func, first, f"with an unsharded tensor of shape {tuple(x.shape)}"
                )


def _check_matches(func: OpOverload, first: ShardedTensor, other: ShardedTensor) -> None:
    if not first._sharding.matches(other._sharding):
        raise _mismatch(func, first, other)


def _mismatch(func: OpOverload, x: ShardedTensor, other: ShardedTensor) -> ShardedTensorError:
    own, others = x.sharding, other.sharding
    name, shape = others.name, tuple(other.shape)
    if shape != tuple(x.shape):
        return _unsupported(func, x, f"with {name} {shape}, which is cut differently")
    if own.mesh.rank == others.mesh.rank or not own.has_same_cuts(others):
        hint = '(with granularity="dim", tensors of one shape are cut alike)'
        return _unsupported(func, x, f"with {name} {shape}, which is cut differently {hint}")
    return ShardedTensorError(
        f"{func} of shard {own.mesh.rank} of {own.name} and shard {others.mesh.rank} of {name}, "
        "which no rank stores together. A file of torch.save(optimizer.state_dict()) has the "
        "shards of the rank that wrote it: save with sw.save, or let each rank read the file that "
        "it has written"
    )


def _view(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Another shape of the same elements in the same order: each rank keeps its run."""
    x: ShardedTensor = args[0]
    if any(isinstance(argument, torch.dtype) for argument in args):
        raise _unsupported(func, x)
    shape = func(_meta(x), *args[1:], **kwargs).shape
    if shape == x.shape:
        if func is not torch.ops.aten.slice.Tensor:  # x[:]
            _check_unrecorded(x)
        alias: Tensor = torch.ops.aten.alias(x)
        return alias
    if shape.numel() != x.numel():
        raise _unsupported(func, x)
    return ShardedTensor(local_of(x).view(-1), x._sharding.with_shape(shape))


def _view_as_real(func: OpOverload, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Tensor:
    """How torch's optimizers compute with complex parameters; the view shares their memory."""
    _check_unrecorded(args[0])
    return ShardedTensor(func(local_of(args[0])).view(-1), args[0]._sharding.as_pairs)


def _view_as_complex(func: OpOverload, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Tensor:
    _check_unrecorded(args[0])
    return ShardedTensor(func(local_of(args[0]).view(-1, 2)), args[0]._sharding.as_numbers)


def _check_unrecorded(x: ShardedTensor) -> None:
    if x.requires_grad and torch.is_grad_enabled() and x.is_leaf:
        # Zero-bubble pipeline schedules, among others, find the AccumulateGrad node through such a
        # view, but that node of a sharded parameter never runs.
        raise ShardedTensorError(
            f"{x._sharding.name}: autograd would record a view of a sharded parameter, which gets "
            "its gradient from its unit and not from autograd. Take the view under "
            "torch.no_grad(); register hooks with register_post_accumulate_grad_hook; for "
            "zero-bubble and ZBV pipeline schedules use shardwise.pipeline.PipelineStage"
        )


def _index_put(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``x[mask] = number``, with a mask that is cut in the same way as ``x``."""
    indices, value = args[1:3]
    is_mask = all(isinstance(x, ShardedTensor) and x.dtype is torch.bool for x in indices)
    if len(indices) != 1 or not is_mask or value.numel() != 1:
        _refuse(func, args, kwargs)
    return _on_runs(func, args, kwargs)


def _draw(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ShardedTensor:
    """Fill a tensor with the random numbers that one process would draw.

    Raises:
        ShardedTensorError: the ranks' generators differ, so they would draw different numbers.
    """
    x: ShardedTensor = args[0]
    mesh, run = x._sharding.mesh, x._sharding.run
    generator = kwargs.get("generator")
    state = random_states(x.device)[-1] if generator is None else generator.get_state()
    digest = torch.tensor(zlib.crc32(bytes(state.tolist())), device="cpu")
    digests = across([digest], mesh, mesh.world).view(-1).tolist()
    if mesh.backend("cpu") != "fake" and len(set(digests)) > 1:
        raise ShardedTensorError(
            f"{x._sharding.name}: {func} expects random generators in the same state on all ranks; "
            "first call torch.manual_seed with the same seed on every rank"
        )
    whole = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    func(whole, *args[1:], **kwargs)
    local_of(x).copy_(whole.view(-1)[run.start : run.stop])
    torch.autograd.graph.increment_version(x)
    return x


# -- reductions ----------------------------------------------------------------------------------

_REDUCTIONS = {
    "linalg_vector_norm": "norm", "norm": "norm", "sum": "sum", "mean": "mean", "max": "max",
    "amax": "max", "min": "min", "amin": "min", "all": "all", "any": "any",
}  # fmt: skip


def _reduce(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Reduce over some or all dimensions; refuse indices of extremes, and a given output."""
    if torch.Tag.pointwise in func.tags:  # max(x, y), which torch decomposes outside of inference
        result: Tensor = _on_runs(func, args, kwargs)
        return result
    x: ShardedTensor = args[0]
    kind, mesh = _REDUCTIONS[func.overloadpacket.__name__], x._sharding.mesh
    given = _given(func, args, kwargs)
    if len(func._schema.returns) > 1 or func._schema.is_mutable:
        raise _unsupported(func, x)
    # torch checks the dims, and knows the shape and dtype.
    expected = func(_meta(x), *args[1:], **kwargs)
    dims = _dims(x, given.get("dim"))
    dtype, order = given.get("dtype"), given.get("ord", given.get("p", 2.0))
    order = 2.0 if order is None else float(order)
    run = local_of(x) if dtype is None else local_of(x).to(dtype)
    is_over_all = len(dims) >= x.ndim
    if is_over_all and kind == "norm":
        result = norms([run], mesh, order, [x._sharding.cuts])[0]
    elif is_over_all:
        result = combine(kind, run, x.numel(), mesh, x._sharding.cuts)
    elif mesh.leaves is not None:
        raise _unsupported(func, x, "would depend on the number of ranks")
    elif x.numel():
        result = OverDims(dims, x.shape, x._sharding.runs, mesh).reduce(kind, run, order)
    else:
        result = func(run.view(x.shape), *args[1:], **kwargs)
    return result.view(expected.shape).to(expected.dtype)


def _meta(x: Tensor) -> Tensor:
    """A plain tensor like ``x``, without memory."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _given(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call, by name."""
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _dims(x: Tensor, dim: Any) -> set[int]:
    """The dimensions that ``dim`` means: one, several, or by default all."""
    dims = [dim] if isinstance(dim, int) else dim or range(x.ndim)
    return {one % max(1, x.ndim) for one in dims}


def _spread(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Variance or standard deviation, from the mean of all ranks."""
    x, given = args[0], _given(func, args, kwargs)
    if not isinstance(x, ShardedTensor) or x.is_complex() or len(func._schema.returns) > 1:
        _refuse(func, args, kwargs)
    correction, dim = given.get("correction"), given.get("dim")
    count = math.prod(x.shape[one] for one in _dims(x, dim))
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    squares = (exact - exact.mean(dim, keepdim=True)).square()
    total = squares.sum(dim, keepdim=bool(given.get("keepdim")))
    variance = total / max(0, count - (1 if correction is None else correction))
    is_variance = func.overloadpacket.__name__ == "var"
    return (variance if is_variance else variance.sqrt()).to(x.dtype)


def _dot(func: OpOverload, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Tensor:
    func(*map(_meta, args))  # torch checks the shapes
    result: Tensor = (args[0] * args[1]).sum()
    return result


def _compare(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether two tensors are equal or close on all ranks."""
    first = next(x for x in args[:2] if isinstance(x, ShardedTensor))
    if func.overloadpacket.__name__ == "equal" and args[0].shape != args[1].shape:
        return False
    # A tensor of one element is compared with every element; this rank may have none.
    left, right = (_to_run(func, x, first).expand(len(first._sharding.run)) for x in args[:2])
    answer = torch.tensor(int(func(left, right, *args[2:], **kwargs)))
    return bool(across([answer], first._sharding.mesh).all())


def _foreach_norm(
    _func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """The global norm of every tensor, with one exchange for each mesh and dtype."""
    tensors, order = args[0], args[1] if len(args) > 1 else 2.0
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")  # noqa: PLR2004
    results: dict[int, Tensor] = {}
    groups: dict[tuple[int, torch.dtype], list[int]] = {}
    for i, x in enumerate(tensors):
        if isinstance(x, ShardedTensor):
            groups.setdefault((id(x._sharding.mesh), x.dtype), []).append(i)
        else:
            norm = torch.linalg.vector_norm(x, order, dtype=dtype)
            results[i] = norm.full_tensor() if isinstance(norm, DTensor) else norm
    for members in groups.values():
        runs = [local_of(tensors[i]).to(dtype or tensors[i].dtype) for i in members]
        cuts = [tensors[i]._sharding.cuts for i in members]
        found = norms(runs, tensors[members[0]]._sharding.mesh, order, cuts)
        results.update(zip(members, found, strict=True))
    return [results[i] for i in range(len(tensors))]


def _foreach_max(_func: OpOverload, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Any:
    return [x.max() for x in args[0]]


def _unscale(func: OpOverload, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> None:
    """GradScaler's kernel: a non-finite gradient on any rank skips the step on every rank."""
    grads, found_inf, inverse_scale = args
    meshes = {id(x._sharding.mesh): x._sharding.mesh for x in grads if isinstance(x, ShardedTensor)}
    local = _locals_of(grads)
    # A gradient may report the host, where its parameter is, and be on the device itself.
    found, inverse = (x.to(local[0].device) for x in (found_inf, inverse_scale))
    func(local, found, inverse)
    found_inf.copy_(found)
    for mesh in meshes.values():
        found_inf.copy_(across([found_inf.reshape(())], mesh).amax())


_RANDOM = {
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_",
    "uniform_",
}  # fmt: skip

# torch tags these as pointwise, but each rank would draw different numbers.
_DRAWN_BY_RANK = {"bernoulli", "dropout", "native_dropout", "rand_like"}

# torch does not tag these as pointwise, but they are pointwise or make a tensor of the same shape.
_LIKE_POINTWISE = {
    "copy_",
    "detach_",
    "fill_",
    "lift_fresh",
    "masked_fill",
    "masked_fill_",
    "zero_",
}

_HAVE_FORMAT = {"_to_copy", "clone", "empty_like", "full_like", "ones_like", "zeros_like"}

# Handlers by operator name; `_handler_of` decides for all other operators.
_HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(_DRAWN_BY_RANK, _refuse),
    **dict.fromkeys(_LIKE_POINTWISE, _on_runs),
    **dict.fromkeys(_HAVE_FORMAT, _without_format),
    **dict.fromkeys(("alias", "detach"), _alias),
    **dict.fromkeys(("new_empty", "new_full", "new_ones", "new_zeros"), _new),
    **dict.fromkeys(_RANDOM, _draw),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    **dict.fromkeys(("allclose", "equal"), _compare),
    **dict.fromkeys(("expand", "slice", "squeeze", "unsqueeze", "_unsafe_view", "view"), _view),
    **dict.fromkeys(("std", "var"), _spread),
    **dict.fromkeys(("index_put", "index_put_"), _index_put),
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
    "_foreach_max": _foreach_max,
    "_foreach_norm": _foreach_norm,
    "dot": _dot,
    "view_as_complex": _view_as_complex,
    "view_as_real": _view_as_real,
}


ShardedTensor.handler_of = staticmethod(_handler_of)

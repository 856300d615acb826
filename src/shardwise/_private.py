"""Every private name of torch that shardwise uses, with the reason why no public one suffices.

A missing name raises here, at import, instead of in the middle of a step. The few names with a
public fallback are listed in `OPTIONAL`.
"""

import contextlib
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _functorch  # the stack of transforms of `torch.func`
from torch._C._distributed_c10d import (  # process groups that are not torch's have methods alone
    AllgatherOptions,
    AllreduceOptions,
    _register_process_group,
)
from torch._ops import OpOverload  # the type of an operator in `__torch_dispatch__`
from torch._subclasses.fake_tensor import FakeTensorMode  # tensors without memory
from torch.autograd import Variable, forward_ad
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # in DTensors
from torch.distributed._shard.metadata import ShardMetadata  # for FSDP1's state dicts
from torch.distributed._shard.sharded_tensor.api import ShardedTensor as TorchShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, PrefixStore, Store
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # for `new_dtensor`
from torch.distributed.tensor.placement_types import _StridedShard  # a dim cut by two mesh dims
from torch.nn.utils.parametrizations import _SpectralNorm  # its class has no public name
from torch.optim.optimizer import _foreach_supported_types as _in_optimizers
from torch.utils import (
    _pytree as pytree,  # torch's own containers; there is no public module
)
from torch.utils._foreach_utils import _foreach_supported_types as _in_clipping
from torch.utils._python_dispatch import (
    TorchDispatchMode,  # its public alias has no c10d operators
    _disable_current_modes,
    _pop_mode_temporarily,
)

__all__ = [
    "COMPOSABLE_FSDP",
    "PRIVATE_FSDP2",
    "AllgatherOptions",
    "AllreduceOptions",
    "AsyncCollectiveTensor",
    "DTensorSpec",
    "FakeTensorMode",
    "OpOverload",
    "ShardMetadata",
    "TensorMeta",
    "TorchDispatchMode",
    "TorchShardedTensor",
    "accumulated_gradient_hooks",
    "at_all_levels",
    "bind_compiled",
    "can_divide_backwards",
    "can_swap_storages",
    "current_autograd_node",
    "current_graph_task",
    "default_store",
    "eval_frame",
    "flat_mesh",
    "foreach_copy_",
    "foreach_norm",
    "fsdp2_state_function",
    "gradient_hooks",
    "group_timeout",
    "has_saved_tensors_hooks",
    "has_symmetric_memory",
    "is_compiled_in_place",
    "is_spectral_norm",
    "is_strided_shard",
    "is_transformed_by_functorch",
    "joined_mesh",
    "mesh_without_groups",
    "new_dtensor",
    "new_empty_subclass",
    "new_nccl_group",
    "new_registered_group",
    "new_sharded_tensor",
    "next_node_number",
    "node_number",
    "num_storage_references",
    "num_tensor_references",
    "own_operators",
    "process_group_named",
    "pytree",
    "queue_callback",
    "register_fully_shard",
    "root_mesh",
    "run_backward",
    "run_last",
    "scaled_sum",
    "set_managed",
    "set_versions",
    "share_gradient_hooks",
    "stage_backwards",
    "stage_forward",
    "storage_id",
    "strided_shard",
    "subclasses_of_dtensor_dispatch",
    "suspend_own_hooks_in_functorch",
    "swap_storages",
    "symmetric_tensor",
    "tensor_allocator",
    "use_foreach_for",
    "use_own_operators",
    "will_execute",
    "without_tensor_functions",
    "without_torch_functions",
    "without_transforms",
]

D = TypeVar("D", bound=DTensor)

REQUIRED = (
    "torch._C._are_functorch_transforms_active",
    "torch._C._functorch.TransformType.Jvp",
    "torch._C._functorch.get_unwrapped",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._C._functorch.maybe_get_level",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._functorch.pop_dynamic_layer_stack",
    "torch._C._functorch.push_dynamic_layer_stack",
    "torch._C._is_fwd_grad_enabled",
    "torch._C._set_fwd_grad_enabled",
    "torch.autograd.forward_ad._current_level",
    "torch.nn.Module._compiled_call_impl",
    "torch._C._autograd._get_sequence_nr",
    "torch._C._autograd._pop_saved_tensors_default_hooks",
    "torch._C._autograd._push_saved_tensors_default_hooks",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._autograd._unsafe_set_version_counter",
    "torch._C.DisableTorchFunction",
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C._EnableTorchFunction",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._current_autograd_node",
    "torch._C._current_graph_task_id",
    "torch._C._dynamo.eval_frame.set_eval_frame",
    "torch._C._storage_Use_Count",
    "torch._foreach_copy_",
    "torch._foreach_norm",
    "torch._C._will_engine_execute_node",
    "torch.Tensor._dtensor__new__",
    "torch.Tensor._make_wrapper_subclass",
    "torch.distributed.device_mesh.DeviceMesh._concatenate",
    "torch.distributed.device_mesh.DeviceMesh._flatten",
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh",
    "torch.Tensor._use_count",
    (
        "torch.distributed._shard.sharded_tensor.ShardedTensor"
        "._init_from_local_shards_and_global_metadata"
    ),
    "torch.distributed.ProcessGroup._device_types",
    "torch.distributed.ProcessGroup._get_backend",
    "torch.distributed.ProcessGroup._register_backend",
    "torch.distributed.ProcessGroup._set_default_backend",
    "torch.distributed.ProcessGroup._set_group_name",
    "torch.distributed.distributed_c10d._get_default_store",
    "torch.distributed.distributed_c10d._new_process_group_helper",
    "torch.distributed.distributed_c10d._resolve_process_group",
    "torch.distributed.distributed_c10d._world",
    "torch.distributed._make_nccl_premul_sum",
)
COMPOSABLE_FSDP = "torch.distributed._composable.fsdp"  # where older programs import FSDP2 from
# Where NeMo looks up `FSDPModule` and other programs `fully_shard`, besides their public names.
PRIVATE_FSDP2 = (
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "torch.distributed.fsdp._fully_shard._fsdp_state",
)
OPTIONAL = ("torch.UntypedStorage._swap_data_ptr_",)  # new in 2.12; `resize_` does the same, slower


def missing(names: Iterable[str]) -> list[str]:
    """The ``names``, each given as "torch.a.b", that this version of torch does not have."""
    return [name for name in names if not _exists(name.removeprefix("torch."))]


def _exists(name: str) -> bool:
    try:
        operator.attrgetter(name)(torch)
    except AttributeError:
        return False
    return True


if missing(REQUIRED):
    raise ImportError(
        f"shardwise needs {', '.join(missing(REQUIRED))}, which torch {torch.__version__} does not "
        "have; install a version of torch that shardwise's pyproject.toml allows"
    )

# -- tensors and storages ------------------------------------------------------------------------


def new_dtensor(
    cls: type[D], local: Tensor, spec: DTensorSpec, *, requires_grad: bool = False
) -> D:
    """A new instance of ``cls``; ``DTensor.__new__`` cannot make instances of a subclass."""
    made: D = torch.Tensor._dtensor__new__(cls, local, spec, requires_grad=requires_grad)
    return made


def new_empty_subclass(
    cls: type[Tensor], shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> Any:
    """A tensor of the subclass ``cls`` of Tensor, without memory."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)


def subclasses_of_dtensor_dispatch() -> bool:
    """Whether operators call the ``__torch_dispatch__`` of a subclass of DTensor.

    New in torch 2.12. In torch 2.11 they run those of DTensor itself, in C++.
    """

    class Probe(DTensor):
        @classmethod
        def __torch_dispatch__(cls, *_args: Any, **_kwargs: Any) -> Tensor:
            return torch.ones(1)

    probe = new_empty_subclass(Probe, torch.Size((1,)), torch.float32, torch.device("cpu"))
    try:
        return type(probe.detach()) is Tensor
    except (AttributeError, RuntimeError, TypeError):
        return False


_HAS_OWN_OPERATORS = subclasses_of_dtensor_dispatch()


class _OwnOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls the ``__torch_dispatch__`` of ``cls`` for operators on its instances."""

    def __init__(self, cls: type[DTensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cls = cls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._cls not in types:
            return func(*args, **(kwargs or {}))
        if torch._C._len_torch_dispatch_stack():  # see `own_operators`
            with _pop_mode_temporarily() as mode:
                result = mode.__torch_dispatch__(func, types, args, kwargs or {})
            if result is not NotImplemented:
                return result
        with torch._C._EnableTorchFunction():  # these operators may use others of `cls`
            dispatch: Any = self._cls.__torch_dispatch__
            return dispatch(func, types, args, kwargs or {})


@contextlib.contextmanager
def own_operators(cls: type[DTensor]) -> Iterator[None]:
    """Within it, operators call the ``__torch_dispatch__`` of ``cls`` even in torch 2.11.

    Modes that are active see them first, as they do in later versions. A mode may call an operator,
    which the mode below it sees, or return NotImplemented, after which torch would ignore that one.
    """
    if _HAS_OWN_OPERATORS:
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_tensor_functions())
        active = stack.enter_context(_disable_current_modes())
        for mode in (_OwnOperators(cls), *reversed(active), _OwnOperators(cls)):
            stack.enter_context(mode)
        yield


def use_own_operators(cls: type[DTensor]) -> None:
    """Use `own_operators` in each function of ``cls`` that is called from Python.

    Operators that autograd runs in a backward do not call ``cls`` in torch 2.11.
    """
    if _HAS_OWN_OPERATORS:
        return

    def call(_cls: type, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._len_torch_dispatch_stack():
            with own_operators(cls):
                return func(*args, **(kwargs or {}))
        with without_tensor_functions(), _OwnOperators(cls):  # the same, faster
            return func(*args, **(kwargs or {}))

    cls.__torch_function__ = classmethod(call)  # type: ignore[assignment]


def strided_shard(dim: int, num_inner: int) -> Placement:
    """Cuts ``dim`` again, after another mesh dim has cut it into ``num_inner`` parts."""
    return _StridedShard(dim, split_factor=num_inner)


def is_spectral_norm(module: nn.Module) -> bool:
    """Whether ``module`` is the parametrization of `nn.utils.parametrizations.spectral_norm`."""
    return isinstance(module, _SpectralNorm)


def is_strided_shard(placement: Placement) -> TypeGuard[_StridedShard]:
    """Whether ``placement`` was made by `strided_shard`."""
    return isinstance(placement, _StridedShard)


# The mesh that a mesh is a slice of, or the mesh itself.
root_mesh = DeviceMesh._get_root_mesh


def joined_mesh(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """The mesh with the dims of both, which must be slices of one mesh.

    Raises:
        RuntimeError: they are not slices of one mesh.
    """
    return DeviceMesh._concatenate([outer, inner])


def flat_mesh(mesh: DeviceMesh, dims: Sequence[str]) -> DeviceMesh:
    """``dims`` of ``mesh`` flattened into one dim; several dims get a new process group."""
    return mesh[dims[0]] if len(dims) == 1 else mesh[tuple(dims)]._flatten("_".join(dims))


def fsdp2_state_function() -> Any:
    """FSDP2's function that returns the state of a module, or None if it is not sharded."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import (  # noqa: PLC0415 - as below
        _get_module_fsdp_state,
    )

    return _get_module_fsdp_state


def register_fully_shard(module: Any) -> None:
    """Let torch's other composable functions, such as `replicate`, recognize a sharded module."""
    # Imported here because it imports DDP. Only FSDP2 programs need it, and they have imported DDP.
    from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem  # noqa: PLC0415

    vars(module).setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()


def set_managed(root: Any, *, is_managed: bool) -> None:
    """Set the attributes that tell other libraries whether ranks must call each module together.

    FSDP2 sets them on every module, for `torch.compile`. transformers reads them: ``generate``
    continues until all ranks have finished, and layer dropout still calls the layers it skips.
    """
    for module in root.modules():
        module._is_fsdp_managed_module = is_managed
        module._fsdp_use_orig_params = is_managed


def use_foreach_for(kind: type[Tensor]) -> None:
    """Make optimizers and clipping use ``foreach`` kernels for ``kind``, as for DTensors."""
    for kinds in (_in_optimizers, _in_clipping):
        kinds.append(kind)


def new_sharded_tensor(
    local: Tensor,
    own: ShardMetadata | None,
    shards: Sequence[ShardMetadata],
    shape: Sequence[int],
    group: dist.ProcessGroup,
) -> TorchShardedTensor:
    """torch's `ShardedTensor` of ``shards``, of which this rank stores ``own`` in ``local``.

    The public function exchanges the metadata of the shards between ranks for each tensor.
    """
    properties = TensorProperties(dtype=local.dtype)
    return TorchShardedTensor._init_from_local_shards_and_global_metadata(
        [] if own is None else [Shard(local, own)],
        sharded_tensor_metadata=ShardedTensorMetadata(list(shards), torch.Size(shape), properties),
        process_group=group,
    )


def mesh_without_groups(
    device_type: str, ranks: Tensor, names: tuple[str, ...] | None, own_rank: int
) -> DeviceMesh:
    """A mesh that describes where tensors are but cannot run a collective."""
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=own_rank)


def can_swap_storages() -> bool:
    """Whether `swap_storages` works."""
    return not missing(OPTIONAL)


def swap_storages(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchange the memory of two storages. Their tensors keep their Storage objects."""
    one._swap_data_ptr_(other)  # type: ignore[attr-defined]


def foreach_copy_(dsts: list[Tensor], srcs: list[Tensor]) -> None:
    """Copy each of ``srcs`` to the corresponding tensor in ``dsts``, in one call."""
    if dsts:
        torch._foreach_copy_(dsts, srcs)


# The vector norm of each tensor, in few kernels. The public `torch.nn.utils.get_total_norm` returns
# only their total.
foreach_norm: Callable[[list[Tensor], float], Sequence[Tensor]] = torch._foreach_norm

# Identifies a storage, whatever its memory; ``data_ptr()`` is that of the memory.
storage_id: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")


def num_storage_references(storage: torch.UntypedStorage) -> int:
    """How many tensors and storages hold the memory, counted as in torch's CUDA graph pools."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


# The number of references to a tensor from C++ and Python.
num_tensor_references: Callable[[Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]


# -- autograd ------------------------------------------------------------------------------------


# The id of the autograd graph task that this thread runs, or -1.
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
# The node that autograd runs in this thread; None also if compiled autograd runs instead.
current_autograd_node: Callable[[], object] = torch._C._current_autograd_node

# A context that hides calls from every `TorchFunctionMode`; the public one leaves modes active.
without_torch_functions = torch._C.DisableTorchFunction


# A context in which functions of a Tensor subclass do not reach its ``__torch_function__``.
without_tensor_functions = torch._C.DisableTorchFunctionSubclass


def run_backward(loss: Tensor) -> None:
    """``loss.backward()``, but with every `TorchFunctionMode` active; the method disables them."""
    Variable._execution_engine.run_backward(
        (loss,),
        (torch.ones_like(loss),),
        False,  # keep_graph
        False,  # create_graph
        (),  # inputs: all leaves
        allow_unreachable=True,
        accumulate_grad=True,
    )


# Calls its argument when the graph task of this thread ends.
queue_callback: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback

# The number that the next node of this thread's graph gets. Older nodes have smaller numbers.
next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr

# The number of a node in the order in which its thread created it.
node_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")


def set_versions(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Set the versions that autograd compares with those of the tensors that it saved."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


# Whether the graph task of this thread will run a node. Raises a RuntimeError in
# `torch.autograd.grad`, which captures gradients instead of accumulating them.
will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node


def has_saved_tensors_hooks() -> bool:
    """Whether saved-tensors hooks are active, such as those of activation checkpointing.

    Those of `runtime.kept_tensors`, which keep every tensor as it is, do not count.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and not getattr(hooks[0], "__module__", "").endswith("kept_tensors")


def suspend_own_hooks_in_functorch() -> None:
    """Let `torch.func.grad` and the like run under the hooks of `runtime.kept_tensors`.

    They refuse to begin under any saved-tensors hooks, by a context manager of torch that this
    changes in place, because torch.compile knows it by its identity.
    """
    manager: Any = torch.autograd.graph.disable_saved_tensors_hooks
    cells = dict(zip(manager.__code__.co_freevars, manager.__closure__ or (), strict=True))
    disabled = cells["func"].cell_contents  # what `contextlib.contextmanager` was given

    def without_own_hooks(message: str) -> Iterator[None]:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is None or has_saved_tensors_hooks():
            yield from disabled(message)
            return
        torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            yield from disabled(message)
        finally:
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)

    cells["func"].cell_contents = without_own_hooks


def is_transformed_by_functorch() -> bool:
    """Whether `torch.func` or forward-mode differentiation transforms the running code."""
    is_active: bool = torch._C._are_functorch_transforms_active()
    return is_active or forward_ad._current_level >= 0


def without_transforms() -> contextlib.AbstractContextManager[None]:
    """A context in which neither `torch.func` nor forward-mode differentiation transforms code.

    In a transform, every operator wraps its results in tensors without memory.
    """
    return _without_transforms() if is_transformed_by_functorch() else _UNTRANSFORMED


_UNTRANSFORMED = contextlib.nullcontext()


@contextlib.contextmanager
def _without_transforms() -> Iterator[None]:
    is_forward_mode = torch._C._is_fwd_grad_enabled()
    with contextlib.ExitStack() as layers:
        while _functorch.peek_interpreter_stack() is not None:
            layers.callback(
                _functorch.push_dynamic_layer_stack, _functorch.pop_dynamic_layer_stack()
            )
        layers.callback(torch._C._set_fwd_grad_enabled, is_forward_mode)
        torch._C._set_fwd_grad_enabled(False)
        yield


def at_all_levels(tensors: Iterable[Tensor]) -> list[tuple[Tensor, bool]]:
    """Return ``tensors`` and their tangents as each level of differentiation has them.

    A level is one transform of `torch.func`; below all of them are plain tensors. Each level
    records a graph of its own. The second item says whether the tensor is one of a transform.
    """
    found, current = [], list(tensors)
    with contextlib.ExitStack() as layers:
        while True:
            layer: Any = _functorch.peek_interpreter_stack()
            is_dual = layer is None or layer.key() == _functorch.TransformType.Jvp
            if is_dual and forward_ad._current_level >= 0:
                duals: Any = map(forward_ad.unpack_dual, current)
                current += [dual.tangent for dual in [*duals] if dual.tangent is not None]
            found += [(t, _functorch.is_functorch_wrapped_tensor(t)) for t in current]
            if layer is None:
                return found
            level = layer.level()
            current = [
                _functorch.get_unwrapped(t) if _functorch.maybe_get_level(t) == level else t
                for t in current
            ]
            layers.callback(
                _functorch.push_dynamic_layer_stack, _functorch.pop_dynamic_layer_stack()
            )


def gradient_hooks(tensor: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """The hooks registered with `Tensor.register_hook`."""
    return list((tensor._backward_hooks or {}).values())


def accumulated_gradient_hooks(tensor: Tensor) -> list[Callable[[Tensor], None]]:
    """The hooks registered with `Tensor.register_post_accumulate_grad_hook`."""
    return list((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values())


def run_last(tensor: Tensor, is_last: Callable[[Any], bool]) -> None:
    """Let the hook of `Tensor.register_post_accumulate_grad_hook` that ``is_last`` run last."""
    if len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ()) > 1:
        hooks: dict[int, Any] = tensor._post_accumulate_grad_hooks
        for number in [number for number, hook in hooks.items() if is_last(hook)]:
            hooks[number] = hooks.pop(number)


def share_gradient_hooks(source: Tensor, target: Tensor) -> None:
    """Let ``target`` share the hooks of ``source``, whose handles then remove them from both."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        setattr(target, name, getattr(source, name))


@cache
def can_divide_backwards() -> bool:
    """Whether the halves of `stage_backwards` compute the right gradients of weights.

    New in torch 2.13. Before, they add some parts twice if a weight is used several times.
    """
    x = torch.tensor(2.0, requires_grad=True)
    weight = torch.nn.Parameter(torch.tensor(3.0))
    y = (x * weight).sin() * weight
    (expected,) = torch.autograd.grad(y, weight, retain_graph=True)
    halves = stage_backwards()
    _, groups = halves.stage_backward_input([y], [torch.tensor(1.0)], [x], iter([weight]))
    halves.stage_backward_weight(iter([weight]), groups)
    return weight.grad is not None and torch.equal(weight.grad, expected)


def stage_backwards() -> Any:
    """The module that runs the backward of a pipeline stage, as a whole or in two halves.

    There is no public way to divide a backward. Imported here because
    `torch.distributed.pipelining` takes long to import.
    """
    from torch.distributed.pipelining import _backward  # noqa: PLC0415

    return _backward


def stage_forward(stage: Any, chunk: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """What a pipeline stage keeps of a forward: outputs, or their gradient edges, and inputs."""
    if hasattr(stage, "fwd_cache"):  # before torch 2.15
        outputs, inputs = stage.fwd_cache[chunk]
        return outputs, inputs
    state = stage._forward_chunk_states[chunk]
    return state.stage_output_for_backward(), state.input_values


# -- compile and distributed ---------------------------------------------------------------------

# `torch.compiler.disable` is the public equivalent, but importing it takes seconds.
eval_frame = torch._C._dynamo.eval_frame


def bind_compiled(root: nn.Module) -> None:
    """Have what `torch.compile` returned for modules in ``root`` call their present class.

    It has bound the call of the class that a module had when it was compiled.
    """
    # If there is one, the module is imported; the import takes seconds.
    kind = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    for module in root.modules():
        if isinstance(module, kind):
            module._initialize()


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether ``module.compile`` was called."""
    return module._compiled_call_impl is not None


# The store of the job. A second store would need an address of its own.
default_store: Callable[[], Store] = distributed_c10d._get_default_store


# A pickled mesh names its process groups, as torch's own do.
process_group_named: Callable[[str], dist.ProcessGroup] = vars(distributed_c10d)[
    "_resolve_process_group"
]


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """The timeout that ``group`` was created with, which has no public name, or the default."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            timeout: timedelta = options._timeout
            return timeout
    return default_pg_timeout


# The ReduceOp that multiplies by a factor and sums. It has no public constructor.
scaled_sum: Callable[[float], Any] = dist._make_nccl_premul_sum  # type: ignore[attr-defined]


def tensor_allocator(
    group: dist.ProcessGroup, device: torch.device
) -> Callable[[int], Tensor] | None:
    """The function that allocates bytes registered with the backend of ``group``, if it has one."""
    backend = group._get_backend(device)
    supports = getattr(backend, "supports_tensor_alloc", None)  # new in torch 2.8
    if supports is None or not supports(device):
        return None
    return partial(backend.allocate_tensor, dtype=torch.uint8, device=device)


def has_symmetric_memory(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether `symmetric_tensor` works."""
    is_nccl = dist.is_nccl_available() and group._get_backend(device).name() == "nccl"
    return is_nccl and not missing(["torch._C._distributed_c10d._SymmetricMemory.rendezvous"])


def symmetric_tensor(
    num_bytes: int,
    group: dist.ProcessGroup,
    device: torch.device,
    together: contextlib.AbstractContextManager[None] | None = None,
) -> Tensor:
    """Allocate bytes at the same offset of a window that the ranks of ``group`` share.

    This is a collective, which other ranks enter only if ``together`` around the allocation, which
    may fail on this rank, ends without an error on all of them.
    """
    # The whole module is private. It is imported here because it compiles operators.
    from torch.distributed import _symmetric_memory as symmetric  # noqa: PLC0415

    if symmetric.get_backend(device) != "NCCL":
        symmetric.set_backend("NCCL")
    with together or contextlib.nullcontext():
        made = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    # Creates the communicator, which must exist; on the current device if no other is passed.
    dist.barrier(group=group, device_ids=[device.index])
    symmetric.rendezvous(made, group)
    return made


def _nccl_options(timeout: timedelta, *, without_kernels: bool) -> Any:
    """Options of a communicator; ``without_kernels`` uses copy engines where NCCL supports it."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    policy = getattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO", None)
    if without_kernels and policy is not None:
        options.config.cta_policy = policy  # type: ignore[attr-defined]
    return options


def new_registered_group(
    ranks: Sequence[int],
    backend: str,
    name: str,
    timeout: timedelta,
    *,
    without_kernels: bool = False,
) -> dist.ProcessGroup:
    """A process group of ``ranks`` of the job; only these ranks call this.

    The public function names groups by a counter, which would differ between ranks.
    """
    world = dist.group.WORLD
    assert world is not None
    made, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        backend,
        default_store(),
        GroupName(name),
        timeout=timeout,
        device_id=world.bound_device_id,
        backend_options=_nccl_options(timeout, without_kernels=True) if without_kernels else None,
    )
    assert isinstance(made, dist.ProcessGroup)
    distributed_c10d._world.pg_group_ranks[made] = {rank: i for i, rank in enumerate(ranks)}
    return made


def new_nccl_group(
    ranks: Sequence[int], name: str, timeout: timedelta, *, without_kernels: bool = False
) -> dist.ProcessGroup:
    """An NCCL group of some ranks of a job that is bound to devices.

    The public function splits the communicator of the job, which requires all of its ranks.
    """
    world = dist.group.WORLD
    assert world is not None
    assert world.bound_device_id is not None
    options = _nccl_options(timeout, without_kernels=without_kernels)
    options.global_ranks_in_group = list(ranks)
    options.group_name = GroupName(name)
    store = PrefixStore(name, default_store())
    own = ranks.index(dist.get_rank())
    kind = dist.ProcessGroup.BackendType.NCCL
    group = dist.ProcessGroup(store, own, len(ranks))
    group._set_default_backend(kind)
    backend = dist.ProcessGroupNCCL(store, own, len(ranks), options)
    group._register_backend(world.bound_device_id, kind, backend)
    group._set_group_name(options.group_name)
    _register_process_group(options.group_name, group)  # `symm_mem` looks it up by name
    _add_to_job(group, options.group_name, store, ranks)
    return group


def _add_to_job(
    group: dist.ProcessGroup, name: GroupName, store: Store, ranks: Sequence[int]
) -> None:
    """Make an NCCL group known to torch, so that `destroy_process_group` ends it."""
    known, tag = distributed_c10d._world, f"ptd:{name}"
    known.pg_map[group] = (dist.Backend.NCCL, store)
    known.pg_names[group] = name
    known.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    known.pg_backend_config[group] = str(distributed_c10d.BackendConfig(dist.Backend("nccl")))
    known.pg_to_tag[group] = tag
    for one in ("", tag):
        known.tags_to_pg.setdefault(one, []).append(group)

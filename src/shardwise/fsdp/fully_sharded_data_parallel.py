"""FSDP1's class: a wrapper around a module that the engine shards."""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload as TorchCPUOffload

from shardwise._warnings import warn_caller
from shardwise.api import fully_shard
from shardwise.comm.device import make_current
from shardwise.errors import PlanError
from shardwise.features.fsdp_module import FSDPModule
from shardwise.fsdp import api, optim_states, state_dict_type as state_dicts
from shardwise.fsdp.api import *  # noqa: F403 (programs also import the options from here)
from shardwise.fsdp.distribute import broadcast_states
from shardwise.fsdp.errors import WrapperError
from shardwise.fsdp.local_states import use_local_states
from shardwise.fsdp.names import WRAPPED, clean_name
from shardwise.fsdp.options import (
    FSDP1_STRATEGIES,
    Group,
    Ranks,
    offload_policy,
    precision_policy,
    resolve_device,
    resolve_ignored,
    resolve_ranks,
)
from shardwise.fsdp.states import EvalPrecision, buffer_dtypes, materialize, move, preserved_buffers
from shardwise.fsdp.summon import summon_full_params
from shardwise.fsdp.wrap import wrap_children
from shardwise.optim.clip import clip_grad_norm_
from shardwise.plan.policies import is_never_called
from shardwise.runtime.attach import settings_of
from shardwise.runtime.casting import cast_tensors
from shardwise.runtime.module import handle_of, normal_tensors
from shardwise.tensor.mesh import DataParallelMesh
from shardwise.tensor.sharding import local_of, sharding_of

__all__ = ["FullyShardedDataParallel"]
__all__ += api.__all__


class FullyShardedDataParallel(nn.Module):
    """Wraps and shards ``module``.

    The module keeps its parameters, as `ShardedTensor`s with the global shape. There are no flat
    parameters, regardless of ``use_orig_params``.

    Args:
        module: the module to shard. Modules in it that are already wrapped are units of their own.
        process_group: the ranks, or a pair (shards, replicas) for hybrid strategies. None uses all
            ranks.
        sharding_strategy: None is ``FULL_SHARD``.
        cpu_offload: what to keep in host memory.
        auto_wrap_policy: which modules inside become units; see `shardwise.fsdp.wrap`.
        backward_prefetch: None turns prefetch off unless ``forward_prefetch`` is set.
        mixed_precision: the dtypes of compute, reductions and buffers.
        ignored_modules: modules to exclude, with all their parameters.
        param_init_fn: called with each module of a unit on the meta device, within a unit outer
            modules first. None calls ``to_empty(...)`` and ``reset_parameters()`` of those with own
            states.
        device_id: the device to move the module to before it is sharded.
        sync_module_states: broadcast parameters and buffers from the first rank.
        forward_prefetch: turn prefetch on, even if ``backward_prefetch`` is None.
        limit_all_gathers: ignored; the number of gathered units is always limited.
        use_orig_params: ignored.
        ignored_states: parameters or modules to exclude.
        device_mesh: the ranks; pass it in place of ``process_group``.

    Raises:
        PlanError: the options do not fit the module or each other, or are not supported.
    """

    ShardingStrategy = api.ShardingStrategy
    CPUOffload = api.CPUOffload
    BackwardPrefetch = api.BackwardPrefetch
    MixedPrecision = api.MixedPrecision
    StateDictType = api.StateDictType
    _has_params = False  # there are no flat parameters; accelerate reads this with mixed precision

    def __init__(
        self,
        module: nn.Module,
        process_group: Group = None,
        sharding_strategy: api.ShardingStrategy | None = None,
        cpu_offload: TorchCPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: api.BackwardPrefetch | None = api.BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: api.MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
        fsdp_auto_wrap_policy: Any = None,  # the name of auto_wrap_policy in PyTorch 1.11
    ) -> None:
        super().__init__()
        if fsdp_auto_wrap_policy is not None:
            if auto_wrap_policy is not None:
                raise PlanError("fsdp_auto_wrap_policy is an old name; pass auto_wrap_policy alone")
            warn_caller("fsdp_auto_wrap_policy is now called auto_wrap_policy", FutureWarning)
            auto_wrap_policy = fsdp_auto_wrap_policy
        strategy = sharding_strategy or api.ShardingStrategy.FULL_SHARD
        ranks = resolve_ranks(
            process_group, device_mesh, strategy, wraps_by_hand=auto_wrap_policy is None
        )
        ignored = resolve_ignored(module, ignored_modules, ignored_states, FullyShardedDataParallel)
        device = _current_device(device_id)
        if auto_wrap_policy is not None:
            is_hybrid = len(ranks.groups) > 1 and device_mesh is None
            options = {
                "process_group": ranks.groups if is_hybrid else process_group,
                "sharding_strategy": sharding_strategy,
                "cpu_offload": cpu_offload,
                "backward_prefetch": backward_prefetch,
                "mixed_precision": mixed_precision,
                "param_init_fn": param_init_fn,
                "device_id": device_id,
                "sync_module_states": sync_module_states,
                "forward_prefetch": forward_prefetch,
                "limit_all_gathers": limit_all_gathers,
                "use_orig_params": use_orig_params,
                "ignored_states": list(ignored.parameters) or None,
                "device_mesh": device_mesh,
            }
            wrap_children(
                module, auto_wrap_policy, type(self), options, ignored.modules, ignored.parameters
            )
        self.sharding_strategy = _reported_strategy(strategy, ranks)
        self.mixed_precision = mixed_precision or api.MixedPrecision()
        self.cpu_offload = cpu_offload or api.CPUOffload()
        self.backward_prefetch = backward_prefetch
        self.forward_prefetch = forward_prefetch
        mesh = ranks.data_parallel_mesh()
        self.process_group, self._inter_node_pg = (*ranks.groups, None, None)[:2]
        if process_group is not None and not isinstance(process_group, tuple):
            self.process_group = process_group
        self.compute_device = mesh.accelerator or _device_of(module, device)
        self._comm_hook: Callable[..., None] | None = None
        self._comm_hook_state: object = None
        self._eval_precision = EvalPrecision()
        self._is_nested = False
        inside = self._wrappers_in(module)
        for inner in inside:
            inner._is_nested = True
        self._state_dict_settings = state_dicts.default_settings()
        self.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
            state_dicts.clean_incompatible_keys
        )
        self._ignored_params: set[nn.Parameter] = ignored.parameters.union(
            *(inner._ignored_params for inner in inside)
        )
        self._ignored_modules: set[nn.Module] = ignored.modules.union(
            *(inner._ignored_modules for inner in inside)
        )
        self._buffer_dtypes = (  # the dtypes of buffers in state dicts
            {} if self.mixed_precision.buffer_dtype is None else buffer_dtypes(module)
        )
        others = {*self._ignored_modules, *inside}
        materialize(module, param_init_fn, device, self._ignored_params, others)
        if device is not None:
            move(module, device, self._ignored_modules, self._ignored_params)
        else:
            _warn_if_on_cpu(_unsharded_states(module, self._ignored_params).values(), mesh)
        if sync_module_states:
            broadcast_states(_unsharded_states(module, self._ignored_params), mesh.group)
        self._modules[WRAPPED] = module
        if is_never_called(module):
            warn_caller(
                "FSDP will not all-gather parameters for containers that do not implement forward: "
                f"{type(module).__name__}, whose parameters belong to the unit that contains it"
            )
            return
        if isinstance(module, FSDPModule):
            return  # wrapped before, for example for training; it stays sharded as it is
        with preserved_buffers(self._ignored_modules):
            fully_shard(
                module,
                mesh=ranks.mesh,
                strategy=ranks.strategy,
                sharding_factor=ranks.sharding_factor,
                prefetch=int(backward_prefetch is not None or forward_prefetch),
                reshard_after_forward=ranks.reshard_after_forward,
                granularity="element" if device_mesh is None else "dim",  # torch's Shard(0)
                mp_policy=precision_policy(mixed_precision),
                offload_policy=offload_policy(cpu_offload),
                ignored_params=self._ignored_params,
                on_different_values="warn",
            )
        use_local_states(handle_of(module).runtime.mesh)

    # -- the module ------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        module = self._modules[WRAPPED]
        assert module is not None
        # Activation checkpointing may have wrapped the module since.
        inner: nn.Module = getattr(module, "_checkpoint_wrapped_module", module)
        return inner

    def __deepcopy__(self, memo: dict[int, Any]) -> "FullyShardedDataParallel":
        """A copy of the model on the same ranks; see `FSDPModule.__deepcopy__`."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        for shared in (self.process_group, self._inter_node_pg, self._comm_hook_state):
            memo[id(shared)] = shared
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __getattr__(self, name: str) -> Any:
        """An attribute of the wrapper or, if it has none of this name, of the module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            wrapped = self.__dict__.get("_modules", {}).get(WRAPPED)
            if wrapped is None:
                raise
            return getattr(wrapped, name)

    @staticmethod
    def _fqn_modifiers() -> dict[str, str]:
        """Have `torch.distributed.checkpoint.state_dict` leave the wrapper out of names.

        It does so for torch's own class, and for modules with this method.
        """
        return {"": WRAPPED}

    def __getitem__(self, key: int) -> Any:
        return self.module[key]  # type: ignore[index]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        precision = self.mixed_precision
        if self.check_is_root():
            self._eval_precision.follow(self.module, training=self.training)
            is_cast = precision.cast_root_forward_inputs and not self._eval_precision.is_full
            if precision.param_dtype and is_cast:
                args, kwargs = cast_tensors((args, kwargs), precision.param_dtype)
        return self._modules[WRAPPED](*args, **kwargs)  # type: ignore[misc]

    def check_is_root(self) -> bool:
        """Whether this is the outermost wrapper."""
        return not self._is_nested

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters of this unit, without those of wrappers inside it."""
        if not isinstance(self.module, FSDPModule):
            return []
        return [parameter.sharded for parameter in handle_of(self.module).unit.parameters]

    @property
    def rank(self) -> int:
        """The rank of this process in `process_group`."""
        return 0 if self.process_group is None else self.process_group.rank()

    @property
    def world_size(self) -> int:
        """The number of ranks in `process_group`."""
        return 1 if self.process_group is None else self.process_group.size()

    @staticmethod
    def fsdp_modules(
        module: nn.Module, root_only: bool = False
    ) -> list["FullyShardedDataParallel"]:
        """The wrappers in ``module``, including itself; with ``root_only``, only outermost ones."""
        wrappers = FullyShardedDataParallel._wrappers_in(module)
        return [w for w in wrappers if w.check_is_root()] if root_only else wrappers

    @staticmethod
    def _wrappers_in(module: nn.Module) -> list["FullyShardedDataParallel"]:
        return [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]

    def apply(self, fn: Callable[[nn.Module], None]) -> "FullyShardedDataParallel":
        """`nn.Module.apply` on full parameters. All ranks must make the same changes.

        Raises:
            WrapperError: the parameters are already gathered.
        """
        units = [module for module in self.modules() if isinstance(module, FSDPModule)]
        if any(handle_of(unit).runtime.scheduler.in_gathered for unit in units):
            raise WrapperError(
                "apply: FSDP modules are expected to be in states between steps, with sharded "
                "parameters; call it outside summon_full_params"
            )
        with summon_full_params(self):
            _apply_inside_out(self, fn)
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters, with their names in the unwrapped module."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield clean_name(name), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The buffers, with their names in the unwrapped module."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield clean_name(name), buffer

    # -- steps -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate unreduced gradients in the body of a ``with`` statement.

        Raises:
            WrapperError: this is not the outermost wrapper.
        """
        unit = self._root_unit("no_sync() should only be called on the root FSDP instance")
        unit.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            unit.set_requires_gradient_sync(True)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most ``max_norm``.

        Returns:
            The norm before scaling, in the dtype of the gradients.

        Raises:
            WrapperError: this is not the outermost wrapper.
        """
        self._root_unit("clip_grad_norm_() should only be called on the root FSDP instance")
        if all(parameter.grad is None for parameter in self.parameters()):
            warn_caller(
                f"clip_grad_norm_: called on rank {self.rank} with no gradients -- returning the "
                "total norm in the default dtype torch.float32"
            )
        return clip_grad_norm_(self.parameters(), float(max_norm), float(norm_type))

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook`` do the whole reduction of the gradients of every unit.

        Args:
            state: the first argument of the hook.
            hook: if parameters are not sharded, called as ``hook(state, gradients)``; it must
                reduce ``gradients`` [n] in place. Otherwise called as ``hook(state, gradients,
                shard)``; it must write this rank's part of the reduced gradients into ``shard``
                [n / world_size]. It may replace ``.data`` of both, and must also divide by the
                number of ranks. PyTorch has some hooks in a private module of
                ``torch.distributed.algorithms``.

        Raises:
            PlanError: ``hook`` is not callable.
            WrapperError: this is not the outermost wrapper, or a wrapper already has a hook or
                shards over two axes.
        """
        self._root_unit("register_comm_hook can only be called on a root instance.")
        if not callable(hook):
            raise PlanError(f"register_comm_hook: expected a callable hook, got {hook!r}")
        wrappers = self._wrappers_in(self)
        for wrapper in wrappers:
            if FSDP1_STRATEGIES[wrapper.sharding_strategy][0] == "hsdp":
                raise WrapperError(
                    "Communication hook is not supported for hybrid strategies: "
                    f"{wrapper.sharding_strategy}"
                )
            if wrapper._comm_hook is not None:
                raise WrapperError("A communication hook is already registered")
        for wrapper in wrappers:
            wrapper._comm_hook, wrapper._comm_hook_state = hook, state
            if isinstance(wrapper.module, FSDPModule):  # a wrapped list of modules is not a unit
                settings_of(wrapper.module).collective_hook = partial(hook, state)

    summon_full_params = staticmethod(summon_full_params)

    # -- state dicts -----------------------------------------------------------------------------

    state_dict_type = staticmethod(state_dicts.state_dict_type)
    set_state_dict_type = staticmethod(state_dicts.set_state_dict_type)
    get_state_dict_type = staticmethod(state_dicts.get_state_dict_type)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state dict of the type chosen by `set_state_dict_type`; full tensors by default.

        All ranks must call this.
        """
        with normal_tensors():
            return state_dicts.state_dict_of(self, super().state_dict, *args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        state_dicts.rename_for_loading(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    optim_state_dict = staticmethod(optim_states.optim_state_dict)
    optim_state_dict_to_load = staticmethod(optim_states.optim_state_dict_to_load)
    full_optim_state_dict = staticmethod(optim_states.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(optim_states.sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(optim_states.shard_full_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(optim_states.scatter_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(optim_states.flatten_sharded_optim_state_dict)
    rekey_optim_state_dict = staticmethod(optim_states.rekey_optim_state_dict)

    def _root_unit(self, message: str) -> FSDPModule:
        if not self.check_is_root():
            raise WrapperError(message)
        unit = self.module
        assert isinstance(unit, FSDPModule)
        return unit


def _reported_strategy(strategy: api.ShardingStrategy, ranks: Ranks) -> api.ShardingStrategy:
    """The strategy that FSDP1 reports; on one rank it warns and switches to ``NO_SHARD``."""
    no_shard = api.ShardingStrategy.NO_SHARD
    if strategy is no_shard or not dist.is_initialized() or not ranks.is_alone:
        return strategy
    warn_caller(
        f"FSDP is switching to use `NO_SHARD` instead of {strategy} since the world size is 1."
    )
    return no_shard


def _device_of(module: nn.Module, device: torch.device | None) -> torch.device:
    """The device on which ``module`` computes: ``device``, its own, or the default device."""
    own = next((p.device for p in module.parameters() if not p.is_meta), None)
    return device or own or torch.get_default_device()


def _current_device(device_id: int | torch.device | None) -> torch.device | None:
    """The device for ``device_id``, made current, so that shards and collectives use it."""
    device = resolve_device(device_id)
    if device is not None:
        make_current(device)
    return device


def _warn_if_on_cpu(states: Iterable[Tensor], mesh: DataParallelMesh) -> None:
    stays = mesh.accelerator is None  # otherwise `fully_shard` moves them there
    first = next(iter(states), None)
    if stays and first is not None and first.is_cpu and torch.accelerator.device_count():
        warn_caller(
            "The passed-in `module` is on CPU and so are its shards, although this machine has an "
            "accelerator; pass device_id to move it there first, or torch.device('cpu') to keep it"
        )


def _unsharded_states(module: nn.Module, ignored: set[nn.Parameter]) -> dict[str, Tensor]:
    """The unsharded parameters and buffers; the local tensors of tensor-parallel ones."""
    parameters = [(name, p) for name, p in module.named_parameters() if p not in ignored]
    states = (*parameters, *module.named_buffers())
    return {name: local_of(state) for name, state in states if sharding_of(state) is None}


def _apply_inside_out(module: nn.Module, fn: Callable[[nn.Module], None]) -> None:
    for child in module.children():
        _apply_inside_out(child, fn)
    fn(module)

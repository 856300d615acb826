"""FSDP1's class: a module around the user's own, which is sharded by the engine."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.api import fully_shard
from shardwise.errors import PlanError
from shardwise.fsdp import api, optim_states, state_dict_type as state_dicts
from shardwise.fsdp.materialize import materialize
from shardwise.fsdp.names import WRAPPED, clean_name
from shardwise.fsdp.options import (
    Group,
    Ignored,
    offload_policy,
    precision_policy,
    ranks_of,
    resolve_device,
)
from shardwise.fsdp.summon import summon_full_params
from shardwise.fsdp.wrap import wrap_children
from shardwise.optim.clip import clip_grad_norm_
from shardwise.plan.units import NEVER_CALLED
from shardwise.runtime.casting import cast_tensors
from shardwise.runtime.module import FSDPModule, is_root_unit
from shardwise.runtime.tensor import ShardedTensor
from shardwise.transport.process_group import broadcast_tensors

__all__ = ["FullyShardedDataParallel"]


class FullyShardedDataParallel(nn.Module):
    """``module``, sharded.

    Parameters are the user's own ones (`ShardedTensor`s with the global shape), whatever
    ``use_orig_params`` says: there are no flat ones.

    Args:
        module: to shard; modules in it that are wrapped already are units of their own.
        process_group: the ranks; for hybrid strategies a pair (shards, replicas). None for all.
        sharding_strategy: None is ``FULL_SHARD``.
        cpu_offload: what is kept in the memory of the host.
        auto_wrap_policy: which modules inside become units; see `shardwise.fsdp.wrap`.
        backward_prefetch: None gathers nothing ahead, unless ``forward_prefetch``.
        mixed_precision: dtypes.
        ignored_modules: left alone, with all they hold.
        param_init_fn: called with each module on the meta device that holds parameters or buffers;
            None is ``module.to_empty(...)`` and ``module.reset_parameters()``.
        device_id: where to move the module to before it is cut.
        sync_module_states: give every rank the values of the first one.
        forward_prefetch: gather ahead in forward.
        limit_all_gathers: gathers are limited by the plan.
        use_orig_params: both ways the same.
        ignored_states: parameters or modules to leave alone.
        device_mesh: in the place of ``process_group``.

    Raises:
        PlanError: the options do not fit the module or each other, or cannot be honoured.
    """

    ShardingStrategy = api.ShardingStrategy
    CPUOffload = api.CPUOffload
    BackwardPrefetch = api.BackwardPrefetch
    MixedPrecision = api.MixedPrecision
    StateDictType = api.StateDictType

    def __init__(
        self,
        module: nn.Module,
        process_group: Group = None,
        sharding_strategy: api.ShardingStrategy | None = None,
        cpu_offload: api.TorchCPUOffload | None = None,
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
    ) -> None:
        super().__init__()
        strategy = sharding_strategy or api.ShardingStrategy.FULL_SHARD
        ranks = ranks_of(process_group, device_mesh, strategy)
        ignored = Ignored(ignored_modules, ignored_states)
        device = resolve_device(device_id)
        if auto_wrap_policy is not None:
            options = {
                "process_group": process_group,
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
        self.sharding_strategy = strategy
        self.mixed_precision = mixed_precision or api.MixedPrecision()
        self.cpu_offload = cpu_offload or api.CPUOffload()
        self.process_group = ranks.axis().group or dist.group.WORLD
        self._state_dict_settings = state_dicts.default_settings()
        self._ignored_params = ignored.parameters.union(*_ignored_inside(module))
        materialize(module, param_init_fn, device, self._ignored_params)
        if device is not None:
            module.to(device)
        if sync_module_states:
            broadcast_tensors(_plain_states(module, self._ignored_params), ranks.axis().group)
        self._modules[WRAPPED] = module
        if isinstance(module, NEVER_CALLED):
            return  # what it holds belongs to the wrapper around it
        fully_shard(
            module,
            mesh=ranks.mesh,
            strategy=ranks.strategy,
            sharding_factor=ranks.sharding_factor,
            prefetch=int(backward_prefetch is not None or forward_prefetch),
            reshard_after_forward=ranks.reshard_after_forward,
            mp_policy=precision_policy(mixed_precision),
            offload_policy=offload_policy(cpu_offload),
            ignored_params=self._ignored_params,
        )

    # -- the module ------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The user's own."""
        module = self._modules[WRAPPED]
        assert module is not None
        # A wrapper for activation checkpointing that was put around it later.
        inner: nn.Module = getattr(module, "_checkpoint_wrapped_module", module)
        return inner

    def __getattr__(self, name: str) -> Any:
        """Of the wrapper, or else of the module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            wrapped = self.__dict__.get("_modules", {}).get(WRAPPED)
            if wrapped is None:
                raise
            return getattr(wrapped, name)

    def __getitem__(self, key: int) -> Any:
        return self.module[key]  # type: ignore[index]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        precision = self.mixed_precision
        if precision.param_dtype and precision.cast_root_forward_inputs and self.check_is_root():
            args, kwargs = cast_tensors((args, kwargs), precision.param_dtype)
        return self._modules[WRAPPED](*args, **kwargs)  # type: ignore[misc]

    def check_is_root(self) -> bool:
        """Whether no other wrapper is around this one."""
        return is_root_unit(self.module)

    @property
    def rank(self) -> int:
        """This one's, in `process_group`."""
        return dist.get_rank(self.process_group) if dist.is_initialized() else 0

    @property
    def world_size(self) -> int:
        """How many ranks there are in `process_group`."""
        return dist.get_world_size(self.process_group) if dist.is_initialized() else 1

    @staticmethod
    def fsdp_modules(
        module: nn.Module, root_only: bool = False
    ) -> list["FullyShardedDataParallel"]:
        """The wrappers in ``module``, itself included; with ``root_only``, those in no other."""
        wrappers = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        return [w for w in wrappers if w.check_is_root()] if root_only else wrappers

    def apply(self, fn: Callable[[nn.Module], None]) -> "FullyShardedDataParallel":
        """`nn.Module.apply` on whole parameters; all ranks have to make the same changes."""
        if not any(isinstance(p, ShardedTensor) for p in self.parameters()):
            super().apply(fn)  # the wrapper around this one has made them whole
            return self
        with summon_full_params(self):
            super().apply(fn)
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """With the names that they have without wrappers."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield clean_name(name), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """With the names that they have without wrappers."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield clean_name(name), buffer

    # -- steps -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it gradients add up whole on every rank and are not reduced.

        Raises:
            PlanError: this is not the outermost wrapper.
        """
        unit = self._root_unit("no_sync")
        unit.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            unit.set_requires_gradient_sync(True)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most ``max_norm``.

        Returns:
            The norm before.

        Raises:
            PlanError: this is not the outermost wrapper.
        """
        self._root_unit("clip_grad_norm_")
        return clip_grad_norm_(self.parameters(), float(max_norm), float(norm_type))

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:  # noqa: ARG002
        """Raises PlanError: reductions are written with the memory that they take.

        Torch's ``allreduce_hook`` and ``reduce_scatter_hook``, which do what is done anyhow, are
        taken.
        """
        name = getattr(hook, "__name__", repr(hook))
        if name not in ("allreduce_hook", "reduce_scatter_hook"):
            raise PlanError(
                f"register_comm_hook({name}): reductions take no hooks; for gradients in 16 bits "
                "on the wire pass MixedPrecision(reduce_dtype=torch.bfloat16)"
            )

    summon_full_params = staticmethod(summon_full_params)

    # -- state dicts -----------------------------------------------------------------------------

    state_dict_type = staticmethod(state_dicts.state_dict_type)
    set_state_dict_type = staticmethod(state_dicts.set_state_dict_type)
    get_state_dict_type = staticmethod(state_dicts.get_state_dict_type)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As `set_state_dict_type` said; whole tensors by default. All ranks have to call it."""
        return state_dicts.saved(self, super().state_dict, *args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        state_dicts.prepare(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    optim_state_dict = staticmethod(optim_states.optim_state_dict)
    optim_state_dict_to_load = staticmethod(optim_states.optim_state_dict_to_load)
    full_optim_state_dict = staticmethod(optim_states.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(optim_states.sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(optim_states.shard_full_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(optim_states.scatter_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(optim_states.flatten_sharded_optim_state_dict)
    rekey_optim_state_dict = staticmethod(optim_states.rekey_optim_state_dict)

    def _root_unit(self, method: str) -> FSDPModule:
        if not self.check_is_root():
            raise PlanError(f"{method}: call it on the outermost wrapper, around the whole model")
        unit = self.module
        assert isinstance(unit, FSDPModule)
        return unit


def _ignored_inside(module: nn.Module) -> list[set[nn.Parameter]]:
    wrappers = (m for m in module.modules() if isinstance(m, FullyShardedDataParallel))
    return [wrapper._ignored_params for wrapper in wrappers]


def _plain_states(module: nn.Module, ignored: set[nn.Parameter]) -> list[Tensor]:
    parameters = [p for p in module.parameters() if p not in ignored]
    return [t for t in (*parameters, *module.buffers()) if not isinstance(t, ShardedTensor)]

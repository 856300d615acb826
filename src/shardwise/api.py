"""`fully_shard`: plans a model, has the runtime shard it, and attaches the features."""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from shardwise import parts  # noqa: F401 - registers watch and the queues between CPUs
from shardwise._private import bind_compiled
from shardwise._warnings import warn_caller
from shardwise.comm.api import MemoryKind
from shardwise.comm.device import make_current
from shardwise.errors import PlanError
from shardwise.features import (
    block_sums,  # noqa: F401 - registers the sums of reproducible models
    device_step,
    extensions,  # noqa: F401 - registers the codec of all-gather extensions
    fused_wgrad,
    host_step,
)
from shardwise.features.checks import (
    check_initialized,
    check_not_renormalized,
    check_optimizers,
    check_same_plan,
    check_same_sums,
    check_same_values,
    check_tensor_parallel,
    device_for,
    flags_of_ranks,
    is_on_meta,
    iterates_in_forward,
    warn_if_whole,
)
from shardwise.features.collective_memory import use_memory
from shardwise.features.deferred import defer, is_deferred
from shardwise.features.fsdp_module import FSDPModule
from shardwise.features.full_precision import apply_precision
from shardwise.features.held_memory import HeldMemory
from shardwise.features.initialize import Initialization, Materializer
from shardwise.features.leaves import Leaves
from shardwise.features.local_spmd import make_dtensors
from shardwise.features.padding import padding_report
from shardwise.features.pretrained import wrapped_methods
from shardwise.features.unused import UNUSED, Unused, UnusedParameters
from shardwise.plan.granularity import Dim, Granularities, Granularity, Granularizer
from shardwise.plan.layout import ParameterSpec
from shardwise.plan.offload import OffloadPolicy, as_offload_policy
from shardwise.plan.options import UnitOptions
from shardwise.plan.plan import Plan, make_plan
from shardwise.plan.policies import Units, check_is_unit
from shardwise.plan.precision import DEFAULT_PRECISION, MixedPrecisionPolicy, as_precision_policy
from shardwise.plan.spelling import expected_one_of
from shardwise.plan.strategy import Strategy, resolve_strategy
from shardwise.plan.units import named_parameters
from shardwise.plan.wire import UNQUANTIZED, Wire
from shardwise.runtime.attach import IGNORED, ignored_within, parameter_of, restore_ties
from shardwise.runtime.engine import Handle, Runtime
from shardwise.runtime.memory import Pool
from shardwise.runtime.module import (
    become_unit,
    handle_of,
    keeping_gradients,
    lenders_of,
    plain_class,
    set_managed,
)
from shardwise.runtime.structure import HANDLE
from shardwise.tensor.mesh import (
    Communicators,
    DataParallelMesh,
    data_parallel_part,
    resolve_mesh,
    without_copies,
)
from shardwise.tensor.sharding import is_tensor_parallel, sharding_of

__all__ = ["fully_shard"]

M = TypeVar("M", bound=nn.Module | Sequence[nn.Module])


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    strategy: str | Strategy | None = None,
    units: Units = None,
    prefetch: int = 1,
    reshard_after_forward: bool | int | None = None,
    sharding_factor: int | None = None,
    granularity: Granularities = "element",
    mp_policy: MixedPrecisionPolicy = DEFAULT_PRECISION,
    offload_policy: OffloadPolicy | None = None,
    wire: Wire = UNQUANTIZED,
    unused: Unused = "none",
    init: Initialization | None = None,
    ignored_params: Collection[nn.Parameter] | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    on_different_values: Literal["error", "warn"] = "error",
    communicators: Communicators = "separate",
    dp_mesh_dims: Any = None,
    reproducible: int | None = None,
) -> M:
    """Shard ``module`` over the ranks of ``mesh`` and return the same object.

    Its parameters become DTensors. Names and ties stay as they are, and an optimizer built before
    the call steps the sharded parameters. Each unit is gathered just before it computes and freed
    right after, in forward and backward. Call this function once with ``units``, or, as in FSDP2,
    once for each block and then for the root. Calls of the model copy inputs on the CPU to the
    accelerator of the parameters.

    Args:
        module: the model, with the same values on every rank, or on the meta device; or a list of
            modules, each of which becomes a separate unit.
        mesh: a one-dimensional mesh, or a two-dimensional one, (outer, inner), for strategies over
            two axes. None uses all ranks, or this process alone without a process group.
        strategy: what is sharded over which mesh axis: the name of a row of
            `plan.strategy.PRESETS`, or a `Strategy` of your own. None is ``"fsdp"``, and ``"hsdp"``
            on a two-dimensional mesh.
        units: a module class or its name, a set of them, ``"auto"`` (the repeated blocks), a size
            in parameters, or a policy ``(module, recurse, nonwrapped_numel) -> bool``.
        prefetch: how many units to gather ahead of the one that computes.
        reshard_after_forward: free units after forward and gather them again for backward. None
            does so for all units but the root. With a number k, each rank keeps 1/k of a unit after
            forward, so that groups of k neighboring ranks gather it among themselves.
        sharding_factor: replaces a two-dimensional mesh: how many neighboring ranks share one copy
            of the model. It must divide the number of ranks.
        granularity: where a parameter may be cut between ranks: ``"element"`` (anywhere),
            ``"row"`` (between slices along dim 0), `sw.block(n)` (between blocks of n rows),
            ``"tensor"`` (nowhere) or ``"dim"`` (as in FSDP2: each rank has a chunk of dim 0 of
            every parameter, as cut by `torch.chunk`, in a DTensor with ``Shard(0)``; this costs one
            more copy of a unit in each gather and each reduction). Pass one value for all
            parameters, a mapping from fnmatch patterns of names (the first match decides), or a
            function of name and shape; parameters that these leave out are cut by element. The
            choice of an earlier call for a block is kept. A warning reports costly padding.
        mp_policy: the dtypes of gathers, compute, reductions and shards. Without one, only
            trainable parameters in bfloat16 or float16 get float32 shards ("masters").
        offload_policy: ``sw.CPUOffloadPolicy()`` keeps shards, their gradients and the optimizer
            state in host memory; compute stays on the device. None does not.
        wire: ``sw.Wire(gather="int8", reduce="int4")`` quantizes gathered parameters and reduced
            gradients while they travel between ranks.
        unused: the gradient of a parameter that no rank used in a step: ``"none"`` leaves it None,
            as one process would; ``"zeros"`` fills it with zeros and saves a small exchange
            between ranks. ``"error"`` raises a `StepError` on every rank at the end of backward if
            any rank computed no gradient for a parameter; the message names rank and parameter.
        init: how to initialize a model on the meta device; the values do not depend on the number
            of ranks. Units are materialized, initialized and sharded one after the other, so peak
            memory is the shards and one unit. With ``units``, None is ``Initialization(seed=0)``.
            Without ``units``, None behaves as in FSDP2: a module on the meta device is sharded
            when it gets storage, by ``to_empty``, or by ``load_state_dict(assign=True)`` and the
            first forward after it; or in that forward, if only some ranks have it on meta.
        ignored_params: parameters of ``module`` to leave alone: they stay whole, and their
            gradients are not reduced. As in FSDP2, a call for an enclosing module ignores them,
            too.
        shard_placement_fn: as in FSDP2. If it returns ``Shard(dim)`` for a parameter, the parameter
            is cut along that dim, as with "dim"; if it returns None, ``granularity`` applies.
        on_different_values: ``"error"`` refuses parameters whose values differ between ranks (for
            example from different seeds; the shards would not form one model) and parameters that
            were added after sharding. ``"warn"`` warns of both and continues; FSDP2 accepts both.
            With it, modules that were sharded over other ranks may also stay models of their own.
        communicators: ``"separate"`` gives gathers and reductions process groups of their own, so
            that neither waits behind the other. ``"shared"`` uses one for each mesh axis, as FSDP2
            does: half as many communicators, each of which takes memory and, on a GPU, processors
            while it runs. The call for the root decides. docs/options.md compares them.
        dp_mesh_dims: as in FSDP2, a `DataParallelMeshDims`: the dims of ``mesh`` to shard over and
            to replicate over. Parameters are then DTensors on the whole ``mesh``.
        reproducible: the number of micro-batches in a step over all ranks, a power of two. Training
            then gives the same bits on any number of ranks that divides it; docs/reproducible.md
            describes the loop, `sw.leaves`, and what the promise requires.

    Raises:
        PlanError: the arguments do not fit the model or each other.

    Source: Zhao et al., PyTorch FSDP, 2023 (arXiv 2304.11277).
    """
    _check_word("unused", unused, UNUSED)
    _check_word("on_different_values", on_different_values, ("error", "warn"))
    _check_word("communicators", communicators, get_args(Communicators))
    modules = module if isinstance(module, Sequence) else (module,)
    ignored_params = [*(ignored_params or ()), *ignored_within(modules)]
    dims: tuple[str, ...] = ()
    if dp_mesh_dims is not None:
        dims = (*dp_mesh_dims.replicate_names, *dp_mesh_dims.shard_names)
    place = shard_placement_fn
    if "spmd_types" in sys.modules:
        place = make_dtensors(modules, mesh, dims, ignored_params, place)
    if dp_mesh_dims is not None:
        mesh = data_parallel_part(mesh, dp_mesh_dims.shard_names, dp_mesh_dims.replicate_names)
        if strategy is None and not dp_mesh_dims.shard_names:
            strategy = "ddp"
    if strategy is None:
        strategy = "hsdp" if isinstance(mesh, DeviceMesh) and mesh.ndim > 1 else "fsdp"
    resolved = resolve_strategy(strategy)
    request = ShardingRequest(
        mesh=resolve_mesh(mesh, resolved, sharding_factor).with_options(
            dims, communicators, reproducible
        ),
        strategy=resolved,
        units=units,
        options=UnitOptions(
            reshard_after_forward,
            as_precision_policy(mp_policy),
            as_offload_policy(offload_policy),
            _checked_wire(wire),
        ),
        prefetch=prefetch,
        place=place,
        granularity=granularity,
        warns=on_different_values == "warn",
        unused=unused,
        init=init,
        ignored_params=ignored_params,
    )
    for each in modules:
        _check_module(each, ignored_params)
        if units is None and init is None and any(on_meta := request.on_meta(each)):
            request.apply_later(each, once_used=not all(on_meta))
        elif init is not None or not is_deferred(each, ignored_params):
            request.apply(each)
        else:
            replace(request, init=Initialization()).apply(each)
        if ignored_params:
            vars(each)[IGNORED] = _names_of(each, ignored_params)
    return module


def _check_word(name: str, given: object, known: tuple[str, ...]) -> None:
    if given not in known:
        raise PlanError(f"{name}={given!r}: {expected_one_of(known, given)}")


def _checked_wire(wire: object) -> Wire:
    if not isinstance(wire, Wire):
        raise PlanError(f'wire={wire!r}: expected sw.Wire, as in sw.Wire(gather="int8")')
    return wire


def _check_module(module: object, ignored: Collection[nn.Parameter]) -> None:
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise PlanError(f"fully_shard takes a torch.nn.Module or a list of them, got {kind}")
    if isinstance(module, FSDPModule):
        name = plain_class(type(module)).__name__
        raise PlanError(
            f"{name} is sharded already; call fully_shard once for each module, and for the root "
            "last"
        )
    if torch.is_inference_mode_enabled():
        raise PlanError(
            "fully_shard was called under torch.inference_mode, whose tensors cannot be trained "
            "later; shard the model outside it"
        )
    check_is_unit(module, "")
    check_initialized(module)
    _check_order(module, ignored)


def _check_order(module: nn.Module, ignored: Collection[nn.Parameter]) -> None:
    """Raise a PlanError if a unit around ``module`` has parameters of it."""
    named = named_parameters(module, ignored=ignored)
    sharded = [(name, p, of) for name, p in named if (of := sharding_of(p)) is not None]
    for name, parameter, sharding in sharded:
        unit = None if sharding.module is None else sharding.module()
        if unit is None or HANDLE not in vars(unit) or module not in set(unit.modules()):
            continue
        if any(one.sharded is parameter for one in handle_of(unit).unit.parameters):
            raise PlanError(
                f"{name} was sharded with a module around this {type(module).__name__}; call "
                "fully_shard for inner modules before those around them"
            )


@dataclass(frozen=True, eq=False)
class ShardingRequest:
    """What a call of `fully_shard` asked for."""

    mesh: DataParallelMesh
    strategy: Strategy
    units: Units
    options: UnitOptions
    prefetch: int
    place: Callable[[nn.Parameter], Any] | None
    granularity: Granularities
    warns: bool
    unused: Unused
    init: Initialization | None
    ignored_params: Collection[nn.Parameter]

    def on_meta(self, module: nn.Module) -> list[bool]:
        """Whether ``module`` is on the meta device, by rank."""
        if self.mesh.accelerator is not None:
            make_current(self.mesh.accelerator)
        return flags_of_ranks(is_deferred(module, self.ignored_params), self.mesh)

    def apply(self, module: nn.Module, converted: Collection[str] = ()) -> None:
        """Plan ``module`` and shard it; also after a conversion to other dtypes or devices.

        ``converted``: compute dtypes of float32 masters that no longer apply.
        """
        is_new, handles = HANDLE not in vars(module), _handles_in(module)
        separate = _separate_models(handles, self.mesh)
        manual, plan = self._plan(module, handles, separate, converted)
        _warn_of_padding(plan, self.mesh)
        for runtime in dict.fromkeys(handles[name].runtime for name in manual):
            runtime.scheduler.reduce_accumulated()
        own_meshes = without_copies(
            {name: handles[name].mesh for name, one in manual.items() if one.world_size}
        )
        # The compute device of units whose shards are on the host.
        offloaded = (one for one in handles.values() if one.unit.plan.offload is not None)
        device = next((one.runtime.pools.device for one in offloaded), None)
        with keeping_gradients(module):
            runtime = self._build(module, plan, own_meshes, device, self.init)
        options = inner = self.options
        if options.precision.output_dtype is not None:  # it is that of the outermost unit
            inner = replace(options, precision=replace(options.precision, output_dtype=None))
        modules = [module.get_submodule(unit.name) for unit in plan.units]
        lenders = lenders_of(plan, modules)
        for index, (unit, unit_module) in enumerate(zip(plan.units, modules, strict=True)):
            chosen = manual.get(unit.name, inner if index else options)
            handle = Handle(runtime, index, chosen, lenders.get(index))
            become_unit(unit_module, handle, FSDPModule, wrapped_methods(unit_module))
        bind_compiled(module)
        set_managed(module)
        apply_precision(module, options.precision, settled=[*manual, *separate])
        fused_wgrad.replace_layers(module)
        runtime.watch_structure(module, warns=self.warns)
        if is_new and self.units is None and self.mesh.size > 1:
            warn_if_whole(module, plan)

    def apply_later(self, module: nn.Module, *, once_used: bool) -> None:
        """Plan ``module``, which is on the meta device, and shard it once it has storage.

        ``once_used``: only when it is used, because on some ranks it has storage already.
        """
        handles = _handles_in(module, shards_now=not once_used)
        _, plan = self._plan(module, handles, _separate_models(handles, self.mesh))
        names = _names_of(module, self.ignored_params)

        def shard() -> None:
            ignored = [parameter_of(module, name) for name in names]  # `to_empty` made new ones
            replace(self, ignored_params=ignored).apply(module)

        defer(module, shard, plan, self.mesh, once_used=once_used)

    def build(self, root: nn.Module, plan: Plan, like: Runtime) -> Runtime:
        """Shard ``root``, a copy of the root of ``like`` or the root itself, by ``plan``."""
        names = zip(like.plan.units, plan.units, strict=True)
        renamed = {before.name: after.name for before, after in names}
        own_meshes = {renamed.get(name, name): mesh for name, mesh in like.own_meshes.items()}
        return self._build(root, plan, own_meshes, like.pools.device, None)

    def _plan(
        self,
        module: nn.Module,
        handles: Mapping[str, Handle],
        separate: Collection[str],
        converted: Collection[str] = (),
    ) -> tuple[dict[str, UnitOptions], Plan]:
        """Return the options of units that earlier calls have sharded, and the plan.

        ``handles`` are those of all such units, of which some remain ``separate`` models.
        """
        mesh, options, granularity = self.mesh, self.options, self.granularity
        restore_ties(module)
        if separate and not self.warns:
            name = next(iter(separate))
            raise _different_ranks_error(name, handles[name], mesh)
        others = map(module.get_submodule, separate)
        ignored = [*self.ignored_params, *(p for one in others for p in one.parameters())]
        check_tensor_parallel(module, mesh, ignored)
        if self.place is not None or any(map(is_tensor_parallel, module.parameters())):
            granularity = _placement_granularities(module, self.place, Granularizer(granularity))
        check_not_renormalized(module, ignored)
        _check_init(module, self.init, ignored)
        _check_reproducible(module, handles, mesh, ignored)
        manual = {
            name: _options_within(mesh, name, handle)
            for name, handle in handles.items()
            if name not in separate
        }
        plan = make_plan(
            module,
            world_size=mesh.size,
            units=self.units,
            strategy=self.strategy,
            prefetch=self.prefetch,
            reshard_after_forward=options.reshard_after_forward,
            replicas=mesh.column.size,
            granularity=granularity,
            manual=manual,
            precision=options.precision,
            offload=options.offload,
            wire=options.wire,
            settled=_specs_before(module, converted),
            ignored=_names_of(module, ignored),
            leaves=mesh.leaves,
        )
        if plan.strategy.is_two_level and any(unit.chunked_bytes for unit in plan.units):
            raise PlanError(
                f"granularity 'dim' with {plan.strategy}: expected a strategy that shards over one "
                "axis, as FSDP2 does; pass another granularity, or strategy 'fsdp' or 'hsdp'"
            )
        _check_holders(module, plan, mesh)
        return manual, plan

    def _build(
        self,
        root: nn.Module,
        plan: Plan,
        own_meshes: Mapping[str, DataParallelMesh],
        device: torch.device | None,
        init: Initialization | None,
    ) -> Runtime:
        """Shard the parameters of ``root`` and attach the features."""
        mesh = self.mesh
        planned = {name for unit in plan.units for spec in unit.parameters for name in spec.names}
        ignored = [p for name, p in named_parameters(root) if name not in planned]
        device = device_for(root, mesh, ignored, device)
        if mesh.accelerator is not None:
            make_current(device)
        if mesh.leaves is not None:
            offloads = any(unit.offload is not None for unit in plan.units)
            _check_deterministic(device, offloads=offloads)
        check_same_plan(plan, mesh, on_meta=init is not None, warns=self.warns)
        device_step.check_granularity(plan)
        if init is None:
            check_same_values(root, plan, mesh, warns=self.warns)
        materializer = None if init is None else Materializer(root, plan, init, Pool(device))
        runtime = Runtime(
            root,
            plan,
            mesh,
            device,
            request=replace(self, init=None),  # a later conversion initializes nothing
            fill=None if materializer is None else materializer.fill,
            own_meshes=own_meshes,
        )
        runtime.scheduler.observer = UnusedParameters(self.unused, device)
        runtime.scheduler.notes = HeldMemory(root, runtime)
        if materializer is not None:
            materializer.free_last_unit()
            check_same_sums(materializer.checksums, mesh)
        check_optimizers()
        kinds = {unit.settings.collective_memory for unit in runtime.units} - {MemoryKind.OWN}
        if kinds:  # chosen for units before the module around them was sharded
            use_memory(runtime, MemoryKind(kinds.pop()))
        fused_wgrad.offer_slots(runtime)
        if mesh.leaves is not None:
            runtime.scheduler.leaves = Leaves(runtime)
        if any(unit.steps_on_device for unit in plan.units):
            device_step.watch(runtime)
        if any(unit.offloads_gradients for unit in plan.units):
            host_step.watch(runtime)
        return runtime


def _check_reproducible(
    root: nn.Module,
    handles: Mapping[str, Handle],
    mesh: DataParallelMesh,
    ignored: Collection[nn.Parameter],
) -> None:
    """Raise a PlanError if calls differ, or if results depend on the leaves of a rank."""
    for name, handle in handles.items():
        if handle.runtime.mesh.leaves != mesh.leaves:
            raise PlanError(
                f"reproducible={mesh.leaves}, but {name} was sharded with "
                f"reproducible={handle.runtime.mesh.leaves}; pass the same number to every call"
            )
    if mesh.leaves is None:
        return
    if any(parameter.requires_grad for parameter in ignored):
        names = ", ".join(sorted(_names_of(root, [p for p in ignored if p.requires_grad])))
        raise PlanError(
            f"reproducible={mesh.leaves}: {names} in ignored_params are trainable, but the engine "
            "does not sum their gradients; freeze them, or leave them out of ignored_params"
        )
    for name, module in root.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise PlanError(
                f"reproducible={mesh.leaves}: {name} (SyncBatchNorm) normalizes over as many "
                "micro-batches as there are ranks; use a norm within a sample, such as LayerNorm"
            )
        if getattr(module, "track_running_stats", False) is True:  # of BatchNorm, InstanceNorm
            raise PlanError(
                f"reproducible={mesh.leaves}: {name} ({type(module).__name__}) keeps statistics of "
                "the micro-batches of its own rank; use a norm without running statistics, such as "
                "LayerNorm or GroupNorm; if it stays in eval(), set its track_running_stats to "
                "False, and it will still use those that it has"
            )
        if iterates_in_forward(module):
            raise PlanError(
                f"reproducible={mesh.leaves}: each forward changes buffers of {name} (such as "
                "those of spectral_norm), and the number of forwards of a rank depends on the "
                "number of ranks; use another parametrization, such as weight_norm"
            )


def _check_deterministic(device: torch.device, *, offloads: bool) -> None:
    """Check that kernels give the same results in every run.

    Args:
        device: where the model computes.
        offloads: the optimizer steps units on the CPU.

    Raises:
        PlanError: the device may use others.
    """
    threads = torch.get_num_threads()
    if (device.type == "cpu" or offloads) and threads > 1:
        warn_caller(
            f"reproducible=... with {threads} threads per rank: results depend on their number, "
            "and in bfloat16 on the number of ranks; first call torch.set_num_threads(1)"
        )
    if device.type not in ("cpu", "meta") and not torch.are_deterministic_algorithms_enabled():
        raise PlanError(
            f"reproducible=... on {device}: some kernels add in an order that changes from run to "
            "run; first call torch.use_deterministic_algorithms(True), which raises an error where "
            "an operation has no other kernel"
        )


def _placement_granularities(
    root: nn.Module, place: Callable[[nn.Parameter], Any] | None, otherwise: Granularizer
) -> Callable[[str, tuple[int, ...]], Granularity]:
    """The granularity of each parameter by name, from FSDP2's ``shard_placement_fn``.

    Tensor-parallel parameters are always cut by "dim".
    """
    chosen: dict[str, Granularity] = {}
    for name, parameter in named_parameters(root, remove_duplicate=False):
        shape = tuple(parameter.shape)
        placement = None if place is None else place(parameter)
        if placement is None:
            usual = otherwise.of([name], shape)
            in_runs = not isinstance(usual, Dim)
            chosen[name] = Dim() if in_runs and is_tensor_parallel(parameter) else usual
        elif type(placement) is Shard and -len(shape) <= placement.dim < len(shape):
            chosen[name] = Dim(placement.dim % len(shape))
        else:
            raise PlanError(
                f"shard_placement_fn: {name} {shape}: expected None or Shard of one of its dims, "
                f"got {placement!r}"
            )
    return lambda name, _shape: chosen[name]


def _names_of(root: nn.Module, parameters: Collection[nn.Parameter]) -> set[str]:
    wanted = {id(parameter) for parameter in parameters}
    named = named_parameters(root, remove_duplicate=False)
    return {name for name, parameter in named if id(parameter) in wanted}


def _specs_before(root: nn.Module, converted: Collection[str]) -> dict[str, ParameterSpec]:
    """The specs of parameters that earlier calls have sharded, without casts to ``converted``.

    Where ``root`` itself was sharded before it was converted, parameters that have been frozen
    since count as trainable: the layouts, and so the shards of optimizer states, stay the same.
    """
    is_converted = HANDLE in vars(root)
    shardings = {name: sharding_of(p) for name, p in named_parameters(root)}
    specs = {name: s.extent.parameter for name, s in shardings.items() if s is not None}
    return {
        name: replace(
            spec,
            trainable=is_converted and spec.trainable,
            cast=None if spec.cast and spec.cast.compute_dtype in converted else spec.cast,
        )
        for name, spec in specs.items()
    }


def _warn_of_padding(plan: Plan, mesh: DataParallelMesh) -> None:
    report = padding_report(plan.units) if mesh.group_rank == 0 else ""
    if report:
        warn_caller(f"granularity costs padding\n{report}")


def _separate_models(handles: Mapping[str, Handle], mesh: DataParallelMesh) -> list[str]:
    """The units of ``handles`` that were sharded over other ranks and remain separate models.

    A module with a gradient divisor becomes a unit of this model instead if its ranks are a subset
    of the model's.
    """
    ranks = set(mesh.global_ranks)
    others = {
        name: handle
        for name, handle in handles.items()
        if set(handle.runtime.mesh.global_ranks) != ranks
    }
    joining = {
        handle.runtime
        for handle in others.values()
        if handle.unit.settings.gradient_divisor is not None
        and handle.mesh.mesh is not None
        and set(handle.mesh.global_ranks) < ranks
    }
    return [name for name, handle in others.items() if handle.runtime not in joining]


def _check_holders(module: nn.Module, plan: Plan, mesh: DataParallelMesh) -> None:
    """Raise a PlanError if shared parameters are moved from units with their own ranks to others.

    Their values differ between ranks that would shard one parameter.
    """
    units = (unit for unit in plan.units if not unit.has_own_ranks)
    for names in (p.names for unit in units for p in unit.parameters if len(p.names) > 1):
        before = sharding_of(parameter_of(module, names[0]))
        if before is not None and set(before.mesh.global_ranks) != set(mesh.global_ranks):
            raise PlanError(
                f"{' and '.join(names)} are one parameter, which is sharded over ranks "
                f"{sorted(before.mesh.global_ranks)} and whose modules are in different units; "
                "make the module around both a unit over these ranks, or do not share it"
            )


def _different_ranks_error(name: str, handle: Handle, mesh: DataParallelMesh) -> PlanError:
    inner, outer = sorted(handle.runtime.mesh.global_ranks), sorted(mesh.global_ranks)
    return PlanError(
        f"{name} is sharded over ranks {inner} and the module around it over {outer}, so its "
        "gradients would be averaged over its own ranks alone; pass the same mesh for both, or, "
        f"for experts, first call {name}.set_gradient_divide_factor(...) with the number of ranks "
        "whose tokens the experts get"
    )


def _handles_in(root: nn.Module, *, shards_now: bool = True) -> dict[str, Handle]:
    """The units inside ``root`` that are sharded, by name.

    ``shards_now``: they include those that get sharded only now that they have storage.
    """
    return {
        name: handle_of(m)
        for name, m in root.named_modules()
        if HANDLE in vars(m) or (shards_now and isinstance(m, FSDPModule) and not is_deferred(m))
    }


def _options_within(mesh: DataParallelMesh, name: str, handle: Handle) -> UnitOptions:
    """The options chosen for the unit ``name``; with its own ranks if they differ from ``mesh``."""
    if handle.runtime.initialized_parameters:
        raise PlanError(
            f"{name} was initialized on its own, from the names inside it, so blocks of the same "
            "class have the same values; shard a model on the meta device with one call, as in "
            "sw.fully_shard(model, units=Block)"
        )
    own, options = handle.mesh, handle.options
    if set(own.global_ranks) == set(mesh.global_ranks):
        return options
    if handle.unit.settings.gradient_divisor is None:
        raise PlanError(
            f"{name} is a unit inside one that has its own ranks and gradient divisor; also call "
            "set_gradient_divide_factor on it before fully_shard of the module around both"
        )
    strategy = options.strategy if options.world_size else handle.runtime.plan.strategy
    return options.over(strategy, own.size, own.column.size)


def _check_init(
    module: nn.Module, init: Initialization | None, ignored: Collection[nn.Parameter]
) -> None:
    """Raise PlanError if ``init`` is given for a model that already has values."""
    if not is_on_meta(module, ignored) and init is not None:
        raise PlanError(
            "init=... is for a model on the meta device, and this one has values; to replace them, "
            "call sw.initialize(model, seed) before fully_shard"
        )

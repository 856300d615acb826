"""Assigns the parameters of a module tree to units, and lays the units out in flat buffers.

A *unit* is a module whose own parameters (those of no unit inside it) are gathered before its
forward and freed after it. A parameter that several modules share belongs to the innermost unit
around all of them. It has the dtypes that the units which use it choose, if they agree.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor, nn

from shardwise.blockwise import Blocks
from shardwise.errors import PlanError
from shardwise.plan.chunks import ChunkedLayout, lay_out_chunks
from shardwise.plan.granularity import Dim, Granularities, Granularity, Granularizer, WholeBlocks
from shardwise.plan.layout import Cast, Layout, ParameterSpec, lay_out_in_buffers
from shardwise.plan.offload import CPUOffloadPolicy
from shardwise.plan.options import UnitOptions
from shardwise.plan.strategy import Level

__all__ = ["UnitPlan", "keeps_its_class", "named_parameters", "plan_units"]


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """A unit: its parameters and the flat buffers that hold them.

    Each dtype has a buffer for trainable and one for frozen parameters, so that frozen parameters
    use no memory for gradients. Where this saves much padding, parameters of one granule have a
    separate buffer.
    """

    name: str  # path of its module; "" is the root
    label: str  # shown to users: the path, or the class of the root
    parameters: tuple[ParameterSpec, ...]
    layouts: tuple[Layout, ...]
    parent: int | None  # index of the innermost unit around it; None for the root
    has_child_units: bool
    options: UnitOptions
    has_own_ranks: bool = False  # they are not those of the model

    def __post_init__(self) -> None:
        laid_out = [extent.parameter for layout in self.layouts for extent in layout.extents]
        assert sorted(p.name for p in laid_out) == sorted(p.name for p in self.parameters)

    @cached_property
    def reshard(self) -> bool:
        """Whether it is freed after forward, and gathered again for backward."""
        if self.options.subgroup_size:
            return self.options.subgroup_size > 1  # a subgroup of one rank keeps the whole unit
        if self.options.reshard_after_forward is None:
            return self.options.shards_parameters and bool(self.name)  # all but the root
        return bool(self.options.reshard_after_forward)

    @cached_property
    def subgroup(self) -> int:
        """The number of ranks among which it is gathered again; 0: all that shard it."""
        if self.two_level_gather:
            return self.options.world_size // self.options.replicas
        size = self.options.subgroup_size
        return size if 1 < size < self.options.world_size else 0

    @property
    def holds_gradients(self) -> bool:
        """Whether memory for unsharded gradients is kept between steps."""
        return self.options.strategy.inner is Level.OPTIMIZER

    @property
    def offload(self) -> CPUOffloadPolicy | None:
        """How shards are kept in host memory, if they are."""
        chosen = self.options.offload
        return chosen if isinstance(chosen, CPUOffloadPolicy) else None

    @property
    def offloads_gradients(self) -> bool:
        """Whether gradients of shards are in host memory, too."""
        return self.offload is not None and self.offload.step == "host"

    @property
    def steps_on_device(self) -> bool:
        """Whether the optimizer brings shards from host memory to the device."""
        return self.offload is not None and self.offload.step == "device"

    @cached_property
    def two_level_gather(self) -> bool:
        """Whether forward also gathers in the subgroup, after one outer gather."""
        options = self.options
        is_cut_twice = options.shards_parameters and options.strategy.is_two_level
        return is_cut_twice and options.replicas > 1

    @cached_property
    def gathered_bytes(self) -> int:
        """Size of the gathered unit; 0 if this rank keeps all of it."""
        return sum(layout.gathered_bytes for layout in self.layouts if layout.needs_gather)

    @cached_property
    def chunked_bytes(self) -> int:
        """Size of the second buffers of parameters that are cut into chunks."""
        return sum(one.gathered_bytes for one in self.layouts if isinstance(one, ChunkedLayout))

    @cached_property
    def chunked_gradient_bytes(self) -> int:
        """Size of the second buffers of the gradients of such parameters."""
        layouts = self.trainable_layouts
        return sum(one.reduced_bytes for one in layouts if isinstance(one, ChunkedLayout))

    @cached_property
    def kept_bytes(self) -> int:
        """Size of the part of a gathered unit that a rank keeps for gathers in the subgroup."""
        return self.gathered_bytes // self.subgroup if self.subgroup else 0

    @property
    def inner_ranks(self) -> int:
        """Number of ranks in a subgroup of the mesh row; 1 if there are none."""
        return 1 if self.two_level_gather else self.subgroup or 1

    @cached_property
    def shard_bytes(self) -> int:
        """Size of one rank's shards."""
        return sum(layout.shard_bytes for layout in self.layouts)

    @cached_property
    def device_copy_bytes(self) -> int:
        """Size of the device's copy of shards in host memory."""
        if self.offload is None or self.offload.parameters:
            return 0
        return sum(layout.shard_elements * layout.cast.compute_itemsize for layout in self.layouts)

    def gather_blocks(self, layout: Layout) -> Blocks | None:
        """The quantization of gathered parameters; None if they are sent unchanged."""
        wire, is_sent = self.options.wire, layout.world_size > 1 and layout.num_elements
        return wire.blocks(wire.gather, layout.cast.compute_dtype) if is_sent else None

    def reduce_blocks(self, layout: Layout) -> Blocks | None:
        """The quantization of reduced gradients; None if they are sent unchanged."""
        wire = self.options.wire
        return wire.blocks(wire.reduce, layout.cast.reduce_dtype) if layout.num_elements else None

    @cached_property
    def feedback_bytes(self) -> int:
        """Size of the rounding errors that a rank keeps (`Wire.error_feedback`)."""
        if not self.options.wire.error_feedback:
            return 0
        layouts = self.trainable_layouts
        return sum(one.reduced_bytes for one in layouts if self.reduce_blocks(one) is not None)

    @cached_property
    def trainable_layouts(self) -> tuple[Layout, ...]:
        return tuple(layout for layout in self.layouts if layout.trainable)

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter gets a gradient, be it one without elements."""
        return bool(self.trainable_layouts)

    @cached_property
    def gradient_bytes(self) -> int:
        """Size of the unreduced gradients on one rank."""
        return sum(layout.reduced_bytes for layout in self.trainable_layouts)

    @cached_property
    def gradient_shard_bytes(self) -> int:
        """Size of one rank's shards of the reduced gradients."""
        return sum(layout.gradient_shard_bytes for layout in self.trainable_layouts)


def plan_units(
    root: nn.Module,
    options: Mapping[str, UnitOptions],
    granularity: Granularities = "element",
    settled: Mapping[str, ParameterSpec] | None = None,
    ignored: Collection[str] = (),
    elsewhere: Collection[str] = (),
    *,
    in_blocks: bool = False,
) -> tuple[UnitPlan, ...]:
    """Assign every parameter of ``root`` to a unit, and lay the units out over their ranks.

    Args:
        root: the model; only names, shapes and dtypes are read, so it may be on the meta device.
        options: the options of each unit by name, in module order, with its ranks.
        granularity: where parameters may be cut.
        settled: the specs of parameters that were sharded before, by name. They keep their dtypes,
            their granularity unless it was "element", and their room for gradients.
        ignored: names of parameters that are not sharded.
        elsewhere: names of units with other ranks than the model.
        in_blocks: cut between blocks that a reproducible model sums on one rank.

    Raises:
        PlanError: ``granularity`` is invalid, names no parameter, or does not fit ``in_blocks``.
    """
    chains = _chains(root, options)
    owned: dict[str, list[ParameterSpec]] = {name: [] for name in options}
    granularizer = Granularizer(granularity)
    for owner, spec in _owned_parameters(root, options, chains):
        if any(name in ignored for name in spec.names):
            continue
        before = (settled or {}).get(spec.name, spec)
        chosen = granularizer.of(spec.names, before.shape)
        if isinstance(chosen, Dim) and not before.shape:
            chosen = "tensor"  # a scalar has no dim
        chosen = chosen if before.granularity == "element" else before.granularity
        if spec.is_extended and options[owner].wire.gather is not None:
            raise PlanError(
                f"{spec.name}: its class defines what is gathered, so Wire(gather="
                f"{options[owner].wire.gather!r}) cannot apply; leave gather out"
            )
        if spec.is_extended and not isinstance(chosen, Dim):
            chosen = Dim()  # torch cuts tensors of its class along a dim
        if in_blocks:
            chosen = _in_blocks(chosen, spec.name)
        # A float32 master does not show the original dtype, so the earlier cast applies, unless
        # half(), double() or another conversion has changed the dtype since.
        is_master = options[owner].precision.master_dtype != "keep" and spec.dtype == before.dtype
        cast = before.cast if is_master and spec.cast is None else spec.cast
        trainable = spec.trainable or before.trainable
        owned[owner].append(
            replace(spec, shape=before.shape, granularity=chosen, cast=cast, trainable=trainable)
        )
    granularizer.check_all_matched([spec.name for specs in owned.values() for spec in specs])
    root_label = type(root).__name__
    root_label += " (root)" * (root_label in options)
    index = {name: i for i, name in enumerate(options)}
    parents = {name: index[chains[name][-2]] for name in options if name}
    enclosing = set(parents.values())
    return tuple(
        UnitPlan(
            name=name,
            label=name or root_label,
            parameters=tuple(specs),
            layouts=_lay_out_by_kind(specs, options[name]),
            parent=parents.get(name),
            has_child_units=index[name] in enclosing,
            options=options[name],
            has_own_ranks=name in elsewhere,
        )
        for name, specs in owned.items()
    )


def _in_blocks(granularity: Granularity, name: str) -> Granularity:
    if isinstance(granularity, Dim):
        raise PlanError(
            f"{name}: reproducible=... with granularity='dim': expected 'element', 'row', "
            "sw.block(n) or 'tensor', because chunks of a dim end inside the blocks that norms are "
            "summed in; tensor-parallel parameters and tensor classes of other libraries are "
            "always cut along a dim"
        )
    if granularity == "tensor" or isinstance(granularity, WholeBlocks):
        return granularity
    return WholeBlocks(granularity)


def _chains(root: nn.Module, units: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Map each module's path to the units around it, outermost first, itself included."""
    unit_of_module = {root.get_submodule(name): name for name in units}
    chains: dict[str, tuple[str, ...]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        own = (unit_of_module[module],) if module in unit_of_module else ()
        chains[path] = (chains[path.rpartition(".")[0]] if path else ()) + own
    return chains


def named_parameters(
    root: nn.Module, *, ignored: Iterable[nn.Parameter] = (), remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of ``root`` by their paths in the module tree, except ``ignored`` ones.

    `nn.Module`'s own method is called, because the wrappers of activation checkpointing override
    it to hide themselves.
    """
    left_out = {id(parameter) for parameter in ignored}
    named = nn.Module.named_parameters(root, remove_duplicate=remove_duplicate)
    return ((name, parameter) for name, parameter in named if id(parameter) not in left_out)


def _owned_parameters(
    root: nn.Module, units: Mapping[str, UnitOptions], chains: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, ParameterSpec]]:
    """Yield each parameter once, in the order of ``root.parameters()``, with its unit."""
    found: dict[nn.Parameter, list[tuple[str, str, nn.Module]]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{path}.{attribute}" if path else attribute
            found.setdefault(parameter, []).append((name, path, module))
    for parameter in root.parameters():
        names, paths, modules = zip(*found[parameter], strict=True)
        shared = set(chains[paths[0]]).intersection(*(chains[path] for path in paths[1:]))
        unit = next(name for name in reversed(chains[paths[0]]) if name in shared)
        is_extended = keeps_its_class(parameter)
        users = [(units[chains[p][-1]].precision, m) for p, m in zip(paths, modules, strict=True)]
        dtypes = {policy.dtypes_of(parameter, m, widen=not is_extended) for policy, m in users}
        if len(dtypes) > 1:  # they disagree, and the unit that owns it decides
            own = units[unit].precision
            dtypes = {own.dtypes_of(parameter, modules[0], widen=not is_extended)}
        ((dtype, cast),) = dtypes
        spec = ParameterSpec(
            names=names,
            # With tensor parallelism, the shape of this rank's part.
            shape=tuple(getattr(parameter, "_local_tensor", parameter).shape),
            dtype=str(dtype).removeprefix("torch."),
            itemsize=dtype.itemsize,
            trainable=parameter.requires_grad,
            cast=cast,
            is_extended=is_extended,
        )
        yield unit, spec


def keeps_its_class(parameter: Tensor) -> bool:
    """Whether shards are tensors of ``parameter``'s own class, such as a class of torchao.

    Such a class defines FSDP2's all-gather extensions or wraps other tensors.
    """
    kind = type(getattr(parameter, "_local_tensor", parameter))
    return any(hasattr(kind, name) for name in ("fsdp_pre_all_gather", "__tensor_flatten__"))


def _lay_out_by_kind(specs: Iterable[ParameterSpec], options: UnitOptions) -> tuple[Layout, ...]:
    kinds: dict[tuple[str, Cast | None, bool, bool, bool], list[ParameterSpec]] = {}
    for spec in specs:
        in_chunks = isinstance(spec.granularity, Dim)
        kind = spec.dtype, spec.cast, spec.trainable, spec.is_extended, in_chunks
        kinds.setdefault(kind, []).append(spec)
    is_offloaded = isinstance(options.offload, CPUOffloadPolicy)
    layouts: list[Layout] = []
    for (*_, in_chunks), of_kind in kinds.items():
        lay_out = lay_out_chunks if in_chunks else lay_out_in_buffers
        layouts += lay_out(of_kind, options.world_size)
    return tuple(replace(one, is_offloaded=is_offloaded) for one in layouts)

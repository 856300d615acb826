"""Which modules are gathered together: from a module tree and a choice of modules to units.

A *unit* is a module whose own parameters (those of no unit inside it) are gathered before its
forward and freed after it. A parameter that several modules share belongs to the innermost unit
around all of them.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from shardwise.blockwise import Blocks
from shardwise.errors import PlanError
from shardwise.plan.chunks import ChunkedLayout, lay_out_chunks
from shardwise.plan.granularity import Dim, Granularities, Granularizer
from shardwise.plan.layout import Cast, Layout, ParameterSpec, lay_out_in_buffers
from shardwise.plan.offload import CPUOffloadPolicy
from shardwise.plan.precision import AS_IT_CAME, MixedPrecisionPolicy
from shardwise.plan.spelling import did_you_mean
from shardwise.plan.wire import EXACT, Wire

__all__ = [
    "UnitOptions",
    "UnitPlan",
    "UnitPolicy",
    "Units",
    "choose_units",
    "keeps_its_class",
    "named_parameters",
    "plan_units",
]

# FSDP1's protocol: called with recurse=True on the way down ("look inside this module?") and with
# recurse=False on the way up ("is it a unit, given the elements that no unit inside it holds?").
UnitPolicy = Callable[[nn.Module, bool, int], bool]
Units = type[nn.Module] | Collection[type[nn.Module] | str] | str | int | UnitPolicy | None

NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True, kw_only=True)
class UnitOptions:
    """Decisions about a unit that do not depend on its parameters."""

    reshard: bool  # freed after forward and gathered again for backward
    subgroup: int = 0  # ranks among which it is gathered again; 0: all that shard it
    two_level_gather: bool = False  # and for forward too, after one gather over the outer axis
    num_shards: int | None = None  # None: as the model
    holds_gradients: bool = False  # keeps memory for unsharded gradients between steps
    precision: MixedPrecisionPolicy = AS_IT_CAME
    offload: CPUOffloadPolicy | None = None  # shards and their gradients are on the host
    wire: Wire = EXACT


@dataclass(frozen=True, kw_only=True)
class UnitPlan(UnitOptions):
    """A unit: its parameters and the flat buffers that hold them.

    There is a buffer for each dtype and, so that frozen parameters never get room for gradients,
    for each of trainable and frozen. Where that saves much padding, parameters of one granule have
    a buffer of their own.
    """

    name: str  # path of its module; "" is the root
    label: str  # for people: the path, or the class of the root
    parameters: tuple[ParameterSpec, ...]
    layouts: tuple[Layout, ...]
    parent: int | None  # index of the innermost unit around it; None for the root
    has_child_units: bool

    def __post_init__(self) -> None:
        laid_out = [extent.parameter for layout in self.layouts for extent in layout.extents]
        assert sorted(p.name for p in laid_out) == sorted(p.name for p in self.parameters)

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
        """Size of the second buffers of their gradients."""
        layouts = self.trainable_layouts
        return sum(one.reduced_bytes for one in layouts if isinstance(one, ChunkedLayout))

    @cached_property
    def kept_bytes(self) -> int:
        """What a rank keeps of a gathered unit for gathers in the subgroup."""
        return self.gathered_bytes // self.subgroup if self.subgroup else 0

    @cached_property
    def shard_bytes(self) -> int:
        """Size of one rank's shards."""
        return sum(layout.shard_bytes for layout in self.layouts)

    @cached_property
    def device_copy_bytes(self) -> int:
        """Size of the copy that the device keeps of shards on the host."""
        if self.offload is None or self.offload.parameters:
            return 0
        return sum(layout.shard_elements * layout.cast.compute_itemsize for layout in self.layouts)

    def gathers(self, layout: Layout) -> Blocks | None:
        """How parameters are quantized on their way from the shards."""
        is_sent = layout.world_size > 1 and layout.num_elements
        return self.wire.gathers(layout.cast.compute_dtype) if is_sent else None

    def reduces(self, layout: Layout) -> Blocks | None:
        """How gradients are quantized on their way to the shards."""
        return self.wire.reduces(layout.cast.reduce_dtype) if layout.num_elements else None

    @cached_property
    def feedback_bytes(self) -> int:
        """Size of what a rank keeps of its gradients' rounding (`Wire.error_feedback`)."""
        if not self.wire.error_feedback:
            return 0
        layouts = self.trainable_layouts
        return sum(one.reduced_bytes for one in layouts if self.reduces(one) is not None)

    @cached_property
    def trainable_layouts(self) -> tuple[Layout, ...]:
        return tuple(layout for layout in self.layouts if layout.trainable)

    @cached_property
    def gradient_bytes(self) -> int:
        """Size of the unreduced gradients on one rank."""
        return sum(layout.reduced_bytes for layout in self.trainable_layouts)

    @cached_property
    def gradient_shard_bytes(self) -> int:
        """Size of one rank's shards of the reduced gradients."""
        return sum(layout.gradient_shard_bytes for layout in self.trainable_layouts)


def choose_units(root: nn.Module, units: Units) -> list[str]:
    """Names of the modules that become units, in module order; the root ("") is always first.

    Raises:
        PlanError: ``units`` is of no known kind, or matches nothing or a module without a forward.
    """
    if units is None:
        return [""]
    policy = _policy(root, units)
    chosen = _select(root, policy)
    is_pattern = isinstance(units, type) or not (isinstance(units, int) or callable(units))
    if is_pattern and not chosen and not policy(root, False, 0):
        classes = sorted({type(m).__name__ for m in root.modules() if _num_elements(m)})
        repeated = ", which repeats no block" if units == "auto" else ""
        raise PlanError(
            f"units={_shown(units)} matches no module of {type(root).__name__}{repeated}; "
            f"classes that hold parameters: {', '.join(classes)}"
        )
    names = [name for name, module in root.named_modules() if name and module in chosen]
    for name in names:
        check_is_unit(root.get_submodule(name), name)
    return ["", *names]


def check_is_unit(module: nn.Module, name: str) -> None:
    """Raise a PlanError for a container, whose forward would gather nothing: it has none."""
    if isinstance(module, NEVER_CALLED):
        raise PlanError(
            "fully_shard does not support containers that do not implement forward: "
            f"{name or 'root'} is a {type(module).__name__}; choose its children or the module "
            "that holds it"
        )


def plan_units(
    root: nn.Module,
    options: Mapping[str, UnitOptions],
    world_size: int,
    granularity: Granularities = "element",
    settled: Mapping[str, ParameterSpec] | None = None,
    ignored: Collection[str] = (),
) -> tuple[UnitPlan, ...]:
    """Assign every parameter of ``root`` to a unit and lay the units out over ``world_size`` ranks.

    Args:
        root: read for names, shapes and dtypes only; it may be on the meta device.
        options: the units by name, in module order.
        world_size: number of ranks that the parameters are sharded over.
        granularity: where parameters may be cut, for all or by name.
        settled: parameters that were sharded before, by name. They keep their dtypes, and their
            granularity unless it was "element".
        ignored: names of parameters that are not sharded.

    Raises:
        PlanError: ``granularity`` is invalid or names no parameter.
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
                f"{spec.name}: its class says what is gathered of it, and Wire(gather="
                f"{options[owner].wire.gather!r}) would, too; leave gather out"
            )
        if spec.is_extended and not isinstance(chosen, Dim):
            chosen = Dim()  # torch cuts tensors of its class along a dim
        # The shard of a master does not say in which dtype the parameter came; half() does.
        keeps = options[owner].precision.master_dtype == "keep"
        cast = spec.cast if keeps or spec.cast is not None else before.cast
        owned[owner].append(replace(spec, shape=before.shape, granularity=chosen, cast=cast))
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
            layouts=_lay_out_by_kind(specs, options[name].num_shards or world_size, options[name]),
            parent=parents.get(name),
            has_child_units=index[name] in enclosing,
            **{field.name: getattr(options[name], field.name) for field in fields(UnitOptions)},
        )
        for name, specs in owned.items()
    )


def _policy(root: nn.Module, units: Units) -> UnitPolicy:
    """Every kind of choice as one policy."""
    if units == "auto":
        blocks = _repeated_blocks(root)
        return lambda module, recurse, numel: recurse or module in blocks  # noqa: ARG005
    if isinstance(units, str):
        units = (units,)
    if isinstance(units, bool) or units is None:
        raise _unknown(units)
    if isinstance(units, int):
        if units < 1:
            raise PlanError(f"units={units}: a size in parameters is at least 1")
        return _size_policy(units)
    if isinstance(units, type) or not callable(units):
        given = tuple(units) if isinstance(units, Collection) else (units,)
        classes = tuple(one for name in given for one in _classes(root, name))
        if not classes or not all(
            isinstance(c, type) and issubclass(c, nn.Module) for c in classes
        ):
            raise PlanError(f"units={_shown(units)}: expected subclasses of torch.nn.Module")
        return lambda module, recurse, numel: recurse or isinstance(module, classes)  # noqa: ARG005
    return units


def _classes(root: nn.Module, name: object) -> set[Any]:
    """Those of ``root``'s modules that have this name; or ``name`` itself, if it is no text."""
    if not isinstance(name, str):
        return {name}
    # The class of a sharded module is generated; `_get_name` is that of the user's class.
    names = {module: str(module._get_name()) for module in root.modules()}  # type: ignore[no-untyped-call]
    found = {type(module) for module in names if name in (names[module], type(module).__name__)}
    if not found:
        raise _unknown(name, did_you_mean(name, ["auto", *dict.fromkeys(names.values())]))
    return found


def _unknown(units: object, hint: str = "") -> PlanError:
    return PlanError(
        f"units={units!r}: expected a module class of the model or its name, a set of them, "
        f"'auto', a size in parameters, or a policy{hint}"
    )


def _size_policy(minimum: int) -> UnitPolicy:
    """Modules that hold ``minimum`` elements or more outside of the units inside them."""

    def policy(module: nn.Module, recurse: bool, numel: int) -> bool:
        if recurse:  # attention reads the weights of its children without calling them
            return numel >= minimum and not isinstance(module, nn.MultiheadAttention)
        return numel >= minimum and not isinstance(module, NEVER_CALLED)

    return policy


def _select(root: nn.Module, policy: UnitPolicy) -> set[nn.Module]:
    """Run ``policy`` over the tree, children first, as FSDP1's recursive wrapping does."""
    chosen: set[nn.Module] = set()
    if policy(root, True, _num_elements(root)):  # whether it is a unit itself is not asked
        for child in root.children():
            _visit(child, policy, chosen)
    return chosen


def _visit(module: nn.Module, policy: UnitPolicy, chosen: set[nn.Module]) -> int:
    """Choose units in ``module``; returns how many elements they take."""
    total = _num_elements(module)
    if module in chosen:  # the same module under a second name
        return total
    if not policy(module, True, total):
        return 0
    taken = sum(_visit(child, policy, chosen) for child in module.children())
    if not policy(module, False, total - taken):
        return taken
    chosen.add(module)
    return total


def _repeated_blocks(module: nn.Module) -> set[nn.Module]:
    """Outermost children of a container that share their class with a sibling."""
    blocks: set[nn.Module] = set()
    is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    # By name, because each parametrized module has a generated class.
    siblings = Counter(type(child).__qualname__ for child in module.children())
    for child in module.children():
        repeated = is_container and siblings[type(child).__qualname__] > 1
        is_list = isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if repeated and not is_list and _num_elements(child):
            blocks.add(child)
        else:
            blocks |= _repeated_blocks(child)
    return blocks


def _chains(root: nn.Module, units: Collection[str]) -> dict[str, tuple[str, ...]]:
    """By path of a module: the units around it, outermost first, itself included."""
    unit_of_module = {root.get_submodule(name): name for name in units}
    chains: dict[str, tuple[str, ...]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        own = (unit_of_module[module],) if module in unit_of_module else ()
        chains[path] = (chains[path.rpartition(".")[0]] if path else ()) + own
    return chains


def named_parameters(
    root: nn.Module, *, ignored: Iterable[nn.Parameter] = (), remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of ``root`` by their places in the tree of modules, without those ``ignored``.

    Wrappers such as those of activation checkpointing override the method, and hide themselves.
    """
    left_out = {id(parameter) for parameter in ignored}
    named = nn.Module.named_parameters(root, remove_duplicate=remove_duplicate)
    return ((name, parameter) for name, parameter in named if id(parameter) not in left_out)


def _owned_parameters(
    root: nn.Module, units: Mapping[str, UnitOptions], chains: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, ParameterSpec]]:
    """Every parameter once, in the order of ``root.parameters()``, with the unit that owns it."""
    found: dict[nn.Parameter, list[tuple[str, str, nn.Module]]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{path}.{attribute}" if path else attribute
            found.setdefault(parameter, []).append((name, path, module))
    for parameter in root.parameters():
        names, paths, modules = zip(*found[parameter], strict=True)
        shared = set(chains[paths[0]]).intersection(*(chains[path] for path in paths[1:]))
        unit = next(name for name in reversed(chains[paths[0]]) if name in shared)
        precision = units[unit].precision
        is_extended = keeps_its_class(parameter)
        if is_extended:
            precision = replace(precision, master_dtype="keep")
        dtype, cast = precision.dtypes_of(parameter, modules[0])
        spec = ParameterSpec(
            names=names,
            # This rank's part of it, with tensor parallelism.
            shape=tuple(getattr(parameter, "_local_tensor", parameter).shape),
            dtype=str(dtype).removeprefix("torch."),
            itemsize=dtype.itemsize,
            trainable=parameter.requires_grad,
            cast=cast,
            is_extended=is_extended,
        )
        yield unit, spec


def keeps_its_class(parameter: Tensor) -> bool:
    """Whether a rank stores a tensor of the class of ``parameter``, as of torchao's.

    Such a class defines FSDP2's all-gather extensions, or wraps other tensors.
    """
    kind = type(getattr(parameter, "_local_tensor", parameter))
    return any(hasattr(kind, name) for name in ("fsdp_pre_all_gather", "__tensor_flatten__"))


def _lay_out_by_kind(
    specs: Iterable[ParameterSpec], world_size: int, options: UnitOptions
) -> tuple[Layout, ...]:
    kinds: dict[tuple[str, Cast | None, bool, bool, bool], list[ParameterSpec]] = {}
    for spec in specs:
        in_chunks = isinstance(spec.granularity, Dim)
        kind = spec.dtype, spec.cast, spec.trainable, spec.is_extended, in_chunks
        kinds.setdefault(kind, []).append(spec)
    layouts: list[Layout] = []
    for (*_, in_chunks), of_kind in kinds.items():
        lay_out = lay_out_chunks if in_chunks else lay_out_in_buffers
        layouts += lay_out(of_kind, world_size)
    return tuple(replace(one, is_offloaded=options.offload is not None) for one in layouts)


def _num_elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _shown(units: object) -> str:
    if isinstance(units, type):
        return units.__name__
    if isinstance(units, (set, frozenset, list, tuple)):
        return "{" + ", ".join(sorted(_shown(unit) for unit in units)) + "}"
    return repr(units)

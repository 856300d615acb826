"""Which modules are units: chosen by class, by name, by size, or by a policy as in FSDP1."""

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from torch import nn

from shardwise.errors import PlanError
from shardwise.plan.spelling import did_you_mean

__all__ = [
    "UnitPolicy",
    "Units",
    "check_is_unit",
    "choose_units",
    "is_never_called",
    "repeated_blocks",
]

# FSDP1's protocol: called with recurse=True on the way down, to decide whether to look inside the
# module, and with recurse=False on the way up, to decide whether the module is a unit, given the
# number of elements outside the units inside it.
UnitPolicy = Callable[[nn.Module, bool, int], bool]
Units = type[nn.Module] | Collection[type[nn.Module] | str] | str | int | UnitPolicy | None

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def choose_units(root: nn.Module, units: Units) -> list[str]:
    """The names of the modules that become units, in module order; the root ("") comes first.

    Raises:
        PlanError: ``units`` is of an unknown kind, or matches nothing or a module without forward.
    """
    if units is None:
        return [""]
    policy = _policy(root, units)
    chosen = _select(root, policy)
    is_pattern = isinstance(units, type) or not (isinstance(units, int) or callable(units))
    if is_pattern and not chosen and not policy(root, False, 0):
        classes = sorted({type(m).__name__ for m in root.modules() if _num_elements(m)})
        repeated = ", which has no repeated blocks" if units == "auto" else ""
        raise PlanError(
            f"units={_shown(units)} matches no module of {type(root).__name__}{repeated}; "
            "choose a class by its name (shard.units in a configuration): "
            f"{', '.join(classes)}"
        )
    names = [name for name, module in root.named_modules() if name and module in chosen]
    for name in names:
        check_is_unit(root.get_submodule(name), name)
    return ["", *names]


def repeated_blocks(root: nn.Module) -> list[str]:
    """The names of the units inside ``root`` that "auto" chooses; empty if it cannot choose any."""
    with suppress(PlanError):
        return choose_units(root, "auto")[1:]
    return []


def is_never_called(module: nn.Module) -> bool:
    """Whether ``module`` is a list or a dict; subclasses that have a forward may be units."""
    return isinstance(module, _CONTAINERS) and type(module).forward is nn.Module.forward


def check_is_unit(module: nn.Module, name: str) -> None:
    """Raise a PlanError for a container, which has no forward in which to gather parameters."""
    if is_never_called(module):
        raise PlanError(
            "fully_shard does not support containers that do not implement forward: "
            f"{name or 'root'} is a {type(module).__name__}; choose its children or the module "
            "that holds it"
        )


def _policy(root: nn.Module, units: Units) -> UnitPolicy:
    """Convert ``units``, of any kind, to a policy."""
    if units == "auto":
        blocks = _repeated_blocks(root)
        return lambda module, recurse, numel: recurse or module in blocks  # noqa: ARG005
    if isinstance(units, str):
        units = (units,)
    if isinstance(units, (bool, nn.Module)) or units is None:
        raise _unknown(units)
    if isinstance(units, int):
        if units < 1:
            raise PlanError(f"units={units}: expected a size of at least 1 parameter")
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
    """The classes of ``root``'s modules with this name; ``name`` itself if it is not a string."""
    if not isinstance(name, str):
        return {name}
    # The class of a sharded module is generated; `_get_name` is that of the user's class.
    names = {module: str(module._get_name()) for module in root.modules()}  # type: ignore[no-untyped-call]
    found = {type(module) for module in names if name in (names[module], type(module).__name__)}
    if not found:
        raise _unknown(name, did_you_mean(name, ["auto", *dict.fromkeys(names.values())]))
    return found


def _unknown(units: object, hint: str = "") -> PlanError:
    if isinstance(units, nn.Module):
        return PlanError(
            f"units: a {type(units).__name__} is a module, not a class of modules; pass the class "
            "of the modules that become units, or call fully_shard on each of them, and then on "
            "the model"
        )
    return PlanError(
        f"units={units!r}: expected a module class of the model or its name, a set of them, "
        f"'auto', a size in parameters, or a policy{hint}"
    )


def _size_policy(minimum: int) -> UnitPolicy:
    """Choose modules with at least ``minimum`` elements outside the units inside them."""

    def policy(module: nn.Module, recurse: bool, numel: int) -> bool:
        # Attention reads the weights of its children without calling them.
        if recurse:
            return numel >= minimum and not isinstance(module, nn.MultiheadAttention)
        return numel >= minimum and not is_never_called(module)

    return policy


def _select(root: nn.Module, policy: UnitPolicy) -> set[nn.Module]:
    """Run ``policy`` over the tree, children first, as FSDP1's recursive wrapping does."""
    chosen: set[nn.Module] = set()
    if policy(root, True, _num_elements(root)):  # the root is always a unit
        for child in root.children():
            _visit(child, policy, chosen)
    return chosen


def _visit(module: nn.Module, policy: UnitPolicy, chosen: set[nn.Module]) -> int:
    """Add the units in ``module`` to ``chosen``, and return the number of elements they hold."""
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


def _num_elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _shown(units: object) -> str:
    if isinstance(units, type):
        return units.__name__
    if isinstance(units, (set, frozenset, list, tuple)):
        return "{" + ", ".join(sorted(_shown(unit) for unit in units)) + "}"
    return repr(units)

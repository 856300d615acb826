"""The optimizers by name: the states that they keep, and the memory that an update moves.

The trainer, `shardwise plan`, `shardwise verify` and ``sw.fit`` read this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from shardwise.errors import PlanError
from shardwise.plan.spelling import expected_one_of

__all__ = [
    "ASSUMED",
    "OPTIMIZERS",
    "Kind",
    "OptimizerSpec",
    "State",
    "optimizer_spec",
    "plain_options",
]

# What an optimizer needs of a parameter:
# - "elements": any run of elements, so any granularity.
# - "blocks": whole blocks of elements, so granularity="row" or coarser.
# - "matrices": whole hidden matrices, on an owner. All other parameters are updated by AdamW.
# - "factored": means over rows and columns, which no optimizer here computes on shards.
Kind = Literal["elements", "blocks", "matrices", "factored"]
_SCALE_BYTES = 4  # of a block's scale, in float32


@dataclass(frozen=True, slots=True)
class State:
    """A state with one value per element of a parameter."""

    name: str
    dtype: str | None = None  # None: the dtype of the shards
    itemsize: int = 0  # bytes of a value in ``dtype``; 0 if that is None
    block: int = 0  # number of elements that share a float32 scale; 0: there are no scales

    def num_bytes(self, num_elements: int, itemsize: int, row: int = 0) -> int:
        """Return the bytes for ``num_elements`` of a parameter, on a rank.

        ``itemsize`` is that of the shards. A ``row`` of elements starts a new block; 0: there is
        one row.
        """
        values = num_elements * (self.itemsize or itemsize)
        if not self.block or not num_elements:
            return values
        row = row or num_elements
        return values + _SCALE_BYTES * -(-num_elements * -(-row // self.block) // row)


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer with its options.

    Attributes:
        name: the name in configurations and on command lines.
        path: its class, as ``"module:Class"``; "" if no class works on shards.
        kind: what it needs of a parameter.
        states: states of a parameter, with ``kind="matrices"`` of a hidden matrix.
        passes: reads and writes of the shards by an update that runs as one kernel. Matrix
            products of owners are not included.
        side_states: states of [m, m] and [n, n] elements for each [m, n] matrix.
        min_elements: smaller parameters, and vectors, keep the states in float32.
        is_fusable: whether the class takes ``fused=True``.
        temporaries: how many tensors like the shards an update with ``foreach`` allocates, such as
            roots of the second moments.
        takes_betas: whether the class takes ``betas`` as AdamW does.
        options: options of the class that the name stands for.
    """

    name: str
    path: str
    kind: Kind
    states: tuple[State, ...]
    passes: float
    side_states: int = 0
    min_elements: int = 0
    is_fusable: bool = False
    temporaries: int = 0
    takes_betas: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def granularity(self) -> Literal["element", "row"]:
        """The finest granularity that the optimizer works with."""
        return "row" if self.kind == "blocks" else "element"

    @property
    def steps_units(self) -> bool:
        """Whether it may step one unit after the other."""
        return self.kind in ("elements", "blocks")

    @property
    def loop(self) -> Literal["fused", "foreach"]:
        """How the trainer's update iterates over parameters."""
        return "fused" if self.is_fusable or not self.temporaries else "foreach"

    @property
    def has_owners(self) -> bool:
        """Whether hidden matrices are updated by owners, and other parameters by AdamW."""
        return self.kind == "matrices"


_MOMENTS = (State("exp_avg"), State("exp_avg_sq"))
_MOMENTUM = State("momentum_buffer")
_BYTES = tuple(State(one.name, "uint8", 1, block=256) for one in _MOMENTS)


def _adam(name: str, *, fused: bool = False) -> OptimizerSpec:
    classes = {"adamw": "AdamW", "adam": "Adam", "nadam": "NAdam", "radam": "RAdam"}
    return OptimizerSpec(
        name,
        f"torch.optim:{classes[name]}",
        "elements",
        _MOMENTS,
        7.0,
        is_fusable=fused,
        temporaries=1,
        takes_betas=fused,
    )


_ALL = (
    _adam("adamw", fused=True),
    _adam("adam", fused=True),
    _adam("nadam"),
    _adam("radam"),
    OptimizerSpec(
        "adagrad", "torch.optim:Adagrad", "elements", (State("sum"),), 5.0, temporaries=2
    ),
    OptimizerSpec(
        "rmsprop", "torch.optim:RMSprop", "elements", (State("square_avg"),), 5.0, temporaries=1
    ),
    OptimizerSpec("lion", "", "elements", (State("exp_avg"),), 5.0),
    OptimizerSpec("sgd", "torch.optim:SGD", "elements", (), 3.0),
    OptimizerSpec(
        "sgd_momentum",
        "torch.optim:SGD",
        "elements",
        (_MOMENTUM,),
        5.0,
        options=(("momentum", 0.9),),
    ),
    OptimizerSpec(
        "adam8bit",
        "shardwise.optim:Adam8bit",
        "blocks",
        _BYTES,
        4.0,
        min_elements=4096,
        takes_betas=True,
    ),
    OptimizerSpec("adafactor", "", "factored", (), 4.0),
    OptimizerSpec("muon", "shardwise.optim:Muon", "matrices", (_MOMENTUM,), 5.0, takes_betas=True),
    OptimizerSpec("soap", "shardwise.optim:SOAP", "matrices", _MOMENTS, 7.0, side_states=2),
)
OPTIMIZERS: Mapping[str, OptimizerSpec] = {one.name: one for one in _ALL}
ASSUMED = "adamw"  # whose states an optimizer of unknown kind is assumed to have


def optimizer_spec(
    name: str, options: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()
) -> OptimizerSpec:
    """Return an optimizer with ``options``, which may add or change states.

    A class that is named as ``"package.module:Class"`` is assumed to have AdamW's states, or those
    of AdamW but for one if it has a momentum.

    Raises:
        PlanError: no optimizer has this name.
    """
    if name not in OPTIMIZERS and ":" not in str(name):
        raise PlanError(
            f"optimizer={name!r}: {expected_one_of(OPTIMIZERS, name)}, or package.module:Class"
        )
    return _with_options(name, plain_options(options))


def plain_options(
    options: Mapping[str, Any] | tuple[tuple[str, Any], ...],
) -> tuple[tuple[str, Any], ...]:
    """Return the options that are numbers; others, such as lists, change no state."""
    kept = ((key, value) for key, value in dict(options).items() if not hasattr(value, "__len__"))
    return tuple(sorted(kept))


@cache
def _with_options(name: str, options: tuple[tuple[str, Any], ...]) -> OptimizerSpec:
    known = OPTIMIZERS.get(name)
    given = dict(options)
    if known is None:
        known = replace(OPTIMIZERS[ASSUMED], name=name, path=name, is_fusable=False)
        known = replace(known, takes_betas=False, temporaries=0)
    states, passes = known.states, known.passes
    if known.kind == "elements":
        added = [_MOMENTUM] if given.get("momentum") and _MOMENTUM not in states else []
        added += [State("max_exp_avg_sq")] if given.get("amsgrad") else []
        added += [State("grad_avg")] if given.get("centered") else []
        states, passes = (*states, *added), passes + 2 * len(added)
    if known.kind == "blocks":
        is_wide = given.get("state_bits", 8) == 32  # noqa: PLR2004 - bits
        block = given.get("block", states[0].block)
        states = _MOMENTS if is_wide else tuple(replace(one, block=block) for one in states)
    least = given.get("min_elements", known.min_elements)
    return replace(known, states=states, passes=passes, min_elements=least)

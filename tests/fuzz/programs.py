"""What is drawn: a model and what is done with it, as plain data.

A `Case` pickles, and its repr is Python that makes it again, so what the fuzzer finds is pasted
into a named test. Only legal programs are drawn: all ranks enter the same units in the same order
(`build.settle_forks` sees to it where data decides), no forward changes a parameter, and there is
no double backward.
"""

from dataclasses import dataclass, fields, replace
from typing import TypeAlias

from hypothesis import HealthCheck, Phase, settings, strategies as st

from shardwise.plan.strategy import STRATEGIES

__all__ = [
    "EVENTS",
    "OF_MATRICES",
    "OPTIMIZERS",
    "SEARCH",
    "STEPPED_ON_DEVICE",
    "Branch",
    "Case",
    "Chain",
    "Checkpoint",
    "Classes",
    "Complex",
    "Conv",
    "Detached",
    "Dropped",
    "Event",
    "Fault",
    "Gru",
    "Hidden",
    "Hooked",
    "Keyed",
    "Listed",
    "Lookup",
    "Manual",
    "Micro",
    "Mlp",
    "Model",
    "NoGrad",
    "Node",
    "Norm",
    "Odd",
    "Packed",
    "Repeat",
    "Residual",
    "Sharding",
    "Skip",
    "Slow",
    "Step",
    "Tiny",
    "cases",
]


class Described:
    """Has a repr that leaves out what is as by default."""

    def __repr__(self) -> str:
        shown = (
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)  # type: ignore[arg-type]
            if getattr(self, field.name) != field.default
        )
        return f"{type(self).__name__}({', '.join(shown)})"


# -- models: every node maps [rows, width] to [rows, width] -----------------------------------


@dataclass(frozen=True, repr=False)
class Mlp(Described):
    hidden: int
    bias: bool = True


@dataclass(frozen=True, repr=False)
class Norm(Described):
    pass


@dataclass(frozen=True, repr=False)
class Lookup(Described):
    """An embedding, indexed by what comes in."""

    rows: int


@dataclass(frozen=True, repr=False)
class Conv(Described):
    channels: int
    kernel: int


@dataclass(frozen=True, repr=False)
class Gru(Described):
    hidden: int


@dataclass(frozen=True, repr=False)
class Tiny(Described):
    """A scalar, one element, a parameter without elements, and one that nothing reads."""


@dataclass(frozen=True, repr=False)
class Odd(Described):
    """Frozen parameters of other dtypes beside a trainable one."""

    dtype: str


@dataclass(frozen=True, repr=False)
class Complex(Described):
    """A trainable complex parameter beside real ones."""


@dataclass(frozen=True, repr=False)
class Hidden(Described):
    """Leaves a result in an attribute, for the module around it to find.

    It is all that there is, or goes with an output.
    """

    has_output: bool = False


@dataclass(frozen=True, repr=False)
class Residual(Described):
    inner: "Node"


@dataclass(frozen=True, repr=False)
class Repeat(Described):
    inner: "Node"
    times: int


@dataclass(frozen=True, repr=False)
class Checkpoint(Described):
    """Activation checkpointing."""

    inner: "Node"
    reentrant: bool


@dataclass(frozen=True, repr=False)
class NoGrad(Described):
    inner: "Node"


@dataclass(frozen=True, repr=False)
class Detached(Described):
    """Adds what ``inner`` gives, cut off from backward."""

    inner: "Node"


@dataclass(frozen=True, repr=False)
class Dropped(Described):
    """Calls ``inner`` and does not use the result."""

    inner: "Node"


@dataclass(frozen=True, repr=False)
class Hooked(Described):
    """A hook of the user's on the gradient of what ``inner`` gives."""

    inner: "Node"


@dataclass(frozen=True, repr=False)
class Packed(Described):
    """``inner`` in a module that returns "tuple", "dict", "dataclass", "view", "inplace"..."""

    inner: "Node"
    form: str


@dataclass(frozen=True, repr=False)
class Skip(Described):
    """Calls ``inner`` or not, as the data wants; by turns if a unit is inside."""

    inner: "Node"


@dataclass(frozen=True, repr=False)
class Branch(Described):
    """Calls one of both, as the data wants; by turns if a unit is inside."""

    left: "Node"
    right: "Node"


@dataclass(frozen=True, repr=False)
class Chain(Described):
    layers: tuple["Node", ...]


@dataclass(frozen=True, repr=False)
class Listed(Described):
    """A ModuleList, called in ``order`` (modulo its length): some more than once, some never."""

    layers: tuple["Node", ...]
    order: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Keyed(Described):
    """A ModuleDict, called in the order of its keys."""

    layers: tuple["Node", ...]


Leaf: TypeAlias = Mlp | Norm | Lookup | Conv | Gru | Tiny | Odd | Complex | Hidden
Around: TypeAlias = (
    Residual | Repeat | Checkpoint | NoGrad | Detached | Dropped | Hooked | Packed | Skip
)
Node: TypeAlias = Leaf | Around | Branch | Chain | Listed | Keyed


@dataclass(frozen=True, repr=False)
class Model(Described):
    """A tree of modules, and what is tied, frozen and hooked in it.

    Numbers in ``ties``, ``frozen`` and ``hooked`` count the trainable parameters, modulo how many
    there are; the second of a tie counts those that would fit.
    """

    body: Node
    width: int = 3
    ties: tuple[tuple[int, int], ...] = ()
    frozen: tuple[int, ...] = ()
    hooked: tuple[int, ...] = ()
    root_gain: bool = True  # a parameter that the root itself holds
    output: str = "tensor"  # or "tuple": what the losses are made of


# -- what is sharded, and how -----------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Classes(Described):
    """Every module of these classes is a unit."""

    names: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Manual(Described):
    """Units one by one: numbers of modules, modulo how many can be called, and their reshard."""

    modules: tuple[tuple[int, bool | None], ...]


Units: TypeAlias = Classes | Manual | str | int | None


@dataclass(frozen=True, repr=False)
class Sharding(Described):
    ranks: int = 2
    strategy: str = "fsdp"
    replicas: int = 0  # counts the divisors of ``ranks``, modulo how many there are
    units: Units = None
    prefetch: int = 1
    reshard: bool | None = None
    unused: str = "none"
    granularity: str = "element"
    offload: str | None = None
    casts: bool = False  # to the dtype that is there already
    wire: str | None = None  # how things travel: in a format that rounds nothing
    communicators: str = "separate"


@dataclass(frozen=True, repr=False)
class Slow(Described):
    """Replicas synchronize seldom; the fewest that the ranks divide into."""

    every: int = 1
    fragments: int = 1  # modulo how many there can be, plus 1
    delay: int = 0  # modulo ``every``
    mixing: float = 0.0


# -- training ---------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Fault(Described):
    """An exception at the ``nth`` time that a hook is called, on one rank or (None) on all."""

    where: str
    target: int  # counts modules or parameters, modulo how many there are
    nth: int
    rank: int | None


@dataclass(frozen=True, repr=False)
class Event(Described):
    """Something that happens between micro-batches; `tests.fuzz.events` has them by ``kind``."""

    kind: str
    target: int = 0  # counts what the event chooses from, modulo how many there are
    variant: bool = False
    fault: Fault | None = None


@dataclass(frozen=True, repr=False)
class Micro(Described):
    """A micro-batch of which units hold back what other ranks get, and what happens after it."""

    loss: str = "plain"
    holds: str = "gradients"  # or "sums" over an axis of two, "both", "no_sync", "nothing"
    units: tuple[int, ...] = ()  # only these hold, modulo how many there are; without any, all
    after: tuple[Event, ...] = ()


@dataclass(frozen=True, repr=False)
class Step(Described):
    """Some losses and their backwards, and then perhaps an update."""

    losses: tuple[str, ...] = ("plain",)
    before: str = "nothing"
    clip: float | None = None
    update: bool = True
    set_to_none: bool = True
    fault: Fault | None = None
    micros: tuple[Micro, ...] = ()  # before the losses, which reduce what was held


@dataclass(frozen=True, repr=False)
class Case(Described):
    model: Model
    sharding: Sharding = Sharding()
    optimizer: str = "sgd"
    steps: tuple[Step, ...] = (Step(), Step())
    rows: int = 2  # of a batch, on each rank
    seed: int = 0
    in_backward: bool = False  # the optimizer steps there, so a step is one backward
    outer: Slow | None = None
    in_slot: bool = False  # small weights have their gradients computed there, as large ones


# -- drawing ----------------------------------------------------------------------------------

PRIMES = st.sampled_from([1, 2, 3, 5, 7, 11])
DTYPES = ("float32", "bfloat16", "int64", "bool", "complex128")
FORMS = ("tuple", "dict", "dataclass", "object", "view", "inplace", "view inplace", "input too")
LOSSES = ("plain", "plain", "two forwards", "reversed", "sum", "roots", "twice", "abandoned")
BEFORE = ("nothing", "nothing", "nothing", "evaluate", "inference", "gathered", "write", "copy")
FAULTS = (
    "before forward", "after forward", "activation", "parameter", "accumulated", "optimizer",
    "stepped",
)  # fmt: skip
EVENTS = (
    "zero_grad", "model zero_grad", "module zero_grad", "grad is None",
    "raise in forward", "raise in evaluation", "raise in backward", "raise and reduce",
    "transaction", "freeze", "thaw", "convert", "to cpu", "train",
    "save", "load", "gathered", "full tensors", "copy", "step in backward", "clip", "hook",
)  # fmt: skip
HOLDS = ("gradients", "gradients", "sums", "both", "no_sync", "nothing")
GRANULARITIES = ("element", "row", "tensor", "dim")
MAX_DEPTH = 3

LEAVES: tuple[st.SearchStrategy[Node], ...] = (
    st.builds(Mlp, PRIMES, st.booleans()),
    st.just(Tiny()),
    st.just(Norm()),
    st.builds(Lookup, PRIMES),
    st.builds(Conv, PRIMES, st.integers(1, 3)),
    st.builds(Gru, st.sampled_from([1, 3])),
    st.builds(Odd, st.sampled_from(DTYPES)),
    st.just(Complex()),
    st.builds(Hidden, st.booleans()),
)


def nodes(depth: int = MAX_DEPTH) -> st.SearchStrategy[Node]:
    leaf = st.one_of(*LEAVES[:2], *LEAVES)  # the first ones more often
    if not depth:
        return leaf
    inner = st.deferred(lambda: nodes(depth - 1))
    few = st.lists(inner, min_size=1, max_size=3).map(tuple)
    return st.one_of(
        leaf,
        st.builds(Chain, few),
        st.builds(Listed, few, st.lists(st.integers(0, 2), max_size=4).map(tuple)),
        st.builds(Keyed, few),
        st.builds(Residual, inner),
        st.builds(Packed, inner, st.sampled_from(FORMS)),
        st.builds(Checkpoint, inner, st.booleans()),
        st.builds(Repeat, inner, st.integers(2, 3)),
        st.builds(Skip, inner),
        st.builds(Branch, inner, inner),
        st.builds(Hooked, inner),
        st.builds(Dropped, inner),
        st.builds(Detached, inner),
        st.builds(NoGrad, inner),
    )


NUMBERS = st.integers(0, 30)
MODELS = st.builds(
    Model,
    # A root of several parts, for a single one has little to put out of order.
    body=st.builds(Chain, st.lists(nodes(), min_size=1, max_size=4).map(tuple)),
    width=st.sampled_from([3, 2, 5]),
    ties=st.lists(st.tuples(NUMBERS, NUMBERS), max_size=2).map(tuple),
    frozen=st.lists(NUMBERS, max_size=3).map(tuple),
    hooked=st.lists(NUMBERS, max_size=2).map(tuple),
    root_gain=st.booleans(),
    output=st.sampled_from(["tensor", "tuple"]),
)

CLASS_NAMES = (
    "Mlp", "Norm", "Lookup", "Conv", "Gru", "Tiny", "Odd", "Complex", "Hidden", "Whisper",
    "Residual", "Repeat", "Checkpointed", "NoGrad", "Detached", "Dropped", "Hooked", "Packed",
    "Pack", "Skip", "Branch", "Listed", "Keyed", "Sequential", "Linear", "LayerNorm", "Embedding",
    "Conv1d", "GRU",
)  # fmt: skip
STEPPED_ON_DEVICE = "stepped on the device"
OFFLOADS = ("all", "but parameters", STEPPED_ON_DEVICE)
WIRES = ("gathers", "reductions", "both", "both, with feedback")
RESHARD = st.sampled_from([None, True, False])


def units() -> st.SearchStrategy[Units]:
    modules = st.lists(st.tuples(NUMBERS, RESHARD), min_size=1, max_size=5).map(tuple)
    names = st.lists(st.sampled_from(CLASS_NAMES), min_size=1, max_size=10, unique=True).map(tuple)
    return st.one_of(
        st.builds(Manual, modules),
        st.just(Classes(CLASS_NAMES)),
        st.builds(Classes, names),
        st.just("auto"),
        st.integers(1, 40),
        st.none(),
    )


def shardings() -> st.SearchStrategy[Sharding]:
    return st.builds(
        Sharding,
        ranks=st.sampled_from([2, 3, 4, 1]),
        strategy=st.sampled_from(["fsdp", *STRATEGIES]),
        replicas=st.integers(0, 2),
        units=units(),
        prefetch=st.integers(0, 3),
        reshard=RESHARD,
        unused=st.sampled_from(["none", "zeros"]),
        granularity=st.sampled_from(GRANULARITIES),
        offload=st.sampled_from([None, None, *OFFLOADS]),
        casts=st.booleans(),
        wire=st.sampled_from([None, None, *WIRES]),
        communicators=st.sampled_from(["separate", "shared"]),
    )


FAULT = st.builds(
    Fault,
    where=st.sampled_from(FAULTS),
    target=NUMBERS,
    nth=st.integers(1, 3),
    rank=st.none() | st.integers(0, 3),
)
WHERE = {  # faults by the kind of an event
    "raise in forward": ("before forward", "after forward"),
    "raise in evaluation": ("before forward", "after forward"),
    "raise in backward": ("activation", "activation", "parameter", "accumulated"),
    "raise and reduce": ("activation", "activation", "parameter", "accumulated"),
}
STEP = st.builds(
    Step,
    losses=st.lists(st.sampled_from(LOSSES), min_size=1, max_size=3).map(tuple),
    before=st.sampled_from(BEFORE),
    clip=st.sampled_from([None, 0.1, 1e6]),
    update=st.booleans(),
    set_to_none=st.booleans(),
    fault=st.none() | FAULT,
)
ONE_BACKWARD = ("plain", "plain", "sum", "roots", "abandoned")
STEP_IN_BACKWARD = st.builds(
    Step,
    losses=st.tuples(st.sampled_from(ONE_BACKWARD)),
    before=st.sampled_from(BEFORE),
    fault=st.none() | FAULT,
)
STEP_OF_REPLICA = st.builds(
    Step,
    losses=st.lists(st.sampled_from(LOSSES), min_size=1, max_size=2).map(tuple),
    before=st.sampled_from(BEFORE),
    clip=st.sampled_from([None, 0.1, 1e6]),
    update=st.sampled_from([True, True, True, False]),
    set_to_none=st.booleans(),
)
SLOW = st.builds(
    Slow,
    every=st.integers(1, 3),
    fragments=st.integers(0, 2),
    delay=st.integers(0, 2),
    mixing=st.sampled_from([0.0, 0.5]),
)


def events(kinds: tuple[str, ...]) -> st.SearchStrategy[Event]:
    return st.builds(
        Event,
        kind=st.sampled_from(kinds),
        target=NUMBERS,
        variant=st.booleans(),
        fault=FAULT,
    ).map(_described)


def _described(event: Event) -> Event:
    """Without the fault where it has no meaning; one that is caught hits all ranks."""
    if event.kind == "transaction":
        return event
    if not event.kind.startswith("raise"):
        return replace(event, fault=None)
    assert event.fault is not None
    place = WHERE[event.kind][event.target % len(WHERE[event.kind])]
    return replace(event, fault=replace(event.fault, where=place, rank=None))


def accumulating(
    step: st.SearchStrategy[Step], kinds: tuple[str, ...], *, in_backward: bool
) -> st.SearchStrategy[Step]:
    """``step`` after micro-batches with events of these kinds between them."""
    micro = st.builds(
        Micro,
        loss=st.sampled_from(ONE_BACKWARD if in_backward else LOSSES),
        holds=st.sampled_from(HOLDS),
        # Where it steps in backward, units that are reduced would step without the others.
        units=st.just(())
        if in_backward
        else st.just(()) | st.lists(NUMBERS, max_size=3).map(tuple),
        after=st.lists(events(kinds), max_size=2).map(tuple),
    )
    micros = st.lists(micro, min_size=1, max_size=3).map(tuple)
    if "transaction" not in kinds:
        step = step.map(lambda drawn: replace(drawn, fault=None))
    return st.builds(lambda step, micros: replace(step, micros=micros), step, micros)


OPTIMIZERS = ("sgd", "adamw loop", "adamw foreach", "adamw fused")
OF_MATRICES = ("muon", "soap")


# A case takes long, and the smallest one that fails is what is wanted.
SEARCH = settings(
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


@st.composite
def cases(
    draw: st.DrawFn,
    optimizers: tuple[str, ...] = OPTIMIZERS,
    outers: st.SearchStrategy[Slow | None] | None = None,
    kinds: tuple[str, ...] = (),
) -> Case:
    """``kinds`` of events happen between micro-batches; without any there are no micro-batches."""
    model = draw(MODELS)
    sharding = draw(shardings())
    is_complex = "omplex" in repr(model)
    if isinstance(sharding.units, Manual) and "Gru" in repr(model):
        # Recurrent layers hold their weights weakly, so these become other objects, and sharding
        # a module alone cannot see that one outside of it shares them.
        model = replace(model, ties=())
    if kinds and "Gru" in repr(model):
        model = replace(model, ties=())  # torch converts no parameter to which others refer weakly
    outer = None if outers is None else draw(outers)
    # A step of a replica cannot be undone, and is none of a backward.
    in_backward = outer is None and draw(st.sampled_from([False, False, True]))
    step = STEP_IN_BACKWARD if in_backward else STEP if outer is None else STEP_OF_REPLICA
    if kinds:
        step = accumulating(step, kinds, in_backward=in_backward)
    if sharding.offload == STEPPED_ON_DEVICE:  # which refuses them
        optimizers = tuple(name for name in optimizers if name not in OF_MATRICES) or ("sgd",)
    return Case(
        model=model,
        sharding=sharding,
        # torch's Adam looks at complex numbers as pairs, which a shard does not offer.
        optimizer="sgd" if is_complex else draw(st.sampled_from(optimizers)),
        steps=draw(st.lists(step, min_size=2, max_size=4 if outer is None else 8).map(tuple)),
        rows=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 99)),
        in_backward=in_backward,
        outer=outer,
        in_slot=draw(st.booleans()),
    )

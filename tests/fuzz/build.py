"""From what was drawn to modules that compute in float64."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.features.fsdp_module import FSDPModule
from tests.fuzz import programs as p

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Fork", "Net", "build", "halve_gradients", "settle_forks", "trainable"]

EXACT = torch.float64


def build(model: p.Model, seed: int) -> "Net":
    """The modules of ``model``, with the same values for the same seed."""
    torch.manual_seed(seed)
    net = Net(model)
    _tie(net, model.ties)
    own = [q for q in trainable(net) if all(q is not kept for kept in net.head.parameters())]
    for number in model.frozen if own else ():
        own[number % len(own)].requires_grad_(False)
    return net


def trainable(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def halve_gradients(net: nn.Module, hooked: Sequence[int]) -> None:
    """By hooks of the user's on these parameters."""
    own = trainable(net)
    for number in hooked:
        own[number % len(own)].register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: gradient * 0.5
        )


def settle_forks(sharded: nn.Module, reference: nn.Module, *, all_forks: bool = False) -> None:
    """Let forks go by turns where ranks that take different ways would enter different units.

    Also where a non-reentrant checkpoint encloses several units: it stops to recompute when it
    has what it needs, so ranks whose data differs enter different ones of them.
    """
    for name, module in sharded.named_modules():
        several = isinstance(module, Checkpointed) and _units_in(module) > 1
        is_early = several and not module.reentrant
        for path, fork in module.named_modules() if is_early else [("", module)]:
            if not isinstance(fork, Fork):
                continue
            if all_forks or is_early or _units_in(fork, strictly=True):
                twin = reference.get_submodule(".".join(filter(None, (name, path))))
                assert isinstance(twin, Fork)
                fork.by_data = twin.by_data = False


def _units_in(module: nn.Module, *, strictly: bool = False) -> int:
    units = [m for m in module.modules() if isinstance(m, FSDPModule)]
    return len([m for m in units if not strictly or m is not module])


def _tie(net: "Net", ties: tuple[tuple[int, int], ...]) -> None:
    """Put one parameter in the place of another of its shape and dtype."""
    for first, second in ties:
        places = [
            (module, attribute, parameter)
            for module in net.modules()
            for attribute, parameter in module.named_parameters(recurse=False)
        ]
        module, attribute, parameter = places[first % len(places)]
        fitting = [
            other
            for _, _, other in places
            if (other.shape, other.dtype, other.requires_grad)
            == (parameter.shape, parameter.dtype, parameter.requires_grad)
        ]
        setattr(module, attribute, fitting[second % len(fitting)])


def make(node: p.Node, width: int) -> nn.Module:
    """The module of a node."""
    match node:
        case p.Chain(layers):
            return nn.Sequential(*(make(layer, width) for layer in layers))
        case p.Listed(layers, order):
            return Listed([make(layer, width) for layer in layers], order)
        case p.Keyed(layers):
            return Keyed([make(layer, width) for layer in layers])
        case p.Branch(left, right):
            return Branch(make(left, width), make(right, width))
        case (
            p.Residual()
            | p.Repeat()
            | p.Checkpoint()
            | p.NoGrad()
            | p.Detached()
            | p.Dropped()
            | p.Hooked()
            | p.Packed()
            | p.Skip()
        ):
            return _make_around(node, make(node.inner, width))
        case _:
            return _make_leaf(node, width)


def _make_around(node: p.Around, inner: nn.Module) -> nn.Module:
    match node:
        case p.Repeat(_, times):
            return Repeat(inner, times)
        case p.Checkpoint(_, reentrant):
            return Checkpointed(inner, reentrant=reentrant)
        case p.Packed(_, form):
            return Packed(inner, form)
        case _:
            plain: dict[type, Callable[[nn.Module], nn.Module]] = {
                p.Residual: Residual,
                p.NoGrad: NoGrad,
                p.Detached: Detached,
                p.Dropped: Dropped,
                p.Hooked: Hooked,
                p.Skip: Skip,
            }
            return plain[type(node)](inner)


def _make_leaf(node: p.Leaf, width: int) -> nn.Module:
    leaf: nn.Module
    match node:
        case p.Mlp(hidden, bias):
            leaf = Mlp(width, hidden, bias=bias)
        case p.Lookup(rows):
            leaf = Lookup(rows, width)
        case p.Conv(channels, kernel):
            leaf = Conv(channels, kernel)
        case p.Gru(hidden):
            leaf = Gru(width, hidden)
        case p.Odd(dtype):
            leaf = Odd(width, getattr(torch, dtype))
        case p.Norm():
            leaf = Norm(width)
        case p.Tiny():
            leaf = Tiny()
        case p.Complex():
            leaf = Complex(width)
        case p.Hidden(has_output):
            leaf = Hidden(width, has_output=has_output)
    return leaf


# -- the root -----------------------------------------------------------------------------------


class Net(nn.Module):
    """Ends in a head that is always trained, so that no rank is without a gradient."""

    def __init__(self, model: p.Model) -> None:
        super().__init__()
        self.body = make(model.body, model.width)
        self.head = nn.Linear(model.width, model.width, dtype=EXACT)
        self.gain = nn.Parameter(torch.ones(1, dtype=EXACT)) if model.root_gain else None
        self.output = model.output

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x)
        y = torch.tanh(self.head(hidden))
        if self.gain is not None:
            y = y * self.gain
        return y if self.output == "tensor" else (y, {"hidden": hidden})


# -- leaves -------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int, *, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias, dtype=EXACT)
        self.down = nn.Linear(hidden, width, bias=bias, dtype=EXACT)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(torch.sin(self.up(x))))


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=0.1, dtype=EXACT)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        return y


class Lookup(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width, dtype=EXACT)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x.detach()[:, 0] * 10).long() % self.table.num_embeddings
        return torch.tanh(x + self.table(rows))


class Conv(nn.Module):
    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, channels, kernel, padding=kernel // 2, dtype=EXACT)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(x[:, None]).mean(1)[:, : x.shape[1]])


class Gru(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.rnn = nn.GRU(width, hidden, batch_first=True, dtype=EXACT)
        self.out = nn.Linear(hidden, width, bias=False, dtype=EXACT)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.rnn(torch.stack([x, x.flip(1)], dim=1))
        return torch.tanh(self.out(outputs[:, -1]))


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=EXACT))
        self.bias = nn.Parameter(torch.tensor([0.1], dtype=EXACT))
        self.nothing = nn.Parameter(torch.empty(0, 3, dtype=EXACT))
        self.spare = nn.Parameter(torch.ones(5, dtype=EXACT))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.scale + self.bias) + self.nothing.sum()


class Odd(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, dtype=EXACT))
        self.odd = nn.Parameter(torch.tensor([1, 0, 1]).to(dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        odd = self.odd.to(torch.complex128).real.sum()
        return torch.tanh(x * self.weight * odd)


class Complex(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, dtype=EXACT))
        self.turned = nn.Parameter(torch.randn(width, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh((x.to(torch.complex128) * self.turned).real * self.weight)


class Hidden(nn.Module):
    def __init__(self, width: int, *, has_output: bool) -> None:
        super().__init__()
        self.whisper = Whisper(width, has_output=has_output)

    def forward(self, x: Tensor) -> Tensor:
        try:
            y = self.whisper(x)
        finally:  # a model with a tensor that needs backward cannot be copied
            kept, self.whisper.kept = self.whisper.kept, None
        assert kept is not None
        return kept if y is None else kept + y


class Whisper(nn.Module):
    def __init__(self, width: int, *, has_output: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, dtype=EXACT))
        self.has_output = has_output
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor | None:
        y = torch.tanh(x * self.weight)
        self.kept = torch.sin(y * self.weight)
        return y if self.has_output else None


# -- around one ---------------------------------------------------------------------------------


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class Residual(Around):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(x)
        return y


class Repeat(Around):
    def __init__(self, inner: nn.Module, times: int) -> None:
        super().__init__(inner)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.inner(x)
        return x


class Checkpointed(Around):
    def __init__(self, inner: nn.Module, *, reentrant: bool) -> None:
        super().__init__(inner)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return y


class NoGrad(Around):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.inner(x)
        z: Tensor = x + y
        return z


class Detached(Around):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(x).detach()
        return y


class Dropped(Around):
    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        return x


class Hooked(Around):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]
        return y


@dataclass
class Answer:
    first: Tensor
    second: None = None


class Box:
    def __init__(self, content: Tensor) -> None:
        self.content = content


class Pack(Around):
    """Returns what ``inner`` gives, in some form."""

    def __init__(self, inner: nn.Module, form: str) -> None:
        super().__init__(inner)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x) + 0.5
        forms: dict[str, Any] = {
            "tuple": (None, (y,), "text"),
            "dict": {"a": [y], "b": 1},
            "dataclass": Answer(y),
            "object": Box(y),
            "view": y[:, :],
            "inplace": y,
            "view inplace": y[:, :],
            "input too": (y, x),
        }
        return forms[self.form]


class Packed(nn.Module):
    """Unpacks it."""

    def __init__(self, inner: nn.Module, form: str) -> None:
        super().__init__()
        self.pack = Pack(inner, form)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return self._take(self.pack(x))

    def _take(self, output: Any) -> Tensor:
        take: dict[str, Callable[[Any], Tensor]] = {
            "tuple": lambda out: out[1][0],
            "dict": lambda out: out["a"][0],
            "dataclass": lambda out: out.first,
            "object": lambda out: out.content,
            "view": lambda out: out,
            "inplace": lambda out: out.mul_(0.7),
            "view inplace": lambda out: out.mul_(0.7),
            "input too": lambda out: out[0] - 0.5 * out[1],
        }
        return take[self.form](output)


# -- around several -----------------------------------------------------------------------------


class Fork(nn.Module):
    """Goes one way or the other, as the data wants or by turns."""

    by_data = True
    turn = 0

    def goes_left(self, x: Tensor) -> bool:
        return bool(x.detach().flatten()[0] > 0) if self.by_data else self.turn % 2 == 0


class Skip(Fork):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x) if self.goes_left(x) else x
        return y


class Branch(Fork):
    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left = left
        self.right = right

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.left(x) if self.goes_left(x) else self.right(x)
        return y


class Listed(nn.Module):
    def __init__(self, layers: list[nn.Module], order: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = self.layers[number % len(self.layers)](x)
        return x


class Keyed(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"key{i}": layer for i, layer in enumerate(layers)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x

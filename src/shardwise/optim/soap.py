"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner, for each matrix on one rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.errors import PlanError
from shardwise.optim.exchange import Member
from shardwise.optim.matrices import Matrices, cost_of
from shardwise.optim.owner_optimizer import Group, OwnerOptimizer, local_part
from shardwise.plan.layout import Layout, ParameterExtent, ParameterSpec
from shardwise.tensor.mesh import DataParallelMesh
from shardwise.tensor.sharded_tensor import RunSharding, ShardedTensor
from shardwise.tensor.sharding import local_of

__all__ = ["SOAP"]

_MOMENTS = ("exp_avg", "exp_avg_sq")


class SOAP(OwnerOptimizer):
    """SOAP for matrices and AdamW for all else, on parameters that are sharded in any way.

    The owner of a matrix (see `Muon`) has all of its states: two moments, and for each of its sides
    the average of G G^T and its eigenbasis. It receives the parts of the gradient that other ranks
    have, and returns the update's.

    As in the authors' implementation the first step only begins the preconditioner, and a basis is
    improved by one power iteration and a QR decomposition every ``precondition_frequency`` steps.

    Args:
        params: as of `Muon`, with ``method="soap"``.
        lr: of all groups without one of their own.
        betas: of the averages of gradients and of their squares; also AdamW's.
        shampoo_beta: of the average of G G^T; by default, ``betas[1]``.
        eps: added to the root of the squares.
        weight_decay: decoupled, as in AdamW.
        precondition_frequency: steps between two improvements of the bases.
        max_precondition_dim: a longer side has no basis.
        damping: relative to the mean eigenvalue. Directions of smaller eigenvalues keep their axes:
            where gradients have no full rank, those would be rounding errors, so that the numbers
            depended on how many ranks there are. 0 is the authors' implementation.
        adamw_eps: AdamW's eps.
        dtype: in which owners compute and gradients are sent, and of the states; by default float32
            or the parameter's float64.

    Raises:
        PlanError: an option or a parameter does not suit.

    Source: Vyas et al., SOAP, 2024 (arXiv 2409.11321); Gupta et al., Shampoo, 2018 (arXiv
    1802.09568).
    """

    method = "soap"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_frequency: int = 10,
        max_precondition_dim: int = 10_000,
        *,
        damping: float = 1e-6,
        adamw_eps: float = 1e-8,
        dtype: torch.dtype | None = None,
    ) -> None:
        if precondition_frequency < 1:
            raise PlanError(f"precondition_frequency={precondition_frequency}: expected 1 or more")
        defaults = {
            "lr": lr,
            "betas": betas,
            "shampoo_beta": shampoo_beta,
            "eps": eps,
            "weight_decay": weight_decay,
            "precondition_frequency": precondition_frequency,
            "max_precondition_dim": max_precondition_dim,
            "damping": damping,
            "adamw_eps": adamw_eps,
        }
        super().__init__(params, defaults, dtype)

    def empty_state(
        self, parameter: Tensor, key: str, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor | None:
        """A state of a matrix to load values into; None if it is one of AdamW's, or a number."""
        if key == "step" or id(parameter) not in self._groups_by_parameter():
            return None
        return self._owned(parameter, key, shape, dtype)

    def _dtype_on(self, device: torch.device, parameter: Tensor) -> torch.dtype:  # noqa: ARG002
        if self._dtype is not None:
            return self._dtype
        return torch.float64 if parameter.dtype is torch.float64 else torch.float32

    def _owner_of_state(self, parameter: Tensor) -> int | None:
        state = self.state.get(parameter, {}).get("exp_avg")
        runs = state.sharding.runs if isinstance(state, ShardedTensor) else ()
        return next((rank for rank, run in enumerate(runs) if len(run)), None)

    def _cost(self, matrices: Matrices, group: Group) -> int:
        frequency, largest = group["precondition_frequency"], group["max_precondition_dim"]
        cost = cost_of(matrices.preconditioning(frequency, largest))
        return max(cost, matrices.num_matrices)

    def _direction(self, parameter: Tensor, group: Group) -> Tensor:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            self._begin(parameter, group)
        state["step"] += 1
        return local_part(parameter.grad)

    def _begin(self, parameter: Tensor, group: Group) -> None:
        """Make the states, of which the elements are on the owner."""
        exchange, index = self._place_of(parameter)
        matrices, state = exchange.members[index].matrices, self.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32)
        shapes = dict.fromkeys(_MOMENTS, tuple(parameter.shape))
        for number, (stack, *sides) in enumerate(matrices.shapes):
            for name, size in zip(("left", "right"), sides, strict=True):
                if size <= group["max_precondition_dim"]:
                    shapes[f"{name}{number}"] = shapes[f"{name}{number}_basis"] = stack, size, size
        for key, shape in shapes.items():
            state[key] = self._owned(parameter, key, shape, exchange.dtype)

    def _owned(
        self, parameter: Tensor, key: str, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        exchange, index = self._place_of(parameter)
        name = f"{exchange.members[index].matrices.name}.{key}"
        return _owned_tensor(
            name, shape, dtype, exchange.device, exchange.owners[index], exchange.flat_mesh
        )

    def _work(self, member: Member, group: Group, whole: Tensor) -> Tensor:
        state, matrices = self.state[member.parameter], member.matrices
        steps = int(state["step"]) - 1  # that have moved the parameter, with this one
        moments = [matrices.parts(_whole_of(state[key])) for key in _MOMENTS]
        updates = []
        for number, gradient in enumerate(matrices.parts(whole)):
            sides = [
                _Side(_whole_of(state[key]), _whole_of(state[f"{key}_basis"]))
                if key in state
                else None
                for key in (f"left{number}", f"right{number}")
            ]
            average, squares = (parts[number] for parts in moments)
            update = torch.zeros_like(gradient)
            if steps:
                update = _adam(gradient, average, squares, sides, group, steps)
            _precondition(gradient, squares, sides, group, steps)
            updates.append(update)
        return matrices.join(updates)


# -- states on the owner ---------------------------------------------------------------------------


def _owned_tensor(
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    owner: int,
    mesh: DataParallelMesh | None,
) -> Tensor:
    """Zeros of ``shape`` on the rank ``owner``; on others, a tensor of that shape with no elements.

    It is a `ShardedTensor` of ``mesh``, which is `cut_over_all`, so checkpoints save and load it at
    any number of ranks. Without a mesh it is a plain tensor.
    """
    if mesh is None:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    spec = ParameterSpec((name,), tuple(shape), str(dtype)[6:], dtype.itemsize, trainable=False)
    size = max(1, prod(shape))  # of every shard, of which all but one are empty
    extent = ParameterExtent(spec, owner * size)
    layout = Layout((extent,), mesh.num_ranks, size)
    sharding = RunSharding(layout, extent, mesh, name, name)
    num_here = len(sharding.run)
    return ShardedTensor(torch.zeros(num_here, dtype=dtype, device=device), sharding)


def _whole_of(state: Tensor) -> Tensor:
    """A view of all elements of an `_owned_tensor`, on its owner."""
    return local_of(state).view(state.shape) if isinstance(state, DTensor) else state


# -- one matrix ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Side:
    """Of a stack of matrices [stack, m, n]: m is the left side, n the right one."""

    covariance: Tensor  # [stack, d, d]
    basis: Tensor  # [stack, d, d], its eigenvectors in columns


_Sides = Sequence[_Side | None]


def _adam(
    gradient: Tensor, average: Tensor, squares: Tensor, sides: _Sides, group: Group, steps: int
) -> Tensor:
    """Adam's update, divided by the learning rate, of which the division is done in the bases."""
    beta1, beta2 = group["betas"]
    average.lerp_(gradient, 1 - beta1)
    squares.lerp_(_rotated(gradient, sides).square(), 1 - beta2)
    update = _rotated(average, sides) / squares.sqrt().add_(group["eps"])
    correction = sqrt(1 - beta2**steps) / (1 - beta1**steps)
    return _rotated(update, sides, back=True).mul_(correction)


def _rotated(x: Tensor, sides: _Sides, *, back: bool = False) -> Tensor:
    left, right = sides
    if left is not None:
        x = (left.basis if back else left.basis.mT) @ x
    if right is not None:
        x = x @ (right.basis.mT if back else right.basis)
    return x


def _precondition(
    gradient: Tensor, squares: Tensor, sides: _Sides, group: Group, steps: int
) -> None:
    """Add the gradient to the covariances, and now and then improve the bases."""
    beta = group["betas"][1] if group["shampoo_beta"] is None else group["shampoo_beta"]
    products = gradient @ gradient.mT, gradient.mT @ gradient
    for dim, (side, product) in enumerate(zip(sides, products, strict=True), 1):
        if side is None:
            continue
        side.covariance.lerp_(product, 1 - beta)
        if steps == 0:
            side.basis.copy_(_eigenbasis(side.covariance, group["damping"]))
        elif steps % group["precondition_frequency"] == 0:
            order = _improve(side, group["damping"])
            index = order[:, :, None] if dim == 1 else order[:, None, :]
            squares.copy_(torch.take_along_dim(squares, index, dim))


def _eigenbasis(covariance: Tensor, damping: float) -> Tensor:
    """Eigenvectors of each [d, d] of a stack, those of the largest eigenvalues first.

    Directions below the damping are replaced by axes that are made orthogonal to the others.
    """
    values, vectors = torch.linalg.eigh(covariance)
    values, vectors = values.flip(-1), vectors.flip(-1)
    bases = []
    for found, mean, basis in zip(values, _means(covariance), vectors, strict=True):
        known = basis[:, found > damping * mean] if damping else basis
        if known.shape[1] < basis.shape[1]:
            axes = torch.eye(len(basis), dtype=basis.dtype, device=basis.device)
            known = torch.linalg.qr(torch.cat((known, axes), 1)).Q
        bases.append(known)
    return torch.stack(bases)


def _improve(side: _Side, damping: float) -> Tensor:
    """One power iteration; returns the new order of the old vectors [stack, d]."""
    product = side.covariance @ side.basis
    estimates = (side.basis * product).sum(-2)
    order = torch.argsort(estimates, dim=-1, descending=True, stable=True)
    if damping:  # which has the same eigenvectors
        product += damping * _means(side.covariance)[:, None, None] * side.basis
    product = torch.take_along_dim(product, order[:, None, :], -1)
    side.basis.copy_(torch.linalg.qr(product).Q)
    return order


def _means(covariance: Tensor) -> Tensor:
    """The mean eigenvalue of each matrix."""
    return covariance.diagonal(dim1=-2, dim2=-1).mean(-1)

"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner, each matrix on one rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import PlanError
from shardwise.optim.exchange import Member
from shardwise.optim.matrices import Matrices, cost_of
from shardwise.optim.owner_optimizer import Group, OwnerOptimizer
from shardwise.plan.layout import Layout, ParameterExtent, ParameterSpec
from shardwise.tensor.sharded_tensor import RunSharding, ShardedTensor
from shardwise.tensor.sharding import local_of

__all__ = ["SOAP"]

_MOMENTS = ("exp_avg", "exp_avg_sq")


class SOAP(OwnerOptimizer):
    """SOAP for matrices and AdamW for other parameters, on a model that is sharded in any way.

    The owner of a matrix (see `Muon`) stores all of its states: two moments, and for each side of
    the matrix the average of G G^T and its eigenbasis. It receives the parts of the gradient from
    other ranks, and sends back the parts of the update.

    As in the authors' implementation, the first step only initializes the preconditioner, and every
    ``precondition_frequency`` steps a basis is improved by a power iteration and a QR
    decomposition.

    Args:
        params: parameters or groups, as in `Muon`, with ``method="soap"``.
        lr: learning rate.
        betas: decays of the averages of gradients and of their squares; also the betas of AdamW.
        shampoo_beta: decay of the average of G G^T. By default, ``betas[1]``.
        eps: added to the square root of the second moment.
        weight_decay: decoupled weight decay, as in AdamW.
        precondition_frequency: number of steps between two improvements of the bases.
        max_precondition_dim: longer sides get no basis.
        damping: threshold relative to the mean eigenvalue. Directions with smaller eigenvalues keep
            their axes: where gradients do not have full rank, such eigenvectors are rounding
            errors, and results would depend on the number of ranks. 0 is the authors'
            implementation.
        adamw_eps: eps of AdamW.
        dtype: dtype of the states, in which owners also compute and gradients are sent. By default,
            float32, or float64 if the parameter has it.

    Raises:
        PlanError: an option is not valid, or does not fit a parameter.

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
        """Allocate a state of a matrix, to load values into; None for AdamW's states."""
        if all(parameter is not own for _, own, _ in self._matrix_parameters()):
            return None
        if key == "step":  # the host reads it
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        return self._owned(parameter, key, shape, dtype)

    def _owner_of_state(self, parameter: Tensor) -> int | None:
        state = self.state.get(parameter, {}).get("exp_avg")
        runs = state.sharding.runs if isinstance(state, ShardedTensor) else ()
        return next((rank for rank, run in enumerate(runs) if len(run)), None)

    def _state_devices(self) -> dict[int, torch.device]:
        return {
            id(member.parameter): exchange.device
            for exchange in self._plan()
            for member in exchange.members
        }

    def _cost(self, matrices: Matrices, group: Group) -> int:
        frequency, largest = group["precondition_frequency"], group["max_precondition_dim"]
        cost = cost_of(matrices.preconditioning(frequency, largest))
        return max(cost, matrices.num_matrices)

    def _contribute(self, member: Member) -> Tensor:
        parameter = member.parameter
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            self._initialize_state(member)
        state["step"] += 1
        return local_of(parameter.grad)

    def _initialize_state(self, member: Member) -> None:
        parameter = member.parameter
        shapes = dict.fromkeys(_MOMENTS, tuple(parameter.shape))
        for number, (stack, *sides) in enumerate(member.matrices.shapes):
            for name, size in zip(("left", "right"), sides, strict=True):
                if size <= member.group["max_precondition_dim"]:
                    shapes[f"{name}{number}"] = shapes[f"{name}{number}_basis"] = stack, size, size
        state = self.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        for key, shape in shapes.items():
            state[key] = self._owned(parameter, key, shape)

    def _owned(
        self, parameter: Tensor, key: str, shape: Sequence[int], dtype: torch.dtype | None = None
    ) -> Tensor:
        """Zeros of ``shape`` that are all stored by the owner of ``parameter``.

        On a mesh, it is a `ShardedTensor` of which other ranks store nothing, so checkpoints save
        and load it on any number of ranks.
        """
        exchange, index = next(
            (exchange, index)
            for exchange in self._plan()
            for index, member in enumerate(exchange.members)
            if member.parameter is parameter
        )
        mesh, dtype = exchange.flat_mesh, dtype or exchange.dtype
        if mesh is None:
            return torch.zeros(tuple(shape), dtype=dtype, device=exchange.device)
        name = f"{exchange.members[index].matrices.name}.{key}"
        spec = ParameterSpec((name,), tuple(shape), str(dtype)[6:], dtype.itemsize, trainable=False)
        size = max(1, prod(shape))  # of every shard, although only the owner's has elements
        extent = ParameterExtent(spec, exchange.owners[index] * size)
        layout = Layout((extent,), mesh.num_ranks, size)
        sharding = RunSharding(layout, extent, mesh, name, name)
        zeros = torch.zeros(len(sharding.run), dtype=dtype, device=exchange.device)
        return ShardedTensor(zeros, sharding)

    def _work(self, member: Member, whole: Tensor) -> Tensor:
        state, matrices, group = self.state[member.parameter], member.matrices, member.group
        steps = int(state["step"]) - 1  # the first step did not update the parameter
        averages, squares = (matrices.parts(_whole_of(state[key])) for key in _MOMENTS)
        updates = []
        for number, gradient in enumerate(matrices.parts(whole)):
            sides = [
                _Side(_whole_of(state[key]), _whole_of(state[f"{key}_basis"]))
                if key in state
                else None
                for key in (f"left{number}", f"right{number}")
            ]
            update = torch.zeros_like(gradient)
            if steps:
                update = _adam(gradient, averages[number], squares[number], sides, group, steps)
            _precondition(gradient, squares[number], sides, group, steps)
            updates.append(update)
        return matrices.join(updates)

    def _apply(self, member: Member, update: Tensor) -> None:
        if self.state[member.parameter]["step"] > 1:  # the first step does not decay weights either
            super()._apply(member, update)


def _whole_of(state: Tensor) -> Tensor:
    """A view of all elements of a state, on its owner."""
    return local_of(state).view(state.shape)


# -- one matrix ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Side:
    """The preconditioner of one side of matrices [stack, m, n]: m is the left one, n the right."""

    covariance: Tensor  # [stack, d, d], the average of G G^T
    basis: Tensor  # [stack, d, d], its eigenvectors in columns


_Sides = Sequence[_Side | None]


def _adam(
    gradient: Tensor,
    average: Tensor,
    squares: Tensor,
    sides: _Sides,
    group: Mapping[str, Any],
    steps: int,
) -> Tensor:
    """Adam's update for a learning rate of 1, computed in the eigenbases."""
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
    gradient: Tensor, squares: Tensor, sides: _Sides, group: Mapping[str, Any], steps: int
) -> None:
    """Add the gradient to the covariances, and improve the bases if it is time."""
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
    """The eigenvectors of each matrix of ``covariance`` [stack, d, d], largest eigenvalues first.

    Directions with eigenvalues below the damping are replaced by axes, which are orthogonalized
    against the others.
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
    """Do one power iteration; return the new order of the old vectors [stack, d]."""
    product = side.covariance @ side.basis
    estimates = (side.basis * product).sum(-2)
    order = torch.argsort(estimates, dim=-1, descending=True, stable=True)
    if damping:  # does not change the eigenvectors
        product += damping * _means(side.covariance)[:, None, None] * side.basis
    product = torch.take_along_dim(product, order[:, None, :], -1)
    side.basis.copy_(torch.linalg.qr(product).Q)
    return order


def _means(covariance: Tensor) -> Tensor:
    return covariance.diagonal(dim1=-2, dim2=-1).mean(-1)

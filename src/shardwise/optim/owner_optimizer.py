"""An optimizer that updates matrices on their owners, and all else element by element."""

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from shardwise.errors import CheckpointError, PlanError
from shardwise.optim.exchange import MatrixExchange, Member, Steps
from shardwise.optim.matrices import Matrices
from shardwise.plan.axes import NOTHING, AxisBytes
from shardwise.tensor.sharding import ExtendedSharding, local_of, sharding_of

__all__ = ["OwnerOptimizer"]

Group = dict[str, Any]
_MATRIX_OPTIONS = ("split", "transposed", "stacked")


class OwnerOptimizer(Optimizer):
    """Groups with ``method="adamw"`` are stepped by AdamW, the others matrix by matrix.

    A subclass says what an owner does (`_work`) with the whole of what ranks contribute
    (`_direction`).
    """

    method: str  # of groups of matrices

    def __init__(self, params: Any, defaults: Group, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._exchanges: list[MatrixExchange] = []
        self._planned: list[
            tuple[object, ...]
        ] = []  # the parameters that these are of, and their options
        shared = {"betas": (0.9, 0.999), "adamw_eps": 1e-8, "fused": True}
        super().__init__(params, {"method": self.method, **shared, **defaults})

    def add_param_group(self, param_group: Group) -> None:
        """As in torch.

        Raises:
            PlanError: its method is neither "adamw" nor this optimizer's, or does not suit a
                parameter.
        """
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1], len(self.param_groups) - 1)
        except PlanError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have gradients; every rank has to call it.

        Raises:
            StepError: another rank raised, is lost or has gradients of other parameters.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self._groups_by_parameter()
        with contextlib.ExitStack() as stack:
            for exchange in self._plan():
                wanted = [
                    index
                    for index, member in enumerate(exchange.members)
                    if member.parameter.grad is not None
                ]
                steps = self._steps(exchange, groups)
                stack.enter_context(exchange.step(wanted, steps))
            for group in self.param_groups:
                if group["method"] == "adamw":
                    self._step_adamw(group)
        return loss

    def owners(self) -> dict[str, int]:
        """The rank that works on each matrix, by the name of the parameter."""
        return {
            exchange.members[index].matrices.name: exchange.owners[index]
            for exchange in self._plan()
            for index in exchange.trainable
        }

    def sent_bytes(self, rank: int | None = None) -> AxisBytes:
        """What this rank, or ``rank``, sends in a step in which all matrices have gradients."""
        return sum(
            (exchange.sent_bytes(exchange.trainable, rank) for exchange in self._plan()),
            start=NOTHING,
        )

    def load_state_dict(self, state_dict: Any) -> None:
        """As in torch, but states keep their dtypes, which may differ from the parameter's.

        Raises:
            CheckpointError: the states are of another kind of optimizer, or of one process.
        """
        check_state_dict(self, state_dict)
        super().load_state_dict(state_dict)
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                loaded = self.state[parameter][name]
                if isinstance(value, Tensor) and value.dtype is not loaded.dtype:
                    self.state[parameter][name] = value.to(loaded.device)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_dtype": self._dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, or of ``load_state_dict``: states may have other owners now."""
        super().__setstate__({**state, "_exchanges": [], "_planned": []})

    # -- what a subclass says ----------------------------------------------------------------------

    @abstractmethod
    def _cost(self, matrices: Matrices, group: Group) -> int:
        """Floating-point operations of `_work`."""

    @abstractmethod
    def _direction(self, parameter: Tensor, group: Group) -> Tensor:
        """What the owner needs to know: a tensor like the shard that is here."""

    @abstractmethod
    def _work(self, member: Member, group: Group, whole: Tensor) -> Tensor:
        """The update from the whole of all directions; called once in the world."""

    def _owner_of_state(self, parameter: Tensor) -> int | None:  # noqa: ARG002
        """The rank that has the states of a matrix, if they are on one rank."""
        return None

    def _scale(self, matrices: Matrices, group: Group) -> float:  # noqa: ARG002
        """What the learning rate is multiplied by."""
        return 1.0

    # -- matrices ----------------------------------------------------------------------------------

    def _groups_by_parameter(self) -> dict[int, Group]:
        return {
            id(parameter): group
            for group in self.param_groups
            if group["method"] == self.method
            for parameter in group["params"]
        }

    def _plan(self) -> list[MatrixExchange]:
        """The exchanges, one for each mesh, dtype and device."""
        described: list[tuple[object, ...]] = [
            (key, *map(group.get, _MATRIX_OPTIONS))
            for key, group in self._groups_by_parameter().items()
        ]
        if described == self._planned:
            return self._exchanges
        together: dict[tuple[int, torch.dtype, torch.device], list[Member]] = {}
        for number, group in enumerate(self.param_groups):
            if group["method"] != self.method:
                continue
            for position, parameter in enumerate(group["params"]):
                if not parameter.is_floating_point():
                    continue
                self._check(parameter)
                matrices = self._matrices(parameter, group, number, position)
                # A frozen matrix may be trained later. The work on it does not count until then.
                cost = self._cost(matrices, group) if parameter.requires_grad else 0
                member = Member(parameter, matrices, cost, self._owner_of_state(parameter))
                device = self._device_of(member)
                mesh = 0 if member.sharding is None else id(member.sharding.mesh)
                key = mesh, self._dtype_on(device, parameter), device
                together.setdefault(key, []).append(member)
        self._exchanges = [
            MatrixExchange(members, dtype, device, type(self).__name__)
            for (_, dtype, device), members in together.items()
        ]
        self._planned = described
        return self._exchanges

    def _place_of(self, parameter: Tensor) -> tuple[MatrixExchange, int]:
        """The exchange of a matrix, and its index there."""
        for exchange in self._plan():
            if id(parameter) in exchange.index_of:
                return exchange, exchange.index_of[id(parameter)]
        raise AssertionError("a matrix is in an exchange")

    def _check_group(self, group: Group, number: int) -> None:
        if group["method"] not in (self.method, "adamw"):
            raise PlanError(
                f"param_groups[{number}]: method={group['method']!r}: expected "
                f'"{self.method}" or "adamw"'
            )
        if group["method"] == self.method:
            for position, parameter in enumerate(group["params"]):
                self._check(parameter)
                self._matrices(parameter, group, number, position)

    def _check(self, parameter: Tensor) -> None:
        """Refuse what has no matrices of real numbers that one rank may hold."""
        sharding = sharding_of(parameter)
        name = "a parameter" if sharding is None else sharding.name
        way_out = 'put it into a group with method="adamw"'
        if not parameter.is_floating_point() and not parameter.is_complex():
            return  # nobody can train it
        if parameter.is_complex():
            raise PlanError(f"{name}: {type(self).__name__} takes no complex matrices; {way_out}")
        is_foreign = sharding is None and isinstance(parameter, DTensor)
        if is_foreign or (sharding is not None and sharding.tensor_parallel is not None):
            raise PlanError(
                f"{name}: a matrix that tensor parallelism has cut is on no rank of the "
                f"data-parallel mesh as a whole; {way_out}"
            )
        if isinstance(sharding, ExtendedSharding):
            raise PlanError(f"{name}: its class keeps its elements in another form; {way_out}")

    def _matrices(self, parameter: Tensor, group: Group, number: int, position: int) -> Matrices:
        sharding = sharding_of(parameter)
        name = f"param_groups[{number}]['params'][{position}]"
        name = name if sharding is None else sharding.name
        split = group.get("split", 1)
        return Matrices(
            name,
            tuple(parameter.shape),
            split if isinstance(split, int) else tuple(split),
            group.get("transposed", False),
            group.get("stacked"),
        )

    def _device_of(self, member: Member) -> torch.device:
        """Where the owner works: on this rank's accelerator, even for a shard in host memory."""
        device = member.parameter.device
        accelerator = None if member.sharding is None else member.sharding.mesh.accelerator
        return device if accelerator is None or device.type != "cpu" else accelerator

    def _dtype_on(self, device: torch.device, parameter: Tensor) -> torch.dtype:
        if self._dtype is not None:
            return self._dtype
        if device.type != "cpu":
            return torch.bfloat16
        return torch.float64 if parameter.dtype is torch.float64 else torch.float32

    def _steps(self, exchange: MatrixExchange, groups: Mapping[int, Group]) -> Steps:
        members = exchange.members

        def group_of(index: int) -> Group:
            return groups[id(members[index].parameter)]

        def direction(index: int) -> Tensor:
            return self._direction(members[index].parameter, group_of(index))

        def work(index: int, whole: Tensor) -> Tensor:
            return self._work(members[index], group_of(index), whole)

        def apply(index: int, update: Tensor) -> None:
            member, group = members[index], group_of(index)
            local, lr = local_part(member.parameter), float(group["lr"])
            local.mul_(1 - lr * group["weight_decay"])
            scale = self._scale(member.matrices, group)
            local.add_(update.reshape(local.shape).to(local.device), alpha=-lr * scale)
            torch.autograd.graph.increment_version(member.parameter)

        return Steps(direction, work, apply)

    # -- the rest ----------------------------------------------------------------------------------

    def _step_adamw(self, group: Group) -> None:
        """torch's AdamW, of which the states have the same names."""
        parameters = [p for p in group["params"] if p.grad is not None]
        kinds = {p.is_complex() or not _has_fused(p.device) for p in parameters}
        for is_slow in sorted(kinds):
            some = [
                p for p in parameters if (p.is_complex() or not _has_fused(p.device)) is is_slow
            ]
            self._step_some(some, group, fused=not is_slow)

    def _step_some(self, parameters: Iterable[Tensor], group: Group, *, fused: bool) -> None:
        parameters = list(parameters)
        gradients = [p.grad for p in parameters if p.grad is not None]
        states = [self._adamw_state(p, fused=fused) for p in parameters]
        adamw(
            parameters,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=False,
            capturable=False,
            differentiable=False,
            fused=fused,
            grad_scale=None,
            found_inf=None,
            has_complex=any(p.is_complex() for p in parameters),
            amsgrad=False,
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["adamw_eps"],
            maximize=False,
        )

    def _adamw_state(self, parameter: Tensor, *, fused: bool) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            device = parameter.device if fused else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def check_state_dict(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Refuse a ``state_dict`` of another kind of optimizer, or with whole states of shards.

    Raises:
        CheckpointError: names the options that it lacks, or the parameter.
    """
    for number, group in enumerate(state_dict["param_groups"]):
        # torch adds "differentiable" to the defaults of an optimizer that has loaded a state dict.
        lacking = sorted(optimizer.defaults.keys() - group.keys() - {"differentiable"})
        if lacking:
            raise CheckpointError(
                f"param_groups[{number}] of the state dict has no {', '.join(lacking)}; expected "
                f"the state_dict() of {type(optimizer).__name__}, got that of another optimizer"
            )
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for key, parameter in zip(keys, parameters, strict=False):  # torch compares their numbers
        sharding = sharding_of(parameter)
        for name, value in state_dict["state"].get(key, {}).items():
            is_plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
            if sharding is not None and is_plain and value.ndim:
                raise CheckpointError(
                    f"{sharding.name}: {name} in the state dict has shape {list(value.shape)} on "
                    'each rank, expected a shard; load whole states with granularity="dim" and '
                    "set_optimizer_state_dict of torch.distributed.checkpoint.state_dict"
                )


def local_part(tensor: Tensor) -> Tensor:
    """What this rank stores of ``tensor``."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def _has_fused(device: torch.device) -> bool:
    return device.type in ("cpu", "cuda", "xpu")

"""An optimizer that updates matrices on their owners, and other parameters by AdamW."""

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
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
from shardwise.runtime.attach import parameters_of
from shardwise.tensor.sharding import ExtendedSharding, local_of, sharding_of

__all__ = ["CheckedOptimizer", "OwnerOptimizer"]

Group = dict[str, Any]
_MATRIX_OPTIONS = ("split", "transposed", "stacked")


class CheckedOptimizer(Optimizer):
    """An optimizer that supports only some groups."""

    @abstractmethod
    def _check_group(self, number: int, group: Group) -> None:
        """Raise a PlanError if the group of this number, the last one, is not supported."""

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, as in torch.

        Raises:
            PlanError: the options of the group, or one of its parameters, are not supported.
        """
        super().add_param_group(param_group)
        try:
            self._check_group(len(self.param_groups) - 1, self.param_groups[-1])
        except PlanError:
            self.param_groups.pop()
            raise


class OwnerOptimizer(CheckedOptimizer):
    """Base class of `Muon` and `SOAP`: steps groups with ``method="adamw"`` by AdamW.

    Matrices of other groups are stepped by their owners. A subclass defines what each rank sends to
    the owner (`_contribute`), and how the owner computes the update (`_work`).
    """

    method: str  # the method of groups of matrices
    accelerator_dtype: torch.dtype | None = None  # in which owners compute by default
    steps_units = False  # a step needs all of them

    def __init__(self, params: Any, defaults: Group, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._exchanges: list[MatrixExchange] = []
        # The groups, parameters and options from which the exchanges were made.
        self._planned: list[tuple[object, ...]] = []
        shared = {"betas": (0.9, 0.999), "adamw_eps": 1e-8, "fused": True}
        super().__init__(params, {"method": self.method, **shared, **defaults})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have gradients. Every rank must call this.

        Raises:
            StepError: another rank raised, is lost, or has gradients of other parameters.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        steps = Steps(self._contribute, self._work, self._apply)
        with contextlib.ExitStack() as stack:
            for exchange in self._plan():
                indices = [
                    index
                    for index, member in enumerate(exchange.members)
                    if member.parameter.grad is not None
                ]
                stack.enter_context(exchange.step(indices, steps))
            for group in self.param_groups:
                if group["method"] == "adamw":
                    self._step_adamw(group)
        return loss

    def owners(self) -> dict[str, int]:
        """The rank that works on each matrix, by parameter name."""
        return {
            exchange.members[index].matrices.name: exchange.owners[index]
            for exchange in self._plan()
            for index in exchange.trainable
        }

    def sent_bytes(self, rank: int | None = None) -> AxisBytes:
        """The bytes that ``rank`` (default: this rank) sends if all matrices have gradients."""
        return sum(
            (exchange.sent_bytes(exchange.trainable, rank) for exchange in self._plan()),
            start=NOTHING,
        )

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state dict, as in torch, but keep dtypes, and devices of owners.

        Raises:
            CheckpointError: the state dict is of another kind of optimizer, or of one process.
        """
        check_state_dict(self, state_dict)
        super().load_state_dict(state_dict)
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [(p, group) for group in self.param_groups for p in group["params"]]
        devices = self._state_devices()
        for key, (parameter, group) in zip(keys, parameters, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                loaded = self.state[parameter][name]
                if not isinstance(value, Tensor):
                    continue
                if name == "step":  # torch moves it to the parameter, since groups are "fused"
                    if group["method"] != "adamw":
                        self.state[parameter][name] = value.to("cpu", copy=True)
                else:
                    device = devices.get(id(parameter), loaded.device)
                    if (value.dtype, device) != (loaded.dtype, loaded.device):
                        self.state[parameter][name] = value.to(device)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_dtype": self._dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called for copies and by ``load_state_dict``. Drops the exchanges: owners may differ."""
        super().__setstate__({**state, "_exchanges": [], "_planned": []})

    # -- defined by subclasses ---------------------------------------------------------------------

    @abstractmethod
    def _cost(self, matrices: Matrices, group: Group) -> int:
        """Floating-point operations of `_work`."""

    @abstractmethod
    def _contribute(self, member: Member) -> Tensor:
        """This rank's part of what the owner works on, a tensor like its shard."""

    @abstractmethod
    def _work(self, member: Member, whole: Tensor) -> Tensor:
        """Compute the update from the whole of all contributions; called on the owner only."""

    def _owner_of_state(self, parameter: Tensor) -> int | None:  # noqa: ARG002
        """The rank that stores the states of a matrix, if a single rank does."""
        return None

    def _state_devices(self) -> dict[int, torch.device]:
        """The devices of states that may not be their parameter's, by the parameter's id."""
        return {}

    def _scale(self, member: Member) -> float:  # noqa: ARG002
        return 1.0

    # -- matrices ----------------------------------------------------------------------------------

    def _plan(self) -> list[MatrixExchange]:
        """The exchanges: one for each mesh, dtype and device."""
        planned: list[tuple[object, ...]] = [
            (id(group), id(parameter), *map(group.get, _MATRIX_OPTIONS))
            for group, parameter, _ in self._matrix_parameters()
        ]
        if planned == self._planned:
            return self._exchanges
        together: dict[tuple[int, torch.dtype, torch.device], list[Member]] = {}
        for group, parameter, name in self._matrix_parameters():
            if not parameter.is_floating_point():
                continue
            matrices = self._matrices(parameter, group, name)
            # A frozen matrix may be trained later. Until then, it does not count as work.
            cost = self._cost(matrices, group) if parameter.requires_grad else 0
            member = Member(parameter, matrices, group, cost, self._owner_of_state(parameter))
            device = self._device_of(member)
            mesh = 0 if member.sharding is None else id(member.sharding.mesh)
            key = mesh, self._dtype_on(device, parameter), device
            together.setdefault(key, []).append(member)
        self._exchanges = [
            MatrixExchange(members, dtype, device, type(self).__name__)
            for (_, dtype, device), members in together.items()
        ]
        self._planned = planned
        return self._exchanges

    def _matrix_parameters(self) -> Iterator[tuple[Group, Tensor, str]]:
        """Yield the parameters of groups of matrices, with their group and position."""
        for number, group in enumerate(self.param_groups):
            if group["method"] == self.method:
                for position, parameter in enumerate(group["params"]):
                    yield group, parameter, f"param_groups[{number}]['params'][{position}]"

    def _check_group(self, number: int, group: Group) -> None:
        if group["method"] not in (self.method, "adamw"):
            raise PlanError(
                f"param_groups[{number}]: method={group['method']!r}: expected "
                f'"{self.method}" or "adamw"'
            )
        for its_group, parameter, name in self._matrix_parameters():
            if its_group is group:
                self._matrices(parameter, group, name)

    def _matrices(self, parameter: Tensor, group: Group, name: str) -> Matrices:
        """The matrices of ``parameter``, which is called ``name`` if it is not sharded.

        Raise a PlanError if it does not consist of real matrices that one rank may hold.
        """
        sharding = sharding_of(parameter)
        name = name if sharding is None else sharding.name
        way_out = 'put it into a group with method="adamw"'
        if parameter.is_complex():
            raise PlanError(
                f"{name}: {type(self).__name__} supports no complex matrices; {way_out}"
            )
        if parameter.is_floating_point():  # others cannot be trained
            is_foreign = sharding is None and isinstance(parameter, DTensor)
            if is_foreign or (sharding is not None and sharding.tensor_parallel is not None):
                raise PlanError(
                    f"{name}: tensor parallelism divides this matrix, so no rank of the "
                    f"data-parallel mesh could hold all of it; {way_out}"
                )
            if isinstance(sharding, ExtendedSharding):
                raise PlanError(
                    f"{name}: its tensor class stores elements in another form; {way_out}"
                )
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
        default = torch.float64 if parameter.dtype is torch.float64 else torch.float32
        if device.type != "cpu":
            default = self.accelerator_dtype or default
        return self._dtype or default

    def _apply(self, member: Member, update: Tensor) -> None:
        """Apply this rank's part of an update to its shard, with weight decay."""
        local, lr = local_of(member.parameter), float(member.group["lr"])
        local.mul_(1 - lr * member.group["weight_decay"])
        update = update.reshape(local.shape).to(local.device)
        local.add_(update, alpha=-lr * self._scale(member))
        torch.autograd.graph.increment_version(member.parameter)

    # -- other parameters --------------------------------------------------------------------------

    def _step_adamw(self, group: Group) -> None:
        """Step ``group`` by torch's AdamW, with states of the same names."""
        by_kernel: dict[bool, list[Tensor]] = {True: [], False: []}
        for parameter in group["params"]:
            if parameter.grad is not None:
                has_kernel = parameter.device.type in ("cpu", "cuda", "xpu")
                by_kernel[has_kernel and not parameter.is_complex()].append(parameter)
        for fused, parameters in by_kernel.items():
            states = [self._adamw_state(parameter, fused=fused) for parameter in parameters]
            adamw(
                parameters,
                [parameter.grad for parameter in parameters if parameter.grad is not None],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                foreach=False,
                fused=fused,
                has_complex=any(parameter.is_complex() for parameter in parameters),
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
    """Raise a CheckpointError if states are of another kind, or whole where shards are needed."""
    for number, group in enumerate(state_dict["param_groups"]):
        # torch adds "differentiable" to the defaults of an optimizer that has loaded a state dict.
        lacking = sorted(optimizer.defaults.keys() - group.keys() - {"differentiable"})
        if lacking:
            raise CheckpointError(
                f"param_groups[{number}] of the state dict has no {', '.join(lacking)}; expected "
                f"the state_dict() of {type(optimizer).__name__}, got that of another optimizer"
            )
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    for key, parameter in zip(
        keys, parameters_of(optimizer), strict=False
    ):  # torch compares their numbers
        sharding = sharding_of(parameter)
        for name, value in state_dict["state"].get(key, {}).items():
            is_plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
            if sharding is not None and is_plain and value.ndim:
                raise CheckpointError(
                    f"{sharding.name}: {name} in the state dict has shape {list(value.shape)} on "
                    'each rank, expected a shard; load whole states with granularity="dim" and '
                    "set_optimizer_state_dict of torch.distributed.checkpoint.state_dict"
                )

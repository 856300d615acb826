"""Tensor parallelism: ranks that compute the layers of a model together, as its plan divides them.

Models of transformers bring a plan (``model.tp_plan``): the style of each divided module by its
name, in which ``*`` stands for the number of a layer. Here these styles become those of torch.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from shardwise._private import mesh_without_groups
from shardwise.errors import ConfigError, PlanError
from shardwise.launch.world import World
from shardwise.plan.spelling import divisors
from shardwise.plan.strategy import resolve_strategy
from shardwise.tensor.sharding import local_of, sharding_of
from shardwise.train.config import Config
from shardwise.train.optimizer import spec_of

__all__ = ["TensorRanks", "check_settings", "check_tensor_parallel", "part_of_rank"]

_AXIS = "tensor"
_KEYS = ("k_proj", "qkv_proj", "query_key_value")  # projections whose outputs are divided by heads
# Of norms of gradients; kernels of a GPU may sum in another order.
_TOLERANCE, _ROUNDING = 0.01, 1e-6


class TensorRanks:
    """The place of this rank among those of its run.

    The ranks of a group of ``shard.tensor`` neighbors train on the same sequences, and have the
    same parameters except for their parts of divided layers::

        rank         0  1  2  3
        data rank    0  0  1  1      order of data, shards, mean of the loss
        index        0  1  0  1      part of each divided layer
    """

    def __init__(self, config: Config, world: World) -> None:
        self.size = config.shard.tensor  # of a group
        self.data_rank, self.index = divmod(world.rank, self.size)
        self.num_data_ranks = world.size // self.size
        # The ranks with this index, over which `fully_shard` shards; None: all ranks.
        self.data_mesh: DeviceMesh | None = None
        self._mesh: DeviceMesh | None = None
        self._device, self._is_checked = world.device, False
        if self.size == 1:
            return
        sizes = {"data": self.num_data_ranks}
        if resolve_strategy(config.shard.strategy).num_axes > 1:
            replicas = config.shard.replicas
            sizes = {"replicas": replicas, "data": self.num_data_ranks // replicas}
        shape, names = (*sizes.values(), self.size), (*sizes, _AXIS)
        mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
        self._mesh, self.data_mesh = mesh[_AXIS], mesh[tuple(sizes)]

    def divide(self, model: nn.Module) -> None:
        """Divide the layers of ``model``, which is on the meta device, over a group."""
        if self._mesh is not None:
            _parallelize(model, self._mesh)

    def gather(self, rows: Tensor) -> Tensor:
        """Gather the rows of a group's ranks: [data ranks, values] to [ranks, values]."""
        if self._mesh is None:
            return rows
        return _gather(rows, self._mesh).transpose(0, 1).flatten(0, 1)

    def check_gradients(self, model: nn.Module) -> None:
        """In the first step, raise a PlanError if the plan of ``model`` lacks a module.

        The ranks of a group compute the same gradients of parameters that they do not divide. A
        parameter that is used with a part of the activations, and that the plan has left out, has
        on each rank a part of its gradient.
        """
        if self._mesh is None or self._is_checked:
            return
        self._is_checked = True
        gradients = {
            name: local_of(parameter.grad)
            for name, parameter in model.named_parameters()
            if parameter.grad is not None and not _is_divided(parameter)
        }
        sums = [one.norm(dtype=torch.float64).to(self._device) for one in gradients.values()]
        by_rank = _gather(torch.stack(sums), self._mesh)  # [size, parameters]
        floor = _ROUNDING * by_rank[0].norm()  # for gradients that are 0 but for rounding
        differs = (by_rank - by_rank[0]).abs() > _TOLERANCE * by_rank[0] + floor
        for number in differs.any(0).nonzero().flatten().tolist()[:1]:
            raise PlanError(
                f"{[*gradients][number]}: its gradient differs between the ranks that divide "
                "layers, so the model's plan for tensor parallelism is incomplete; set "
                "shard.tensor=1"
            )


def _gather(own: Tensor, mesh: DeviceMesh) -> Tensor:
    """Gather tensors of one shape from the ranks of ``mesh``: [ranks, *shape]."""
    return DTensor.from_local(own[None], mesh, [Shard(0)], run_check=False).full_tensor()


def _is_divided(parameter: Tensor) -> bool:
    sharding = sharding_of(parameter)
    return sharding is None or sharding.tensor_parallel is not None


# -- before any rank is started ------------------------------------------------------------------


def check_tensor_parallel(config: Config) -> None:
    """Raise a ConfigError if other keys conflict with ``shard.tensor``.

    Whether the model can be divided is found by `check_settings` and `part_of_rank`.
    """
    degree = config.shard.tensor
    if degree == 1:
        return
    key = f"shard.tensor={degree}"
    if not config.model.path:
        raise ConfigError(
            f"{key}: the embedded GPT has no plan for tensor parallelism; set model.path to the "
            "directory of a model of transformers that has one, or shard.tensor=1"
        )
    spec = spec_of(config.train)
    needs_rows = spec.has_owners or spec.granularity != "element"
    conflicts: tuple[tuple[str, str, bool, Any], ...] = (
        ("model", "lora_rank", config.model.lora_rank > 0, 0),
        ("shard", "strategy", config.shard.strategy == "hfsdp", "hsdp"),
        ("train", "optimizer", needs_rows, "adamw"),
        ("train", "compile", config.train.compile, False),
        ("train", "reproducible", config.train.reproducible > 0, 0),
        ("precision", "compute", config.precision.compute == "float16", "bfloat16"),
        ("replicas", "lighthouse", bool(config.replicas.lighthouse), ""),
    )
    for section, name, conflicts_with, instead in conflicts:
        if conflicts_with:
            given = json.dumps(getattr(getattr(config, section), name))
            raise ConfigError(
                f"{section}.{name}={given} with {key} is not supported; set {section}.{name}="
                f"{json.dumps(instead)} or shard.tensor=1"
            )


def check_settings(settings: Any, degree: int) -> None:
    """Raise a ConfigError if a model of transformers cannot be divided over ``degree`` ranks."""
    plan: Mapping[str, str] = getattr(settings, "base_model_tp_plan", None) or {}
    _check_styles(plan, settings.model_type, degree)
    if not any(name.endswith(_KEYS) and style == "colwise" for name, style in plan.items()):
        return
    for name in ("num_attention_heads", "num_key_value_heads"):
        number = getattr(settings, name, None) or degree  # no second one: as many as the first
        if number % degree:
            raise ConfigError(
                f"shard.tensor={degree} does not divide {name}={number} of the model; set it to "
                f"one of {divisors(number)}"
            )


def part_of_rank(model: nn.Module, config: Config) -> nn.Module:
    """Divide ``model``, on the meta device, and return it as the part of one rank."""
    if config.shard.tensor > 1:
        check_settings(model.config, config.shard.tensor)
        ranks = torch.arange(config.shard.tensor, device="cpu")
        # With a name of its own: torch's caches would return this mesh for an equal one.
        _parallelize(model, mesh_without_groups("cpu", ranks, ("planned",), 0))
    return model


# -- the plan of a model -------------------------------------------------------------------------


class _SummedGradients(ParallelStyle):
    """A whole module that computes on a part of the input, so that its gradients are summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        held: dict[str, nn.Parameter | None] = {}

        def before(module: nn.Module, _: Any) -> None:
            held.update(module._parameters)
            for name, parameter in held.items():
                if parameter is not None:
                    whole = DTensor.from_local(
                        parameter, device_mesh, [Replicate()], run_check=False
                    )
                    module._parameters[name] = whole.to_local(grad_placements=[Partial()])  # type: ignore[assignment]

        def after(module: nn.Module, *_: Any) -> None:
            module._parameters.update(held)
            held.clear()

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)
        return module


_Columns = partial(ColwiseParallel, output_layouts=Replicate())
_Rows = partial(RowwiseParallel, input_layouts=Replicate())
_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": _Columns,
    "colwise_rep": _Columns,
    "rowwise": RowwiseParallel,
    "rowwise_split_input": _Rows,
    "rowwise_rep": _Rows,
    "embedding_rowwise": _Rows,
    "embedding_colwise": _Columns,
    "replicated_with_grad_allreduce": _SummedGradients,
}


def _parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the modules of the plan of ``model`` over ``mesh``."""
    degree = mesh.size()
    styles, holders = _styles_of(model, degree), _holders_of(model)
    for names in holders.values():
        if len(names) > 1 and not styles.keys() >= {name.rpartition(".")[0] for name in names}:
            for name in names:  # a tied parameter of another module, which needs all of it
                styles.pop(name.rpartition(".")[0], None)
    for name, style in styles.items():
        module = model.get_submodule(name)
        _check_sizes(name, module, style, degree)
        buffers, module._buffers = module._buffers, {}  # they stay plain tensors
        parallelize_module(module, mesh, _STYLES[style](), src_data_rank=None)
        module._buffers = buffers
    for first, *others in holders.values():
        for name in others:
            _tie(model, first, name, degree)


def _tie(model: nn.Module, first: str, name: str, degree: int) -> None:
    """Let the parameter ``name`` be ``first`` again."""
    one, other = model.get_parameter(first), model.get_parameter(name)
    if getattr(one, "placements", None) != getattr(other, "placements", None):
        raise ConfigError(
            f"shard.tensor={degree}: {first} and {name} are one parameter, but the model's plan "
            "divides them along different dims; set shard.tensor=1"
        )
    path, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(path), attribute, one)


def _styles_of(model: Any, degree: int) -> dict[str, str]:
    """The style of each module that the plan of ``model`` names."""
    plan: Mapping[str, str] = model.tp_plan or {}
    _check_styles(plan, model.config.model_type, degree)
    patterns = {re.compile(re.escape(name).replace(r"\*", r"\d+")): plan[name] for name in plan}
    return {
        name: style
        for name, _ in model.named_modules()
        for pattern, style in patterns.items()
        if pattern.fullmatch(name)
    }


def _check_styles(plan: Mapping[str, str], kind: str, degree: int) -> None:
    if not plan:
        raise ConfigError(
            f"shard.tensor={degree}: transformers has no plan (base_model_tp_plan) for tensor "
            f"parallelism of model_type={kind!r}; set shard.tensor=1"
        )
    for name, style in plan.items():
        if style not in _STYLES:
            raise ConfigError(
                f"shard.tensor={degree}: the plan of model_type={kind!r} has the style {style!r} "
                f"for {name}, which is not supported; set shard.tensor=1"
            )


def _holders_of(model: nn.Module) -> Mapping[nn.Parameter, list[str]]:
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return names


def _check_sizes(name: str, module: nn.Module, style: str, degree: int) -> None:
    """Raise a ConfigError if ``module`` cannot be divided into ``degree`` parts of one size."""
    if style == "replicated_with_grad_allreduce":
        return
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        raise ConfigError(
            f"shard.tensor={degree}: {name} has the style {style!r}, but is a "
            f"{type(module).__name__}; set shard.tensor=1"
        )
    size = {"colwise": "out_features", "rowwise": "in_features"}.get(style)
    number = getattr(module, size) if size else 0  # others are gathered, also if parts differ
    if number % degree:
        raise ConfigError(
            f"shard.tensor={degree} does not divide {size}={number} of {name}; set it to one of "
            f"{divisors(number)}"
        )

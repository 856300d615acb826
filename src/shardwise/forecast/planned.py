"""The plan that `fully_shard` makes under a configuration, and source code that trains with it."""

from dataclasses import fields, is_dataclass, replace
from inspect import signature
from textwrap import indent
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.api import fully_shard
from shardwise.forecast.adapters import Adapters
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.states import enclosing_units
from shardwise.optim.outer import Outer
from shardwise.plan.granularity import Dim, Granularities
from shardwise.plan.layout import Layout
from shardwise.plan.offload import NO_OFFLOAD, CPUOffloadPolicy, OffloadPolicy
from shardwise.plan.options import UnitOptions
from shardwise.plan.plan import Plan, make_plan
from shardwise.plan.policies import Units, choose_units, repeated_blocks
from shardwise.plan.precision import DEFAULT_PRECISION, MixedPrecisionPolicy
from shardwise.plan.spelling import counted

__all__ = [
    "OwnExperts",
    "call_of",
    "plan_of",
    "precision_of",
    "sharding_of",
    "unit_names",
    "units_of",
]

_BLOCK = "Block"  # the class of the blocks of models that a pipeline divides


class OwnExperts(nn.Module):
    """The experts of a rank. With expert parallelism, other data-parallel ranks have others."""


def plan_of(module: nn.Module, configuration: Configuration) -> Plan:
    """Plan ``module``, one rank's part of the model in the dtypes of its shards.

    With expert parallelism, experts are units that are sharded over the ranks with the same ones.
    """
    world_size, replicas = _ranks_of(configuration)
    plan = make_plan(
        module,
        world_size=world_size,
        replicas=replicas,
        units=units_of(module, configuration),
        strategy=configuration.strategy,
        prefetch=configuration.prefetch,
        reshard_after_forward=configuration.reshard_after_forward,
        precision=precision_of(configuration),
        offload=_offload_of(configuration),
        granularity=_granularity_of(module, configuration),
        wire=configuration.wire,
        manual=dict.fromkeys(
            _experts_in(module, configuration), _options_of_experts(configuration)
        ),
        leaves=configuration.reproducible or None,
    )
    return _with_float8_gathers(plan) if configuration.float8_gather else plan


def units_of(module: nn.Module, configuration: Configuration) -> Units:
    """Return the units of a rank's part of the model; "auto" finds no block that is alone in it."""
    is_alone = configuration.pipeline > 1 and not repeated_blocks(module)
    return _BLOCK if is_alone and configuration.units == "auto" else configuration.units


def unit_names(module: nn.Module, configuration: Configuration) -> list[str]:
    """Return the names of the units of `plan_of`, in module order."""
    chosen = choose_units(module, units_of(module, configuration))
    names = {*chosen, *_experts_in(module, configuration)}
    return [name for name, _ in module.named_modules() if name in names]


def _experts_in(module: nn.Module, configuration: Configuration) -> list[str]:
    """Return the names of the experts of which other data-parallel ranks have others."""
    if configuration.expert == 1:
        return []
    return [name for name, one in module.named_modules() if isinstance(one, OwnExperts)]


def _options_of_experts(configuration: Configuration) -> UnitOptions:
    return UnitOptions(
        configuration.reshard_after_forward,
        precision_of(configuration),
        _offload_of(configuration),
        configuration.wire,
    ).over(configuration.row, *_ranks_of(configuration, *configuration.expert_axes))


def _ranks_of(configuration: Configuration, near: int = 1, far: int = 1) -> tuple[int, int]:
    """Return the world size and the replicas of a plan.

    Of the ranks on the axis of shards every ``near``-th has the parameters, and of the replicas
    every ``far``-th.
    """
    row, num_shards = configuration.row, configuration.shard_ranks // near
    replicas = configuration.replicas // far
    if not row.shards:  # the ranks of a sequence have copies, too
        num_shards, replicas = 1, num_shards * replicas
    return num_shards * (replicas if row.is_two_level else 1), replicas


def _granularity_of(module: nn.Module, configuration: Configuration) -> Granularities:
    """How parameters are cut: parts of tensor parallelism by "dim", as `fully_shard` cuts them."""
    divided = {name for name, one in module.named_parameters() if isinstance(one, DTensor)}
    usual = configuration.states.granularity
    return (lambda name, _: Dim() if name in divided else usual) if divided else usual


def _with_float8_gathers(plan: Plan) -> Plan:
    """Return ``plan`` with 8-bit gathers of blocks, as by all-gather extensions of torchao.

    Vectors, such as the weights of norms, count as if they were gathered in 8 bits, too.
    """
    enclosing = enclosing_units(plan)
    units = tuple(
        unit if index in enclosing else replace(unit, layouts=tuple(map(_in_float8, unit.layouts)))
        for index, unit in enumerate(plan.units)
    )
    return replace(plan, units=units)


def _in_float8(layout: Layout) -> Layout:
    if layout.dtype not in ("float32", "bfloat16", "float16"):
        return layout
    cast = replace(layout.cast, compute_dtype="float8_e4m3fn", compute_itemsize=1)
    extents = (
        replace(extent, parameter=replace(extent.parameter, cast=cast)) for extent in layout.extents
    )
    return replace(layout, extents=tuple(extents))


def sharding_of(configuration: Configuration) -> dict[str, Any]:
    """Return the arguments of `fully_shard` that make the plan of `plan_of`, without a mesh."""
    two_axes = configuration.row.num_axes > 1
    return {
        "units": configuration.units,
        "strategy": configuration.strategy,
        "sharding_factor": configuration.shard_ranks if two_axes else None,
        "reshard_after_forward": configuration.reshard_after_forward,
        "reproducible": configuration.reproducible or None,
        "prefetch": configuration.prefetch,
        "granularity": configuration.states.granularity,
        "wire": configuration.wire,
        "mp_policy": precision_of(configuration),
        "offload_policy": _offload_of(configuration),
    }


def precision_of(configuration: Configuration) -> MixedPrecisionPolicy:
    master, reduce = configuration.master_dtype, configuration.reduce_dtype
    compute = configuration.parameter_dtype
    if master == compute == reduce == torch.float32:
        return DEFAULT_PRECISION
    has_norms = configuration.full_norms and compute != master
    return MixedPrecisionPolicy(
        param_dtype=compute,
        reduce_dtype=reduce,
        full_precision=(nn.LayerNorm,) if has_norms else (),
        master_dtype=None if master == torch.float32 else "keep",
    )


def _offload_of(configuration: Configuration) -> OffloadPolicy:
    if configuration.offload == "none":
        return NO_OFFLOAD
    return CPUOffloadPolicy(
        parameters=configuration.offload == "parameters", step=configuration.offload_step
    )


def call_of(configuration: Configuration) -> str:
    """Return Python code for a training script, which defines ``model`` before it.

    It has all that the forecast assumes: activation checkpointing, torch.compile, the call of
    `fully_shard`, and a function that takes a step with the micro-batches of a rank.
    """
    imports, mesh, dims = _mesh_of(configuration)
    before = ""
    if configuration.adapters is not None:
        imports += "from peft import LoraConfig, get_peft_model\n"
        before += _adapters_of(configuration, configuration.adapters)
    if configuration.float8 != "none":
        before += f"# Convert linear layers of blocks to {configuration.float8} float8 (torchao).\n"
    if configuration.checkpointing != "none":
        imports += "from shardwise.forecast.trace.recomputing import checkpoint_blocks\n"
        before += f"checkpoint_blocks(model, {_quoted(configuration.checkpointing)})\n"
    if configuration.compiled:
        imports += "from shardwise.plan.policies import choose_units\n"
        before += 'for name in choose_units(model, "auto")[1:]:\n'
        before += "    model.get_submodule(name).compile()\n"
    if configuration.expert > 1:
        sharing = configuration.data_parallel * configuration.context
        before += (
            "# First shard the experts of each block over the ranks that have the same ones,\n"
        )
        before += f"# with set_gradient_divide_factor({sharing}): see docs/parallelism.md.\n"
    arguments = _arguments(configuration, dims)
    lines = "".join(f"    {name}={value},\n" for name, value in arguments.items())
    call = f"sw.fully_shard(\n    model,\n{lines})\n"
    imports = f"import torch\n\nimport shardwise as sw\n{imports}"
    after = ""
    if configuration.outer is not None:
        after = _outer_of(configuration.outer, configuration.outer_replicas)
    return f"{imports}\n{mesh}{before}{call}{after}{_step_of(configuration)}"


def _adapters_of(configuration: Configuration, adapters: Adapters) -> str:
    """Return code that freezes the base, and adds adapters to it."""
    targets = adapters.targets
    options = {
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": adapters.dropout,
        "use_dora": adapters.dora,
        "target_modules": targets if isinstance(targets, str) else list(targets),
    }
    lines = "".join(f"    {name}={_quoted(value)},\n" for name, value in options.items() if value)
    note = "# Load the base with 4-bit weights: NF4, with double quantization.\n"
    cast = "" if adapters.quantized else f"model.to({configuration.compute_dtype})\n"
    note = note if adapters.quantized else ""
    return f"{note}{cast}lora = LoraConfig(\n{lines})\nmodel = get_peft_model(model, lora)\n"


_OPTIONS = signature(fully_shard).parameters


def _arguments(configuration: Configuration, dims: str) -> dict[str, str]:
    """Return the arguments of `fully_shard` as code; ``dims`` is the submesh to shard over."""
    given = sharding_of(configuration) | ({"sharding_factor": None} if dims else {})
    found = {"mesh": dims} if dims else {}
    for name, value in given.items():
        if value != _OPTIONS[name].default:
            found[name] = _code(value)
    return found


def _code(value: Any) -> str:
    """Return the code of an option, without the fields of a dataclass that have their defaults."""
    if isinstance(value, type):
        return f"torch.nn.{value.__name__}"
    if isinstance(value, tuple):
        return f"({''.join(f'{_code(one)}, ' for one in value).rstrip()})"
    if not is_dataclass(value):
        return _quoted(value)
    given = (
        f"{field.name}={_code(getattr(value, field.name))}"
        for field in fields(value)
        if getattr(value, field.name) != field.default
    )
    return f"sw.{type(value).__name__}({', '.join(given)})"


def _outer_of(outer: Outer, num_replicas: int) -> str:
    return (
        f"row = {_code(outer)}\n"
        f"# After the optimizer is built, with the torchft.Manager of this one of {num_replicas}:\n"
        "# outer = sw.outer_optimizer(model, optimizer, row, manager=manager)\n"
    )


def _step_of(configuration: Configuration) -> str:
    """Return a function that takes a step; a comment where a pipeline's schedule does."""
    count = configuration.accumulation
    batches = f"{counted(count, 'micro-batch')} of {counted(configuration.micro_batch, 'sequence')}"
    if configuration.pipeline > 1:
        return f"# The schedule of the pipeline takes {batches} per step.\n"
    forward = "loss = model(*micro_batch)  # its mean over the micro-batch\n"
    if configuration.autocast:
        dtype = configuration.compute_dtype
        forward = f'with torch.autocast("cuda", {dtype}):\n{indent(forward, "    ")}'
    if configuration.activation_offload:
        forward = f"with sw.offload_activations(model):\n{indent(forward, '    ')}"
    if configuration.reproducible:  # means over leaves are the engine's
        body = "for micro_batch in micro_batches:  # those of sw.leaves(model)\n"
        body += indent(f"{forward}loss.backward()\n", "    ")
    elif count == 1:
        body = f"(micro_batch,) = micro_batches\n{forward}loss.backward()\n"
    elif configuration.accumulate == "whole":
        forward = f"model.set_requires_gradient_sync(number == {count})\n{forward}"
        body = "for number, micro_batch in enumerate(micro_batches, start=1):\n"
        body += indent(f"{forward}(loss / {count}).backward()\n", "    ")
    else:
        body = "for micro_batch in micro_batches:\n"
        body += indent(f"{forward}(loss / {count}).backward()\n", "    ")
    body = f"{body}optimizer.step()\noptimizer.zero_grad()\n"
    return (
        "\n\ndef train_step(optimizer, micro_batches):\n"
        f'    """Train a rank on {batches}, with the states of {configuration.optimizer}."""\n'
        f"{indent(body, '    ')}"
    )


def _quoted(modes: object) -> str:
    return f"{modes!r}".replace("'", '"')


def _mesh_of(configuration: Configuration) -> tuple[str, str, str]:
    """Return an import, code that makes the mesh of all dims, and the submesh to shard over."""
    if configuration.model_parallel == 1:
        return "", "", ""
    has_replicas = configuration.row.num_axes > 1
    data = {"replica": configuration.replicas, "shard": configuration.shard_size}
    sizes = {
        "pp": configuration.pipeline,
        **(data if has_replicas else {"dp": configuration.data_parallel}),
        "cp": configuration.context,
        "tp": configuration.tensor,
    }
    used = {name: size for name, size in sizes.items() if size > 1 or name in ("dp", *data)}
    shape, names = tuple(used.values()), tuple(used)
    imports = "from torch.distributed.device_mesh import init_device_mesh\n"
    lines = f'mesh = init_device_mesh("cuda", {shape}, mesh_dim_names={names})\n'
    inner = "shard" if has_replicas else "dp"
    if configuration.context > 1:
        lines += f'mesh["{inner}", "cp"]._flatten("{inner}_cp")\n'
        inner = f"{inner}_cp"
    over = f'mesh["replica", "{inner}"]' if has_replicas else f'mesh["{inner}"]'
    return imports, lines.replace("'", '"'), over

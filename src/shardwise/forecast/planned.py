"""The plan that `fully_shard` makes under a configuration, and the source code of that call."""

import torch
from torch import nn

from shardwise.forecast.configuration import Configuration
from shardwise.plan.offload import NO_OFFLOAD, CPUOffloadPolicy, OffloadPolicy
from shardwise.plan.plan import Plan, make_plan
from shardwise.plan.precision import DEFAULT_PRECISION, MixedPrecisionPolicy

__all__ = ["call_of", "offload_of", "plan_of", "precision_of"]


def plan_of(module: nn.Module, configuration: Configuration) -> Plan:
    """Plan ``module``, one rank's part of the model in ``configuration.master_dtype``."""
    row = configuration.row
    num_shards = configuration.shard_ranks if row.shards else 1
    return make_plan(
        module,
        world_size=num_shards * (configuration.replicas if row.is_two_level else 1),
        replicas=configuration.replicas,
        units="auto",
        strategy=configuration.strategy,
        prefetch=configuration.prefetch,
        reshard_after_forward=configuration.reshard_after_forward,
        precision=precision_of(configuration),
        offload=offload_of(configuration),
    )


def precision_of(configuration: Configuration) -> MixedPrecisionPolicy:
    master, reduce = configuration.master_dtype, configuration.reduce_dtype
    compute = configuration.parameter_dtype
    if master == compute == reduce == torch.float32:
        return DEFAULT_PRECISION
    return MixedPrecisionPolicy(
        param_dtype=compute,
        reduce_dtype=reduce,
        master_dtype=None if master == torch.float32 else "keep",
    )


def offload_of(configuration: Configuration) -> OffloadPolicy:
    if configuration.offload == "none":
        return NO_OFFLOAD
    return CPUOffloadPolicy(parameters=configuration.offload == "parameters")


def call_of(configuration: Configuration) -> str:
    """Return the call of `fully_shard` as Python code for a training script."""
    mesh, dims = _mesh_of(configuration)
    arguments = {"mesh": dims} if mesh else {}
    arguments |= {"units": '"auto"', "strategy": f'"{configuration.strategy}"'}
    if configuration.row.num_axes > 1 and not mesh:
        arguments["sharding_factor"] = str(configuration.shard_size)
    if configuration.reshard_after_forward is not None:
        arguments["reshard_after_forward"] = str(configuration.reshard_after_forward)
    if configuration.prefetch != 1:
        arguments["prefetch"] = str(configuration.prefetch)
    policy = precision_of(configuration)
    if policy is not DEFAULT_PRECISION:
        given = [f"param_dtype={policy.param_dtype}", f"reduce_dtype={policy.reduce_dtype}"]
        given += ['master_dtype="keep"'] if policy.master_dtype else []
        inner = "".join(f"        {one},\n" for one in given)
        arguments["mp_policy"] = f"sw.MixedPrecisionPolicy(\n{inner}    )"
    if configuration.offload != "none":
        keeps = "" if configuration.offload == "parameters" else "parameters=False"
        arguments["offload_policy"] = f"sw.CPUOffloadPolicy({keeps})"
    lines = "".join(f"    {name}={value},\n" for name, value in arguments.items())
    return f"{mesh}sw.fully_shard(\n    model,\n{lines})"


def _mesh_of(configuration: Configuration) -> tuple[str, str]:
    """Return code that makes the mesh with model-parallel dims, and the submesh to shard over."""
    if configuration.model_parallel == 1:
        return "", ""
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
    lines = "from torch.distributed.device_mesh import init_device_mesh\n\n"
    lines += f'mesh = init_device_mesh("cuda", {shape}, mesh_dim_names={names})\n'
    inner = "shard" if has_replicas else "dp"
    if configuration.context > 1:
        lines += f'mesh["{inner}", "cp"]._flatten("{inner}_cp")\n'
        inner = f"{inner}_cp"
    over = f'mesh["replica", "{inner}"]' if has_replicas else f'mesh["{inner}"]'
    return lines.replace("'", '"'), over

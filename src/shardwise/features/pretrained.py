"""``save_pretrained`` and ``generate`` of Hugging Face's libraries for sharded models.

Every rank must call them. ``resize_token_embeddings`` is refused.
"""

import functools
import inspect
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.errors import CheckpointError, PlanError, RanksDiverged, StepError
from shardwise.features.joined_ranks import JoinedRanks
from shardwise.runtime.module import (
    MethodWrappers,
    as_forward,
    handle_of,
    is_unit,
    plain_class,
)  # fmt: skip
from shardwise.runtime.parameters import parameter_like
from shardwise.tensor.mesh import DataParallelMesh, all_ranks_of
from shardwise.tensor.reductions import across
from shardwise.tensor.sharding import sharding_of

__all__ = ["wrapped_methods"]


def wrapped_methods(module: nn.Module) -> MethodWrappers:
    """The methods of ``module`` that need more than its shards, with functions that wrap them."""
    found = [name for name in _WRAPPERS if callable(getattr(type(module), name, None))]
    return frozenset((name, _WRAPPERS[name]) for name in found if _is_wrapped(name, module))


def _is_wrapped(name: str, model: nn.Module) -> bool:
    """Whether the method ``name`` of ``model`` is wrapped.

    ``generate`` is if it calls modules inside ``model``, and not only ``model`` itself: the
    encoder, the towers of other modalities, or, in a model of peft, the base model.
    """
    if name != "generate" or (hasattr(model, "peft_config") and "base_model" in model._modules):
        return True
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return True
    text_config_of = getattr(config, "get_text_config", None)
    return callable(text_config_of) and text_config_of(decoder=True) is not config


# -- generate --------------------------------------------------------------------------------------


def _gathering_the_root(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``plain`` so that the unit of the model stays gathered until it returns."""
    as_call = as_forward(plain)
    synced = inspect.signature(plain).parameters.get("synced_gpus")
    is_unsynced = synced is not None and synced.default is False  # of Whisper; elsewhere None

    @functools.wraps(plain)
    def generate(self: nn.Module, *args: Any, **options: Any) -> Any:
        if isinstance(handle_of(self).runtime.scheduler.call_observer, JoinedRanks):
            raise StepError(
                f"generate of {type(self).__bases__[1].__name__} inside sw.join: it calls modules "
                "inside the model, such as the encoder, which ranks that have finished cannot "
                "follow; call it outside of the block, as often on every rank, or in `with "
                "sw.gathered(model):`"
            )
        if is_unsynced:
            options.setdefault("synced_gpus", getattr(self, "_is_fsdp_managed_module", False))
        return as_call(self, *args, **options)

    return generate


# -- save_pretrained -------------------------------------------------------------------------------


def _saving_whole_tensors(plain: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``plain`` so that the first rank writes whole tensors, which are gathered one by one.

    Gathered tensors are kept in memory-mapped files next to the result. Each rank therefore needs
    host memory for the largest tensor only, while the disk temporarily holds two copies of the
    model. For a model with adapters, only the tensors that peft saves are gathered. While ``plain``
    runs, the model of the first rank is a whole one, which it may also call.
    """

    @functools.wraps(plain)
    def save_pretrained(
        self: nn.Module, save_directory: str | os.PathLike[str], *args: Any, **options: Any
    ) -> None:
        if options.get("state_dict") == {} and not options.get("is_main_process", True):
            return  # accelerate's `get_state_dict` returns nothing on ranks that write nothing
        if _works_unchanged(self, options):
            plain(self, save_directory, *args, **options)
            return
        mesh = _mesh_of(self)
        is_first = mesh.group_rank == 0
        with ExitStack() as stack:
            saved = _state_to_save(self, options)
            tensors = {id(tensor): tensor for tensor in saved.values()}
            whole: dict[int, Any] = {}
            with _raising_together(mesh, save_directory):
                if is_first:
                    Path(save_directory).mkdir(parents=True, exist_ok=True)
                    scratch = stack.enter_context(tempfile.TemporaryDirectory(dir=save_directory))
                    whole = {key: _map(Path(scratch), x) for key, x in tensors.items()}
            for key, tensor in tensors.items():
                gathered = _gather(tensor)
                if is_first:
                    whole[key].copy_(gathered)
            with _raising_together(mesh, save_directory):
                if is_first:
                    stack.enter_context(_made_whole(self, saved, whole))
                    plain(self, save_directory, *args, **options)

    return save_pretrained


def _works_unchanged(model: nn.Module, options: Mapping[str, Any]) -> bool:
    """Whether the model's own ``save_pretrained`` works.

    It does if parameters are gathered, the caller passes a state dict, or transformers has sharded
    the model.
    """
    is_sharded = any(sharding_of(parameter) is not None for parameter in model.parameters())
    is_custom = options.get("state_dict") is not None or options.get("distributed_checkpoint")
    by_transformers = getattr(model, "is_distributed_loading_by_transformers", False)
    return not is_sharded or bool(is_custom) or by_transformers


def _mesh_of(model: nn.Module) -> DataParallelMesh:
    """The mesh of all ranks that hold a part of ``model``.

    Raises:
        CheckpointError: other ranks hold different values under the same name.
    """
    mesh = handle_of(model).runtime.mesh
    for name, parameter in model.named_parameters():
        sharding = sharding_of(parameter)
        if sharding is None:
            continue
        if sharding.tensor_parallel is not None and isinstance(parameter, DTensor):
            return all_ranks_of(parameter.device_mesh)
        if sharding.mesh.num_ranks < mesh.num_ranks:
            raise CheckpointError(
                f"{name} is sharded over {sharding.mesh.num_ranks} of the model's "
                f"{mesh.num_ranks} ranks, and the others hold different values under that name; "
                "make it a DTensor on the mesh of expert parallelism before fully_shard"
            )
    return mesh


def _adapters_of(model: nn.Module) -> Mapping[str, Any]:
    """peft's configurations by adapter name; empty if the model has no adapters."""
    return getattr(model, "peft_config", None) or {}


def _state_to_save(model: nn.Module, options: Mapping[str, Any]) -> dict[str, Tensor]:
    """The sharded state dict; for a model with adapters, only the tensors that peft saves."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    tensors = {name: x for name, x in state.items() if isinstance(x, Tensor)}
    adapters = options.get("selected_adapters") or _adapters_of(model)
    if not adapters:
        return tensors
    from peft import get_peft_model_state_dict  # noqa: PLC0415 (the model is one of peft)

    placeholders = {
        name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in tensors.items()
    }
    saved: set[int] = set()
    for name in adapters:
        if _adapters_of(model)[name].is_prompt_learning:  # peft computes what it saves
            prompts = [key for key in tensors if key.startswith(f"prompt_encoder.{name}.")]
            saved |= {id(placeholders[key]) for key in prompts}
            continue
        found = get_peft_model_state_dict(
            model,
            state_dict=placeholders,
            adapter_name=name,
            save_embedding_layers=options.get("save_embedding_layers", "auto"),
        )
        saved |= {id(tensor) for tensor in found.values()}
    return {
        name: x for name, x in tensors.items() if x.requires_grad or id(placeholders[name]) in saved
    }


def _map(directory: Path, like: Tensor) -> Tensor:
    """A tensor with the dtype and shape of ``like``, mapped to a new file in ``directory``."""
    num_bytes = like.numel() * like.element_size()
    if not num_bytes:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")
    with tempfile.NamedTemporaryFile(dir=directory, delete=False) as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)  # otherwise a full disk raises SIGBUS later
    mapped = torch.from_file(file.name, shared=True, size=num_bytes, dtype=torch.uint8)
    return mapped.view(like.dtype).view(like.shape)


@contextmanager
def _made_whole(
    model: nn.Module, saved: Mapping[str, Tensor], whole: Mapping[int, Tensor]
) -> Iterator[None]:
    """Make ``model`` a plain module with ``whole`` tensors, by the ids of those in ``saved``."""
    units = {module: type(module) for module in model.modules() if is_unit(module)}
    named: Iterable[tuple[str, Tensor]] = chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    shown: dict[int, Tensor] = {}
    for name, now in named:
        # The module of a unit that is gathered has another tensor than the state dict.
        value = whole.get(id(now), whole.get(id(saved.get(name))))
        if value is not None and id(now) not in shown:  # tied parameters stay tied
            is_parameter = isinstance(now, nn.Parameter)
            shown[id(now)] = parameter_like(now, value) if is_parameter else value
    held: list[tuple[dict[str, Any], str, Tensor | None]] = [
        (tensors, name, tensor)
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if id(tensor) in shown
    ]
    try:
        for unit, kind in units.items():
            unit.__class__ = plain_class(kind)
        for tensors, name, tensor in held:
            tensors[name] = shown[id(tensor)]
        yield
    finally:
        for unit, kind in units.items():
            unit.__class__ = kind
        for tensors, name, tensor in held:
            tensors[name] = tensor


@torch.no_grad()
def _gather(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def _raising_together(mesh: DataParallelMesh, directory: str | os.PathLike[str]) -> Iterator[None]:
    """Raise on every rank, at the end of the block, if any rank raised inside it."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:  # noqa: BLE001 - raised below, after the exchange
        error = raised
    device = mesh.accelerator or torch.device("cpu")
    try:
        failed = across([torch.tensor(error is not None, device=device)], mesh, mesh.world)
    except RanksDiverged as diverged:
        diverged.add_note(
            "Every rank must call save_pretrained of a sharded model. transformers' Trainer calls "
            "it on one rank only; use the Trainer of shardwise.integrations.transformers instead."
        )
        raise
    if error is not None:
        raise error
    if failed.any():
        raise CheckpointError(f"save_pretrained({os.fspath(directory)!r}) failed on the first rank")


# -- resize_token_embeddings -----------------------------------------------------------------------


def _refusing_another_size(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``plain`` so that it only returns the embeddings, as it does if the size is theirs."""

    @functools.wraps(plain)
    def resize_token_embeddings(
        self: nn.Module, new_num_tokens: int | None = None, *args: Any, **options: Any
    ) -> Any:
        model: Any = self
        size: int = model.get_input_embeddings().weight.shape[0]
        multiple = args[0] if args else options.get("pad_to_multiple_of")
        if new_num_tokens not in (None, size) or (multiple and size % multiple):
            raise PlanError(
                f"resize_token_embeddings({new_num_tokens}): the {size} embeddings are sharded; "
                "call it before fully_shard, and before the trainer is built that shards the model"
            )
        return plain(self, new_num_tokens, *args, **options)

    return resize_token_embeddings


_WRAPPERS = {
    "save_pretrained": _saving_whole_tensors,
    "generate": _gathering_the_root,
    "resize_token_embeddings": _refusing_another_size,
}

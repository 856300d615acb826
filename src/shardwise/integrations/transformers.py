"""transformers' `Trainer` for sharded models.

`Trainer` replaces transformers' own::

    from shardwise.integrations.transformers import Trainer

    trainer = Trainer(model=model, args=arguments, fully_shard={"units": LlamaDecoderLayer})

For other trainers, use `ShardedTrainer` as a mix-in::

    class Trainer(ShardedTrainer, trl.SFTTrainer): ...
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.errors import PackageMissing, PlanError

PackageMissing.check("transformers", extra="hf", needed_for=__name__)

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, get_last_checkpoint
from transformers.utils import SAFE_WEIGHTS_NAME, is_peft_available

from shardwise._warnings import warn_caller
from shardwise.features.fsdp_module import FSDPModule
from shardwise.integrations.accelerate import prepare_sharded
from shardwise.integrations.state import full_state_dict, load_optimizers, save_optimizers
from shardwise.integrations.uneven_batches import EpochBegins, UnevenBatches

if is_peft_available():
    import peft

__all__ = ["ShardedTrainer", "Trainer"]

_OPTIMIZER = "sharded_state"  # "optimizer" in its name would have the Trainer read it
_SCHEDULER = "scheduler.pt"


class ShardedTrainer(UnevenBatches):
    """A mix-in with which all ranks save and resume together; the first base of a trainer class.

    Ranks may have different numbers of batches, as with ``accelerator_config={"even_batches":
    False}``: no sample is repeated, and those without batches take part without computing.
    Trainers of TRL are refused then: they gather metrics from all ranks in each forward.

    Checkpoints contain the weights in the format of ``from_pretrained``, and the optimizer's
    states in shards (a directory of ``torch.distributed.checkpoint``), which any number of ranks
    can load.

    Args:
        fully_shard: arguments of `sw.fully_shard`, which is called after the trainer has prepared
            the model, that is, added adapters or changed dtypes. Without ``mp_policy``, units
            compute in the dtype of ``bf16`` or ``fp16``, as in `integrations.accelerate`. None: the
            model is sharded already, which is necessary if it does not fit on a single device.
        options: arguments of the trainer class.
    """

    _prepare_sharded: Callable[[Any], None] | None = None  # until the constructor has the model

    def __init__(
        self, *args: Any, fully_shard: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        trainer: Any = self
        self._prepare_sharded = partial(prepare_sharded, trainer.accelerator, options=fully_shard)
        self._prepare(trainer.model)
        self.saves_optimizer = not trainer.args.save_only_model
        trainer.args.save_only_model = True  # rank 0 alone would save the rest
        self.resume_callback = _ResumeCallback(trainer)
        trainer.add_callback(self.resume_callback)
        trainer.add_callback(EpochBegins(self))

    def call_model_init(self, *args: Any, **options: Any) -> Any:
        """As in `transformers.Trainer`; ``train`` gets another model from it, which is sharded."""
        trainer: Any = super()
        model = trainer.call_model_init(*args, **options)
        is_new = not isinstance(model, FSDPModule)
        if is_new and self._prepare_sharded is not None:  # which the constructor does at its end
            self._prepare(model)
        return model

    def _prepare(self, model: Any) -> None:
        assert self._prepare_sharded is not None
        self._prepare_sharded(model)
        if is_peft_available() and isinstance(model, peft.PeftModel):
            adapted: Any = model
            adapted.load_adapter = partial(_load_adapter, model)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As in `transformers.Trainer`."""
        trainer: Any = super()
        path = resume_from_checkpoint
        if path is True:
            path = get_last_checkpoint(self.args.output_dir)  # type: ignore[attr-defined]
        self.resume_callback.directory = Path(path) if path else None
        return trainer.train(resume_from_checkpoint, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model to ``output_dir``; every rank must call this.

        If ``output_dir`` is the directory of a checkpoint, also write the states of the optimizer,
        the schedule, the gradient scaler and the random generators.
        """
        trainer: Any = self
        directory = Path(output_dir or trainer.args.output_dir)
        save: Callable[..., None] | None = getattr(trainer.model, "save_pretrained", None)
        if save is not None:
            # That of sentence-transformers has no such argument.
            has_argument = "is_main_process" in inspect.signature(save).parameters
            save(directory, **{"is_main_process": trainer.args.should_save} if has_argument else {})
        else:
            state = full_state_dict(trainer.model)
            if trainer.args.should_save:
                directory.mkdir(parents=True, exist_ok=True)
                unshared = {name: tensor.clone() for name, tensor in state.items()}
                save_file(unshared, directory / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
        if trainer.args.should_save:
            if trainer.processing_class is not None:
                trainer.processing_class.save_pretrained(directory)
            torch.save(trainer.args, directory / "training_args.bin")
        if directory.name.startswith(PREFIX_CHECKPOINT_DIR) and self.saves_optimizer:
            save_optimizers(directory / _OPTIMIZER, trainer.model, [trainer.optimizer])
            if trainer.args.should_save:
                torch.save(trainer.lr_scheduler.state_dict(), directory / _SCHEDULER)
                scaler = trainer.accelerator.scaler
                if scaler is not None:  # the Trainer itself reads it
                    torch.save(scaler.state_dict(), directory / SCALER_NAME)
            trainer._save_rng_state(str(directory))


class Trainer(ShardedTrainer, transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` for a sharded model."""


class _ResumeCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Loads optimizer and schedule; the `Trainer` itself loads weights and random states."""

    directory: Path | None = None

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any
    ) -> None:
        del args, state, control
        _check_parameters(self._trainer, kwargs["optimizer"])
        if self.directory is None:
            return
        if (self.directory / _OPTIMIZER).exists():
            load_optimizers(self.directory / _OPTIMIZER, model, [kwargs["optimizer"]])
            schedule = torch.load(self.directory / _SCHEDULER, weights_only=True)
            kwargs["lr_scheduler"].load_state_dict(schedule)
        elif not (self.directory / OPTIMIZER_NAME).exists():  # the Trainer's own has been loaded
            warn_caller(
                f"{self.directory} has no states of an optimizer (save_only_model=True), so the "
                "optimizer and its schedule start over"
            )


def _check_parameters(trainer: Any, optimizer: Any) -> None:
    """Raise a PlanError if ranks would not reduce, or not save, what ``optimizer`` trains."""
    own = set(map(id, trainer.model.parameters()))
    trained = [one for group in optimizer.param_groups for one in group["params"]]
    others = [one for one in trained if one.requires_grad and id(one) not in own]
    unsharded = [one for one in others if not isinstance(one, DTensor)]
    if unsharded and trainer.args.world_size > 1:
        raise PlanError(
            f"the optimizer has {_name(unsharded[0], trainer)}, which is not a parameter of the "
            "model, so each rank would update it with its own gradients; pass the module that has "
            "it, for instance the layer of a loss, to sw.fully_shard before the trainer is made"
        )
    if others and trainer.saves_optimizer and trainer.args.save_strategy != SaveStrategy.NO:
        raise PlanError(
            f"the optimizer has {_name(others[0], trainer)}, which is not a parameter of the "
            "model, so checkpoints would not contain it; set save_only_model=True in the "
            "arguments, and save it yourself"
        )


def _name(parameter: Tensor, trainer: Any) -> str:
    modules = {key: one for key, one in vars(trainer).items() if isinstance(one, nn.Module)}
    for key, module in modules.items():
        for name, one in module.named_parameters(prefix=key):
            if one is parameter:
                return name
    return f"a tensor of shape {tuple(parameter.shape)}"


def _load_adapter(
    model: Any, directory: str, adapter_name: str = "default", *args: Any, **kwargs: Any
) -> Any:
    """Read an adapter into the shards of ``model``, which peft itself cannot do."""
    if adapter_name not in model.peft_config:
        return type(model).load_adapter(model, directory, adapter_name, *args, **kwargs)
    weights = peft.load_peft_weights(directory, device="cpu")
    if model.peft_config[adapter_name].is_prompt_learning:  # its state dict is computed
        adapter = {"prompt_embeddings": model.prompt_encoder[adapter_name].embedding.weight}
    else:
        adapter = peft.get_peft_model_state_dict(model, adapter_name=adapter_name)
    with torch.no_grad():
        for name, shard in adapter.items():
            shard.copy_(weights[name])
    return None

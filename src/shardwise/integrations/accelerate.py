"""accelerate's `Accelerator`, with shardwise instead of DDP::

    from shardwise.integrations.accelerate import Accelerator

    accelerator = Accelerator(fully_shard={"units": Block}, gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

The rest of the program stays the same: ``accumulate``, ``clip_grad_norm_``, ``save_state``,
``load_state``, ``save_model`` and ``join_uneven_inputs`` work as in accelerate.
"""

import contextlib
import itertools
import os
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableSequence
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.errors import PackageMissing

PackageMissing.check("accelerate", extra="hf", needed_for=__name__)

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME, DynamoBackend
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise._private import is_compiled_in_place
from shardwise._warnings import warn_caller
from shardwise.api import fully_shard as shard
from shardwise.errors import PlanError
from shardwise.features.fsdp_module import FSDPModule
from shardwise.integrations.state import (
    full_state_dict,
    load_full_state_dict,
    load_optimizers,
    save_optimizers,
    sharded_states,
)
from shardwise.optim.clip import clip_grad_norm_
from shardwise.optim.join import join
from shardwise.plan.policies import repeated_blocks
from shardwise.plan.precision import MixedPrecisionPolicy
from shardwise.runtime.attach import parameters_of, settings_of
from shardwise.runtime.engine import HANDLE
from shardwise.runtime.module import runtimes_in
from shardwise.tensor.sharding import sharding_of

__all__ = ["Accelerator", "prepare_sharded"]

_OPTIMIZERS = "sharded_optimizers"
_Named = tuple["weakref.ref[nn.Parameter]", str]


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """`accelerate.Accelerator` that shards models.

    `prepare` shards its models, unless they are sharded already, and gives the sharded parameters
    to the optimizers. ``save_state`` writes the weights as accelerate does, and the states of
    optimizers in shards, which any number of ranks can load.

    Args:
        fully_shard: arguments of `sw.fully_shard`. Without ``mp_policy``, units compute in the
            dtype of accelerate's ``mixed_precision``, and reduce in float32; outputs of the model
            are in float32, as in accelerate.
        options: arguments of `accelerate.Accelerator`, without another plugin that shards.
    """

    def __init__(
        self, *args: Any, fully_shard: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.shard_options = dict(fully_shard or {})
        self.sharded: dict[nn.Module, list[Optimizer]] = {}
        self._before: dict[nn.Module, list[_Named]] = {}  # parameters before they were sharded
        self.loaded_from = Path()

    def prepare(self, *args: Any, **options: Any) -> Any:
        """As in `accelerate.Accelerator`; pass an optimizer with its model, before, or later."""
        values = (*self._optimizers, *args)
        optimizers = [_unwrapped(value) for value in values if isinstance(value, Optimizer)]
        for model in (value for value in args if isinstance(value, nn.Module)):
            if isinstance(model, FSDPModule):
                prepare_sharded(self, model, None)
            else:
                before = [(weakref.ref(p), name) for name, p in model.named_parameters()]
                prepare_sharded(self, model, self.shard_options)
                self._before[model] = before
            self.sharded.setdefault(model, [])
        for model, model_optimizers in self.sharded.items():
            parameters = dict(model.named_parameters())
            _switch_parameters(optimizers, self._before.get(model, ()), parameters)
            ids = set(map(id, parameters.values()))
            for optimizer in optimizers:
                is_its_own = not ids.isdisjoint(map(id, parameters_of(optimizer)))
                if is_its_own and optimizer not in model_optimizers:
                    model_optimizers.append(optimizer)
        return super().prepare(*args, **options)

    def free_memory(self, *objects: Any) -> Any:
        """As in `accelerate.Accelerator`."""
        self.sharded.clear()
        self._before.clear()
        return super().free_memory(*objects)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Keep whole gradients inside the block, and do not reduce them."""
        if not isinstance(model, FSDPModule):
            with super().no_sync(model):
                yield
            return
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Reduce gradients in backwards inside the block, also in `no_sync`."""
        if not isinstance(model, FSDPModule):
            with accelerate.Accelerator.trigger_sync_in_backward(model):
                yield
            return
        before = settings_of(model).reduce_grads
        model.set_requires_gradient_sync(True)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(before)

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: Iterable[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Run a loop in which ranks have different numbers of batches, in `sw.join`.

        As in accelerate, data loaders repeat no samples in the block if ``even_batches`` is False.
        Use one block per epoch: at the beginning of an epoch, loaders broadcast the state of their
        random generator, and all ranks must be there.

        Args:
            joinables: one sharded model, whose prepared optimizers and schedulers may step.
            even_batches: replaces the setting of all prepared data loaders in the block; a warning
                if one of them has no such setting.

        Raises:
            PlanError: there is something else in ``joinables`` than sharded models.
        """
        joinables = list(joinables)
        models = [model for model in joinables if isinstance(model, FSDPModule)]
        if models and len(models) < len(joinables):
            names = {type(one).__name__ for one in joinables if not isinstance(one, FSDPModule)}
            raise PlanError(
                f"join_uneven_inputs: {', '.join(sorted(names))} cannot be joined with a sharded "
                "model; pass the model alone, with which its prepared optimizers and schedulers "
                "take part"
            )
        if not models:
            with super().join_uneven_inputs(joinables, even_batches):
                yield
            return
        with contextlib.ExitStack() as stack:
            for loader in () if even_batches is None else self._dataloaders:
                sampler: Any = getattr(loader, "batch_sampler", None)
                if hasattr(sampler, "even_batches"):
                    stack.callback(setattr, sampler, "even_batches", sampler.even_batches)
                    sampler.even_batches = even_batches
                elif self.num_processes > 1 and not even_batches:
                    warn_caller(
                        f"join_uneven_inputs: a {type(loader).__name__} without a setting for "
                        "even_batches (dispatch_batches, or an IterableDataset) repeats samples"
                    )
            for model in models:
                optimizers = self.sharded[model]
                schedules = [one.scheduler for one in self._schedulers]
                mine = [one for one in schedules if _unwrapped(one.optimizer) in optimizers]
                stack.enter_context(join(model, *optimizers, *mine))
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """As in `accelerate.Accelerator`, also in `join_uneven_inputs`."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not any(sharding_of(parameter) for parameter in parameters):
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return whole tensors in host memory on rank 0, and nothing on other ranks.

        Every rank must call this.
        """
        if isinstance(model, FSDPModule):
            return full_state_dict(model)
        return super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: str | os.PathLike[str] | None = None, **options: Any) -> Any:
        """As in `accelerate.Accelerator`."""
        with self._without_optimizer_states():
            directory = super().save_state(output_dir, **options)
        for name, model, optimizers in self._saved_optimizers():
            save_optimizers(Path(directory) / name, model, optimizers)
        return directory

    def load_state(self, input_dir: str | os.PathLike[str] | None = None, **options: Any) -> None:
        """As in `accelerate.Accelerator`."""
        load = partial(self._load_models, strict=options.get("strict", True))
        with self._without_optimizer_states() as stack:
            # Last, so that hooks of the program can load models, and remove them from the list.
            stack.callback(self.register_load_state_pre_hook(load).remove)
            super().load_state(input_dir, **options)
        for name, model, optimizers in self._saved_optimizers():
            load_optimizers(self.loaded_from / name, model, optimizers)

    def _saved_optimizers(self) -> Iterator[tuple[str, nn.Module, list[Optimizer]]]:
        """Each directory of optimizer states, with the model that has their parameters."""
        listed = Counter(map(id, itertools.chain(*self.sharded.values())))
        shared: dict[int, Optimizer] = {}  # which step parameters of several models
        for index, (model, optimizers) in enumerate(self.sharded.items()):
            shared |= {id(one): one for one in optimizers if listed[id(one)] > 1}
            own = [one for one in optimizers if listed[id(one)] == 1]
            if own:
                yield f"{_OPTIMIZERS}_{index}", model, own
        if shared:
            models = nn.ModuleList(self.sharded)
            yield f"{_OPTIMIZERS}_{len(models)}", models, list(shared.values())

    def _load_models(
        self, models: MutableSequence[nn.Module], directory: str, *, strict: bool
    ) -> None:
        """Load the sharded models, and prevent accelerate from loading them."""
        self.loaded_from = Path(directory)
        for index, model in enumerate(models):
            suffix = f"_{index}." if index else "."
            weights = self.loaded_from / SAFE_WEIGHTS_NAME.replace(".", suffix)
            if weights.exists():
                state = load_file(weights)
            else:
                weights = self.loaded_from / WEIGHTS_NAME.replace(".", suffix)
                state = torch.load(weights, map_location="cpu", mmap=True, weights_only=True)
            load_full_state_dict(model, state, strict=strict)
        models.clear()

    @contextlib.contextmanager
    def _without_optimizer_states(self) -> Iterator[contextlib.ExitStack]:
        """Prevent accelerate from saving and loading the optimizer states of sharded models."""
        with contextlib.ExitStack() as stack:
            for optimizer in itertools.chain(*self.sharded.values()):
                groups = optimizer.state_dict()["param_groups"]
                empty = {"state": {}, "param_groups": groups}
                hooks = (
                    optimizer.register_state_dict_post_hook(lambda *_, empty=empty: empty),
                    optimizer.register_load_state_dict_pre_hook(lambda *_, empty=empty: empty),
                )
                for hook in hooks:
                    stack.callback(hook.remove)
            yield stack


def prepare_sharded(
    accelerator: accelerate.Accelerator, model: nn.Module, options: Mapping[str, Any] | None
) -> None:
    """Shard ``model`` with ``options``, and give it the dtype and compiler of ``accelerator``.

    Options of None mean that it is sharded already: it keeps its dtype, and a warning says so if
    ``accelerator`` has another one.
    """
    name = {"bf16": "bfloat16", "fp16": "float16"}.get(accelerator.mixed_precision)
    if options is not None:
        if name is not None:
            policy = MixedPrecisionPolicy(
                param_dtype=getattr(torch, name),
                reduce_dtype=torch.float32,
                output_dtype=torch.float32,
            )
            options = {"mp_policy": policy, **options}
        shard(model, **options)
    if not isinstance(model, FSDPModule):
        return
    runtimes = runtimes_in(model) if HANDLE in vars(model) else []  # none on the meta device
    units = [unit for runtime in runtimes for unit in runtime.plan.units]
    computed = {layout.cast.compute_dtype for unit in units for layout in unit.layouts}
    if options is None and computed and name not in {None, *computed}:
        warn_caller(
            f"mixed precision is {accelerator.mixed_precision!r}, but the model was sharded to "
            f"compute in {', '.join(sorted(computed))}, and keeps this dtype; pass "
            f"mp_policy=sw.MixedPrecisionPolicy(torch.{name}) to fully_shard"
        )
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend != DynamoBackend.NO and not is_compiled_in_place(model):
        # In place: a wrapper would hide the methods of the model.
        is_regional = getattr(plugin, "use_regional_compilation", False)  # accelerate 1.8
        blocks = repeated_blocks(model) if is_regional else []
        for name in blocks or [""]:
            model.get_submodule(name).compile(**plugin.to_kwargs())


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _switch_parameters(
    optimizers: list[Optimizer], before: Iterable[_Named], parameters: Mapping[str, nn.Parameter]
) -> None:
    """Replace parameters ``before`` in optimizers by the ``parameters`` with the same names."""
    names = {
        id(parameter): name for reference, name in before if (parameter := reference()) is not None
    }
    for optimizer in optimizers:
        states: Any = optimizer.state
        early = [parameter for parameter in states if id(parameter) in names]
        if any(states[one].get("step") != 0 for one in early):  # Adagrad makes its states before
            raise PlanError(
                f"{type(optimizer).__name__} has taken steps before its parameters were sharded; "
                "call `prepare` before the first step"
            )
        for parameter in early:
            state, own = states.pop(parameter), parameters[names[id(parameter)]]
            states[own] = sharded_states(own, state)
        for group in optimizer.param_groups:
            group["params"] = [
                parameters[names[id(p)]] if id(p) in names else p for p in group["params"]
            ]

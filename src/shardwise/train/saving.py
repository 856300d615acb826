"""What a run keeps of itself, so that it goes on where it was stopped or killed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import tree
from shardwise.checkpoint.remote import folder_at
from shardwise.checkpoint.sources import read_manifest
from shardwise.errors import CheckpointError, ConfigError
from shardwise.launch.world import World
from shardwise.plan.layout import Run
from shardwise.runtime.module import runtime_of_root
from shardwise.runtime.reductions import gather_runs
from shardwise.train.config import Config
from shardwise.train.data import read_corpus
from shardwise.train.settings import to_toml
from shardwise.train.update import Update
from shardwise.transport.device import random_states, set_random_states

__all__ = ["Saver", "check_same", "step_of"]


class Saver:
    """Saves model, optimizer, step, configuration and random states; every rank makes its calls.

    The order of the text needs no saving: it follows from the seed and the step.
    """

    def __init__(self, config: Config, ranks: World, folder: Path | str) -> None:
        self._config = config
        self._ranks = ranks
        self._folder = folder_at(folder)
        self._pending: sw.Save | None = None
        self.saved_step = 0  # the last one that is on disk, or on its way there

    def is_due(self, step: int, *, stops: bool) -> bool:
        """Whether ``step`` is to be saved; ``stops`` if it is the last one of this process."""
        every = self._config.checkpoint.every
        if not every or step == self.saved_step:
            return False
        return stops or step % every == 0 or step == self._config.train.steps

    def save(self, step: int, model: nn.Module, update: Update, text: int) -> None:
        """Save what is there after ``step``.

        Args:
            step: the last one that was trained.
            model: as it is after it.
            update: with the optimizer, likewise.
            text: the digest of what is trained on.

        Raises:
            CheckpointError: this checkpoint, or the one before it that was not waited for, could
                not be written.
        """
        options = self._config.checkpoint
        self._pending = sw.save(
            (self._folder / f"step-{step:08}").target,
            model=model,
            optimizer=update.optimizer,
            wait=options.wait,
            retention=sw.Retention(last=options.keep),
            run={"step": step, "shared": _shared(self._config, text)},
            config=to_toml(self._config),
            random=self._random_states(model),
            scaler=update.scaler_state(),
        )
        self.saved_step = step

    def wait(self) -> None:
        """Return when what was saved is on disk; before the ranks part."""
        if self._pending is not None:
            self._pending.wait()

    def load(self, checkpoint: Path | str, model: nn.Module, update: Update) -> None:
        """Load what `save` wrote, on any number of ranks."""
        state = sw.load(checkpoint, model=model, optimizer=update.optimizer).state
        update.load_scaler_state(state["scaler"])
        self.saved_step = state["run"]["step"]
        random: list[list[torch.Tensor]] = state["random"]
        own = random_states(self._ranks.device)
        if len(random) == self._ranks.size and len(random[0]) == len(own):  # else whose are they
            set_random_states(self._ranks.device, random[self._ranks.rank])

    def _random_states(self, model: nn.Module) -> list[list[torch.Tensor]]:
        """Those of every rank."""
        own = random_states(self._ranks.device)
        lengths = [len(state) for state in own]
        runs = [Run(0, sum(lengths))] * self._ranks.size
        axis = runtime_of_root(model).axis
        by_rank = gather_runs(torch.cat(own), runs, axis, "random states", axis.world)
        return [list(row.split(lengths)) for row in by_rank]


def step_of(checkpoint: Path | str) -> int:
    """The last step that is in ``checkpoint``.

    Raises:
        CheckpointError: it is damaged, or none of the trainer's.
    """
    step: int = _run(checkpoint)["step"]
    return step


def check_same(checkpoint: Path | str, config: Config) -> None:
    """Refuse to go on with another model, or with other text.

    What may differ: ranks and how the model lies on them, the number of steps, the learning rate.

    Raises:
        ConfigError: names the key.
        CheckpointError: as `step_of`.
    """
    saved = _run(checkpoint)["shared"]
    for key, value in _shared(config, read_corpus(config.data).digest).items():
        if saved.get(key) == value:
            continue
        found = (
            "data: other text than" if key == "data" else f"{key}={value}, not {saved.get(key)} as"
        )
        raise ConfigError(
            f"{found} in {checkpoint}, from which this run would go on; choose another "
            "run.directory, or set run.overwrite=true to begin anew"
        )


def _shared(config: Config, text: int) -> dict[str, Any]:
    """What all parts of a run have in common."""
    model = {f"model.{key}": value for key, value in config.model.model_dump().items()}
    order = {f"train.{key}": getattr(config.train, key) for key in ("seed", "global_batch")}
    return {**model, **order, "data": text}


def _run(checkpoint: Path | str) -> Mapping[str, Any]:
    """Read it from the manifest: `sw.load` would want all ranks."""
    component = read_manifest(folder_at(checkpoint)).components.get("run")
    if component is None:
        raise CheckpointError(f"{checkpoint}: was not saved by `shardwise train`")
    run: Mapping[str, Any] = tree.decode(component.tree, _no_tensor)
    return run


def _no_tensor(name: str) -> torch.Tensor:
    raise CheckpointError(f"{name}: no tensor is expected in what the trainer saved as `run`")

"""Checkpoints of a run, and the signals after which it saves and stops."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import tree
from shardwise.checkpoint.read import read_manifest
from shardwise.checkpoint.stores import folder_at
from shardwise.errors import CheckpointError, ConfigError
from shardwise.launch.world import World
from shardwise.train.config import Config
from shardwise.train.data import open_corpus
from shardwise.train.settings import to_toml
from shardwise.transport.device import random_states, set_random_states

__all__ = ["Saver", "StopSignal", "check_same_run"]

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A terminal sends Ctrl-C to all of its processes, and a launcher passes it on to its ranks: a
# second signal within this time is the same request.
SAME_SIGNAL_SECONDS = 1.0


class Saver:
    """Saves model, optimizer, step, configuration and random states. Its methods are collectives.

    The position in the data is not saved: it follows from the seed and the step.
    """

    def __init__(self, config: Config, world: World, folder: Path | str, text_digest: int) -> None:
        self._config = config
        self._world = world
        self._folder = folder_at(folder)
        self._text_digest = text_digest
        self._pending: sw.Save | None = None
        self.saved_step = 0  # the last one that is saved or being saved

    def is_due(self, step: int, *, stops: bool) -> bool:
        """Whether to save after ``step``; ``stops`` if it is the last one of this process."""
        every = self._config.checkpoint.every
        if not every or step == self.saved_step:
            return False
        return stops or step % every == 0 or step == self._config.train.steps

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler_state: dict[str, Any],
    ) -> None:
        """Save the state after ``step``.

        Raises:
            CheckpointError: this checkpoint, or the last one if it was saved in the background,
                cannot be written.
        """
        options = self._config.checkpoint
        self._pending = sw.save(
            (self._folder / f"step-{step:08}").target,
            model=model,
            optimizer=optimizer,
            wait=options.wait,
            retention=sw.Retention(last=options.keep),
            run={"step": step, "shared": _identity(self._config, self._text_digest)},
            config=to_toml(self._config),
            random=self._world.gather(random_states(self._world.device)),
            scaler=scaler_state,
        )
        self.saved_step = step

    def wait(self) -> None:
        """Return when the last checkpoint is on disk."""
        if self._pending is not None:
            self._pending.wait()

    def load(
        self, checkpoint: Path | str, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Load a checkpoint of any number of ranks; returns the state of the loss scaler."""
        state = sw.load(checkpoint, model=model, optimizer=optimizer).state
        self.saved_step = state["run"]["step"]
        random: list[list[torch.Tensor]] = state["random"]
        own = random_states(self._world.device)
        if len(random) == self._world.size and len(random[0]) == len(own):  # as many ranks
            set_random_states(self._world.device, random[self._world.rank])
        scaler_state: dict[str, Any] = state["scaler"]
        return scaler_state


def check_same_run(checkpoint: Path | str, config: Config) -> int:
    """Reject a checkpoint of another model or of other data; returns its step.

    The number of ranks, the strategy, the number of steps and the learning rate may differ.

    Raises:
        ConfigError: names the key.
        CheckpointError: it is damaged, or was not saved by the trainer.
    """
    run = _read_run(checkpoint)
    for key, value in _identity(config, open_corpus(config.data).digest).items():
        saved = run["shared"].get(key)
        if saved == value:
            continue
        is_text = key == "data"
        found = "data: the text differs" if is_text else f"{key}={value} differs"
        was = "" if is_text else f", which has {saved}"
        raise ConfigError(
            f"{found} from that of {checkpoint}{was}; choose another run.directory, or set "
            "run.overwrite=true to start over"
        )
    return int(run["step"])


def _identity(config: Config, text_digest: int) -> dict[str, Any]:
    """What must be equal in all parts of a run."""
    model = {f"model.{key}": value for key, value in config.model.model_dump().items()}
    order = {f"train.{key}": getattr(config.train, key) for key in ("seed", "global_batch")}
    return {**model, **order, "data": text_digest}


def _read_run(checkpoint: Path | str) -> Mapping[str, Any]:
    """Read ``run`` from the manifest; `sw.load` would need all ranks."""
    component = read_manifest(folder_at(checkpoint)).components.get("run")
    if component is None:
        raise CheckpointError(f"{checkpoint}: was not saved by `shardwise train`")
    run: Mapping[str, Any] = tree.decode(component.tree, _reject_tensor)
    return run


def _reject_tensor(name: str) -> torch.Tensor:
    raise CheckpointError(f"{name}: expected no tensor in the state `run` of the trainer")


class StopSignal:
    """Notes the first SIGINT or SIGTERM; a later one ends the process at once."""

    def __init__(self) -> None:
        self.number = 0  # of the signal; 0 is none
        self._time = 0.0

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals within the context; no effect outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if not self.number:
            self.number, self._time = number, time.monotonic()
        elif time.monotonic() - self._time > SAME_SIGNAL_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

"""Helpers for tests that train on the ranks of a pool."""

from typing import Any

import torch
import torch.distributed as dist

from shardwise.launch.world import World
from shardwise.train.config import Config
from shardwise.train.sinks import StepMetrics

Document = dict[str, dict[str, Any]]  # sections of a configuration


class Recorder:
    """A sink that keeps the metrics of all steps."""

    def __init__(self) -> None:
        self.records: list[StepMetrics] = []

    def log(self, record: StepMetrics) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass

    @property
    def losses(self) -> list[float]:
        return [record.loss for record in self.records]


def cpu_world() -> World:
    return World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))


def config_with(document: Document, *changes: Document) -> Config:
    """The configuration ``document`` with the keys in ``changes``."""
    sections = dict(document)
    for change in changes:
        for name, values in change.items():
            sections[name] = sections.get(name, {}) | values
    return Config.model_validate(sections)

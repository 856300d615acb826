"""Whole weights out of a sharded model: `full_tensors`, and `publish` to an inference engine."""

from shardwise.weights.broadcast import Broadcast, Receiver
from shardwise.weights.directory import Directory, Published, SharedMemory, read_published
from shardwise.weights.updates import Manifest, Target, TensorInfo, Update

__all__ = [
    "Broadcast",
    "Directory",
    "Manifest",
    "Published",
    "Receiver",
    "SharedMemory",
    "Target",
    "TensorInfo",
    "Update",
    "read_published",
]

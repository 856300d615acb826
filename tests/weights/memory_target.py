"""A target of `sw.publish` in the memory of this process."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shardwise import weights

__all__ = ["MemoryTarget"]


@dataclass(eq=False)
class MemoryTarget:
    """Keeps the tensors of the last version, and counts the bytes it was sent."""

    accepts_runs: bool = True
    version: int = 0
    num_bytes: int = 0  # of the last version that began
    tensors: dict[str, Tensor] = field(default_factory=dict)
    fails: bool = False

    def begin(self, manifest: weights.Manifest) -> None:
        assert manifest.base in (None, self.version)
        self.manifest, self.num_bytes = manifest, 0
        self._pending: list[weights.Update] = []

    def send(self, bucket: Sequence[weights.Update]) -> None:
        if self.fails:
            raise OSError(28, "No space left on device", "memory")
        for update in bucket:
            assert self.accepts_runs or update.starts is None
            self.num_bytes += update.num_bytes
            self._pending.append(update.to("cpu"))

    def commit(self, version: int) -> None:
        for update in self._pending:
            if update.starts is None:
                self.tensors[update.name] = update.values.clone()
            update.apply_(self.tensors[update.name])
        self.version = version

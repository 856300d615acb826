"""vLLM's weight transfer, fed from a sharded model.

vLLM documents two seams (https://docs.vllm.ai/en/latest/training/weight_transfer/). A dense engine
of the trainer pulls weights from a `WeightSource`; a sparse engine of the workers applies patches
(flat int32 indices and values) that the trainer broadcasts while a client tells the workers what
comes. Neither class needs vLLM to be installed in the trainer.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shardwise.weights.full_tensors import BUCKET_BYTES, Adapters, full_tensors, outputs_of
from shardwise.weights.updates import Manifest, Update, indices_of

__all__ = ["SparseWeights", "WeightSource"]


class ParameterMetadata(NamedTuple):
    """The fields of vLLM's ``ParamMeta``. Every rank takes part in the gather of every weight."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: None = None
    mesh_shape: None = None
    placements: None = None


class WeightSource:
    """A ``WeightSource`` of vLLM 0.33: whole weights under checkpoint names, bucket by bucket.

    Pass it as ``source=`` to ``WeightTransferTrainerFactory.trainer_init`` on every trainer rank,
    and call the engine's ``send_weights()`` on every rank, between steps.

    Args:
        model: sharded by `fully_shard`.
        to: as in `full_tensors`; the engine sends from rank 0. Engines that export the memory of
            every rank, such as CUDA IPC, need ``"all"``.
        dtype, names, adapters, bucket_bytes: as in `full_tensors`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        to: int | Literal["all"] = 0,
        dtype: torch.dtype | None = None,
        names: Sequence[str] | None = None,
        adapters: Adapters = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._model = model
        self._to = to
        self._bucket_bytes = bucket_bytes
        self._selected: dict[str, Any] = {"dtype": dtype, "names": names, "adapters": adapters}

    @cached_property
    def metadata(self) -> list[ParameterMetadata]:
        """Name, dtype and shape of each weight; gathers nothing."""
        return [
            ParameterMetadata(one.name, one.info.dtype, one.info.shape)
            for one in outputs_of(self._model, **self._selected)
        ]

    def owned_names(self, rank: int) -> list[str]:  # noqa: ARG002 - all are the same
        """The names of the weights that a rank takes part in gathering: all."""
        return [one.name for one in self.metadata]

    def implements_iter_full(self) -> bool:
        """Engines that send whole weights can use this source."""
        return True

    def implements_iter_local(self) -> bool:
        """Engines that send each rank's part cannot."""
        return False

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """Gather the weights; every rank must iterate."""
        limits: dict[str, Any] = {"bucket_bytes": self._bucket_bytes, "to": self._to}
        return full_tensors(self._model, **limits, **self._selected)


class WeightSyncClient(Protocol):
    """The methods of vLLM's ``VLLMWeightSyncClient`` that are used."""

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self) -> None: ...


class SparseWeights:
    """A target of `publish` that sends changed elements to vLLM's sparse engine.

    The workers' engine was initialized with this process as rank 0. Its parameters have the names
    and shapes of the checkpoint (vLLM requires this of sparse updates, and one worker), and the
    values of ``version``, which the first publication replaces.

    Args:
        client: tells the workers what comes; its ``update_weights`` returns when they have it.
        broadcast: sends a tensor to the workers, as in
            ``lambda tensor: group.broadcast(tensor, src=0, stream=torch.cuda.current_stream())``.
    """

    accepts_runs = True

    def __init__(self, client: WeightSyncClient, broadcast: Callable[[Tensor], object]) -> None:
        self.version = 0
        self._client = client
        self._broadcast = broadcast

    def begin(self, manifest: Manifest) -> None:
        self._shapes = {name: list(info.shape) for name, info in manifest.tensors.items()}
        self._client.start_weight_update()

    def send(self, bucket: Sequence[Update]) -> None:
        patches = [(one, _indices_of(one)) for one in bucket]
        information = {
            "names": [one.name for one in bucket],
            "dtype_names": [str(one.values.dtype).removeprefix("torch.") for one in bucket],
            "shapes": [self._shapes[one.name] for one in bucket],
            "num_updates_list": [len(indices) for _, indices in patches],
        }
        thread = ThreadPoolExecutor(max_workers=1)
        told = thread.submit(self._client.update_weights, information)
        thread.shutdown(wait=False)  # the workers receive while they are told
        for one, indices in patches:
            self._broadcast(indices)
            self._broadcast(one.values.reshape(-1))
        told.result()

    def commit(self, version: int) -> None:
        self._client.finish_weight_update()
        self.version = version


def _indices_of(update: Update) -> Tensor:
    if update.starts is None or update.lengths is None:
        count = update.values.numel()
        return torch.arange(count, dtype=torch.int32, device=update.values.device)
    return indices_of(update.starts, update.lengths).to(torch.int32)

"""`publish`: send a new version of a model's weights to receivers."""

import json
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.collect import check_kinds
from shardwise.checkpoint.coordination import Coordinator, coordinator_of, warning_of_absent_ranks
from shardwise.checkpoint.format import in_groups
from shardwise.checkpoint.slices import coordinates_of, part_of_whole
from shardwise.tensor.sharded_tensor import ShardedTensor
from shardwise.tensor.sharding import local_of
from shardwise.weights.directory import Directory
from shardwise.weights.full_tensors import BUCKET_BYTES, Adapters, describe, outputs_of, ranks_of
from shardwise.weights.gather import Output, Ranks, Source, gather_buckets, group_of
from shardwise.weights.updates import (
    BITS,
    Manifest,
    Target,
    Update,
    identity_of,
    runs_of,
    starts_dtype,
)

__all__ = ["publish"]


# -- changes since a version -----------------------------------------------------------------------


_ALIGNMENT = 8  # bytes, in messages
_PIECE = 1 << 18  # elements


@dataclass
class Baseline:
    """What a target has: its version, and this rank's part of each tensor in host memory."""

    version: int
    settings: object
    identity: str = ""  # of the version in the target, on the first rank
    values: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # by output and source

    def update(self, outputs: Sequence[Output], ranks: Ranks) -> None:
        """Copy this rank's parts of ``outputs``."""
        for output in outputs:
            for number, source in enumerate(output.sources):
                current = _own_elements(source, ranks)
                if current is None:
                    continue
                key = output.name, number
                if key not in self.values:
                    self.values[key] = torch.empty(current.shape, dtype=source.dtype, device="cpu")
                self.values[key].copy_(current)

    def changed(self, output: Output, number: int, ranks: Ranks) -> tuple[Tensor, Tensor] | None:
        """Indices [n] into this rank's part of a source, and the values [n] there.

        None if the part does not go to the receiver.
        """
        source = output.sources[number]
        current = _own_elements(source, ranks)
        if current is None:
            return None
        current = current.to(source.dtype)
        sent = self.values[output.name, number].to(current.device, non_blocking=True)
        indices = _differences(current, sent)
        return indices, current[indices]


@dataclass(frozen=True)
class Counts:
    """How many elements of an output have changed, and in how many runs, by rank."""

    elements: Sequence[int]
    runs: Sequence[int]

    def num_bytes(self, output: Output) -> int:
        """The size of the update as runs."""
        [source] = output.sources
        starts = starts_dtype(source.tensor.numel()).itemsize
        return sum(self.runs) * (starts + 1) + sum(self.elements) * source.dtype.itemsize


def count_changes(
    baseline: Baseline, outputs: Sequence[Output], ranks: Ranks, coordinator: Coordinator
) -> list[Counts]:
    """Count the changes of each output on all ranks; every rank must call this."""
    if not outputs:
        return []
    own = torch.zeros(2, len(outputs), dtype=torch.int64)
    for column, output in enumerate(outputs):
        for number, source in enumerate(output.sources):
            found = baseline.changed(output, number, ranks)
            if found is not None and len(found[0]):
                starts, _ = runs_of(_positions(source.tensor, found[0]), source.tensor.numel())
                own[:, column] += torch.tensor([len(found[0]), len(starts)])
    encoded = coordinator.all_gather(own.numpy().tobytes())
    every = torch.stack([torch.frombuffer(bytearray(one), dtype=torch.int64) for one in encoded])
    by_output = every.view(-1, 2, len(outputs)).permute(2, 1, 0).tolist()
    return [Counts(elements, runs) for elements, runs in by_output]


def gather_runs(
    baseline: Baseline, counts: Mapping[str, Counts], outputs: Sequence[Output], ranks: Ranks
) -> list[Update]:
    """Gather the changes of ``outputs`` on the receiver; every rank must call this."""
    messages = [torch.empty(0, dtype=torch.uint8, device=ranks.device)]
    for output in outputs:
        found = baseline.changed(output, 0, ranks)
        if found is not None and len(found[0]):
            tensor = output.sources[0].tensor
            starts, lengths = runs_of(_positions(tensor, found[0]), tensor.numel())
            messages += [_padded(part.to(ranks.device)) for part in (starts, lengths, found[1])]
    own = torch.cat(messages)
    received: dict[int, Tensor] = {ranks.own: own}
    pairs = {}
    nothing = torch.zeros(1, dtype=torch.uint8, device=ranks.device)
    for number, rank in enumerate(ranks.members):
        sections = [_section_bytes(one, counts[one.name], number) for one in outputs]
        num_bytes = sum(map(sum, sections))
        if not num_bytes or rank == ranks.to or ranks.own not in (rank, ranks.to):
            continue
        if ranks.is_receiver:
            received[rank] = torch.empty(num_bytes, dtype=torch.uint8, device=ranks.device)
            pairs[number] = nothing, received[rank]
        else:
            assert isinstance(ranks.to, int)
            assert len(own) == num_bytes, "counted before"
            pairs[ranks.number_of(ranks.to)] = own, nothing.clone()
    ranks.comm.wait(ranks.comm.gather.exchange(pairs, "gather changes of publish"))
    if not ranks.is_receiver:
        return []
    parts: dict[str, list[list[Tensor]]] = {output.name: [] for output in outputs}
    for rank, message in received.items():
        found_parts = _decode(message, outputs, counts, ranks.number_of(rank))
        for name, sections_of in found_parts:
            parts[name].append(sections_of)
    return [_update(output, parts[output.name]) for output in outputs]


def _differences(one: Tensor, other: Tensor) -> Tensor:
    """The indices of elements [n] with different bits.

    In pieces that stay in the processor's cache, a CPU is up to twice as fast.
    """
    kind, size = BITS[one.dtype.itemsize], _PIECE if one.device.type == "cpu" else max(1, len(one))
    pieces = zip(
        torch.split(one.view(kind), size), torch.split(other.view(kind), size), strict=True
    )
    found = [torch.ne(a, b).nonzero().view(-1).add_(n * size) for n, (a, b) in enumerate(pieces)]
    return torch.cat(found)


def _own_elements(source: Source, ranks: Ranks) -> Tensor | None:
    """This rank's part of a tensor [n]; None if another rank's part goes to the receiver."""
    tensor = source.tensor
    group = group_of(tensor, ranks)
    if ranks.to not in group or ranks.own not in group:
        return None
    return local_of(tensor).detach().reshape(-1)


def _positions(tensor: Tensor, indices: Tensor) -> Tensor:
    """Where ``indices`` [n] into this rank's part are in the row-major whole tensor; ascending."""
    if isinstance(tensor, ShardedTensor):
        return indices + tensor.sharding.run.start
    if not isinstance(tensor, DTensor):
        return indices
    whole = torch.empty(tensor.shape, device="meta")
    view = part_of_whole(whole, tensor, coordinates_of(tensor.device_mesh))
    positions = torch.full_like(indices, int(view.storage_offset()))
    for size, stride in zip(view.shape[::-1], view.stride()[::-1], strict=True):
        positions += indices % size * stride
        indices = indices // size
    return positions


def _section_bytes(output: Output, counts: Counts, number: int) -> tuple[int, int, int]:
    source = output.sources[0]
    runs, elements = counts.runs[number], counts.elements[number]
    starts = runs * starts_dtype(source.tensor.numel()).itemsize
    sizes = (starts, runs, elements * source.dtype.itemsize)
    return tuple(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)  # type: ignore[return-value]


def _padded(part: Tensor) -> Tensor:
    content = part.contiguous().view(torch.uint8)
    return torch.nn.functional.pad(content, (0, -len(content) % _ALIGNMENT))


def _decode(
    message: Tensor, outputs: Sequence[Output], counts: Mapping[str, Counts], number: int
) -> Iterator[tuple[str, list[Tensor]]]:
    for output in outputs:
        source, count = output.sources[0], counts[output.name]
        kinds = starts_dtype(source.tensor.numel()), torch.uint8, source.dtype
        lengths = count.runs[number], count.runs[number], count.elements[number]
        sections = []
        for size, kind, length in zip(
            _section_bytes(output, count, number), kinds, lengths, strict=True
        ):
            sections.append(message[:size].view(kind)[:length])
            message = message[size:]
        yield output.name, sections


def _update(output: Output, parts: Sequence[Sequence[Tensor]]) -> Update:
    starts, lengths, values = (torch.cat(same) for same in zip(*parts, strict=True))
    return Update(output.name, values, starts, lengths)


# -- versions --------------------------------------------------------------------------------------

# What targets have, by model and target. It is taken out while a version is published, so after an
# error the next version is sent whole.
_baselines: "weakref.WeakKeyDictionary[nn.Module, dict[object, Baseline]]" = (
    weakref.WeakKeyDictionary()
)


def publish(
    model: nn.Module,
    target: str | os.PathLike[str] | Target,
    *,
    only_changed: bool = True,
    dtype: torch.dtype | None = None,
    names: Sequence[str] | None = None,
    adapters: Adapters = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> int:
    """Send a new version of the weights to ``target``; every rank must call this between steps.

    The first of the model's ranks gathers the tensors of `full_tensors`, bucket by bucket, and
    hands them to the target. The receivers get all of a version or nothing of it, and have the
    version when this returns.

    Args:
        model: sharded by `fully_shard`, or not sharded.
        target: a directory, where each tensor becomes a safetensors file, with the index that
            Hugging Face's libraries read; or a `shardwise.weights.SharedMemory`,
            `shardwise.weights.Broadcast`, or another object with the methods of
            `shardwise.weights.Target`. Pass the same object each time.
        only_changed: after the first version, send only the tensors that have changed, and of these
            only the changed elements if the target accepts them. Each rank keeps a copy of its part
            of the weights in host memory, in ``dtype``. False sends everything and keeps nothing.
        dtype: as in `full_tensors`.
        names: as in `full_tensors`.
        adapters: as in `full_tensors`.
        bucket_bytes: as in `full_tensors`; the memory is needed on the first rank.

    Returns:
        The number of the version, larger than that of the last one.

    Raises:
        CheckpointError: on every rank: a parameter is gathered or cannot be sent, or the target
            failed. The receivers keep the last version; the next one is sent whole.
        PlanError: an argument is invalid.
        StepError: another rank raised, or is lost.
    """
    check_kinds("publish", model, None)
    ranks = ranks_of(model, "first")
    target = Directory(Path(target)) if isinstance(target, str | os.PathLike) else target
    outputs = outputs_of(model, dtype, names, adapters)
    described = describe(outputs)
    settings = described, dtype, adapters
    known = _baselines.setdefault(model, {})
    baseline = known.pop(target, None)
    if baseline is not None and (not only_changed or baseline.settings != settings):
        baseline = None
    with warning_of_absent_ranks(ranks.mesh, "sw.publish"):
        coordinator = coordinator_of(ranks.mesh, model)
        action = f"publish {settings} by {bucket_bytes} bytes after {baseline and baseline.version}"
        coordinator.agree(ranks.mesh, ranks.device, action)
    publication = _Publication(target, outputs, ranks, coordinator, bucket_bytes)
    version, sent = publication.run(baseline)
    if only_changed:
        baseline = baseline or Baseline(version, settings)
        baseline.version = version
        if ranks.is_receiver:
            baseline.identity = identity_of(target)
        baseline.update(sent, ranks)
        known[target] = baseline
    return version


class _Publication:
    """One version on its way to a target, which only the first rank uses."""

    def __init__(
        self,
        target: Target,
        outputs: Sequence[Output],
        ranks: Ranks,
        coordinator: Coordinator,
        bucket_bytes: int,
    ) -> None:
        self._target = target
        self._outputs = outputs
        self._ranks = ranks
        self._coordinator = coordinator
        self._bucket_bytes = bucket_bytes
        self._error: Exception | None = None  # of the target

    def run(self, baseline: Baseline | None) -> tuple[int, list[Output]]:
        """Publish what has changed since ``baseline``; return the version and what was sent."""
        last, accepts_runs, is_known = self._describe_target(baseline)
        if not is_known:
            baseline = None  # somebody else has written there, or it was deleted
        whole, in_runs = list(self._outputs), dict[str, Counts]()
        if baseline is not None:
            counts = count_changes(baseline, self._outputs, self._ranks, self._coordinator)
            changed = [(o, c) for o, c in zip(whole, counts, strict=True) if any(c.elements)]
            in_runs = {o.name: c for o, c in changed if accepts_runs and _is_smaller(o, c)}
            whole = [o for o, _ in changed if o.name not in in_runs]
        version, base = last + 1, None if baseline is None else last
        manifest = Manifest(version, base, {one.name: one.info for one in self._outputs})
        with self._coordinator.raises_together("begin a version"):
            if self._ranks.is_receiver:
                self._target.begin(manifest)
        for bucket in gather_buckets(whole, self._ranks, self._bucket_bytes):
            self._send([Update(name, tensor) for name, tensor in bucket])
        patched = [output for output in self._outputs if output.name in in_runs]
        if baseline is not None:
            most = self._bucket_bytes // 2  # which are received, and then joined
            for group in in_groups(patched, lambda one: in_runs[one.name].num_bytes(one), most):
                self._send(gather_runs(baseline, in_runs, group, self._ranks))
        with self._coordinator.raises_together("publish a version"):
            if self._error is not None:
                raise self._error
            if self._ranks.is_receiver:
                self._target.commit(version)
        return version, [*whole, *patched]

    def _describe_target(self, baseline: Baseline | None) -> tuple[int, bool, bool]:
        """The target's last version, whether it accepts runs, and has what was sent last."""
        described = b""
        with self._coordinator.raises_together("read the last version"):
            if self._ranks.is_receiver:
                version = self._target.version
                is_known = baseline is not None and (
                    (baseline.version, baseline.identity) == (version, identity_of(self._target))
                )
                about = version, self._target.accepts_runs, is_known
                described = json.dumps(about).encode()
        last, accepts_runs, is_known = json.loads(self._coordinator.all_gather(described)[0])
        return last, accepts_runs, is_known

    def _send(self, bucket: Sequence[Update]) -> None:
        """Hand a bucket to the target, on the first rank. After an error, the rest is dropped."""
        if self._error is None and bucket:
            try:
                self._target.send(bucket)
            except Exception as error:  # noqa: BLE001 - raised on all ranks at the end
                self._error = error


def _is_smaller(output: Output, counts: Counts) -> bool:
    """Whether runs take less than the whole tensor; what is made of several has no runs."""
    return output.made is None and counts.num_bytes(output) < output.sources[0].num_bytes

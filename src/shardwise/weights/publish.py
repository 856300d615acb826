"""`publish`: send a new version of a model's weights to receivers."""

import json
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from shardwise.checkpoint.collect import check_kinds
from shardwise.checkpoint.coordination import Coordinator, coordinated
from shardwise.checkpoint.format import in_groups
from shardwise.weights.changes import Baseline, Counts, count_changes, gather_runs
from shardwise.weights.directory import Directory
from shardwise.weights.full_tensors import BUCKET_BYTES, Adapters, describe, outputs_of, ranks_of
from shardwise.weights.gather import Output, Ranks, gather_buckets
from shardwise.weights.updates import Manifest, Target, Update, identity_of

__all__ = ["publish"]

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
            of the weights in host memory, in ``dtype``: for the last directory, and for each other
            target. False sends everything and keeps nothing.
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
    if type(target) is Directory:  # of these, only the last one: each version may have its own
        for other in [one for one in known if type(one) is Directory]:
            del known[other]
    if baseline is not None and (not only_changed or baseline.settings != settings):
        baseline = None
    action = f"publish {settings} by {bucket_bytes} bytes after {baseline and baseline.version}"
    with coordinated(
        ranks.mesh, model, ranks.device, "sw.publish", action, queue="publish"
    ) as coordinator:
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


@dataclass
class _Publication:
    """One version on its way to a target, which only the first rank uses."""

    target: Target
    outputs: Sequence[Output]
    ranks: Ranks
    coordinator: Coordinator
    bucket_bytes: int
    error: Exception | None = None  # of the target

    def run(self, baseline: Baseline | None) -> tuple[int, list[Output]]:
        """Publish what has changed since ``baseline``; return the version and what was sent."""
        last, accepts_runs, is_known = self._describe_target(baseline)
        if not is_known:
            baseline = None  # somebody else has written there, or it was deleted
        whole, in_runs = list(self.outputs), dict[str, Counts]()
        if baseline is not None:
            counts = count_changes(baseline, self.outputs, self.ranks, self.coordinator)
            changed = [(o, c) for o, c in zip(whole, counts, strict=True) if any(c.elements)]
            in_runs = {o.name: c for o, c in changed if accepts_runs and _is_smaller(o, c)}
            whole = [o for o, _ in changed if o.name not in in_runs]
        version, base = last + 1, None if baseline is None else last
        manifest = Manifest(version, base, {one.name: one.info for one in self.outputs})
        with self.coordinator.raises_together("begin a version"):
            if self.ranks.is_receiver:
                self.target.begin(manifest)
        for bucket in gather_buckets(whole, self.ranks, self.bucket_bytes):
            self._send([Update(name, tensor) for name, tensor in bucket])
        patched = [output for output in self.outputs if output.name in in_runs]
        if baseline is not None:
            most = self.bucket_bytes // 2  # which are received, and then joined
            for group in in_groups(patched, lambda one: in_runs[one.name].num_bytes(one), most):
                self._send(gather_runs(baseline, in_runs, group, self.ranks))
        with self.coordinator.raises_together("publish a version"):
            if self.error is not None:
                raise self.error
            if self.ranks.is_receiver:
                self.target.commit(version)
        return version, [*whole, *patched]

    def _describe_target(self, baseline: Baseline | None) -> tuple[int, bool, bool]:
        """The target's last version, whether it accepts runs, and has what was sent last."""
        described = b""
        with self.coordinator.raises_together("read the last version"):
            if self.ranks.is_receiver:
                version = self.target.version
                is_known = baseline is not None and (
                    (baseline.version, baseline.identity) == (version, identity_of(self.target))
                )
                about = version, self.target.accepts_runs, is_known
                described = json.dumps(about).encode()
        last, accepts_runs, is_known = json.loads(self.coordinator.all_gather(described)[0])
        return last, accepts_runs, is_known

    def _send(self, bucket: Sequence[Update]) -> None:
        """Hand a bucket to the target, on the first rank. After an error, the rest is dropped."""
        if self.error is None and bucket:
            try:
                self.target.send(bucket)
            except Exception as error:  # noqa: BLE001 - raised on all ranks at the end
                self.error = error


def _is_smaller(output: Output, counts: Counts) -> bool:
    """Whether runs take less than the whole tensor; what is made of several has no runs."""
    return output.made is None and counts.num_bytes(output) < output.sources[0].num_bytes

"""Verifies a built-in model."""

from typing import Any

import shardwise as sw
from shardwise.cli.run_verify import BUILT_IN
from shardwise.verification.subjects import find_subjects


def judge(model: str, **options: Any) -> sw.Verification:
    """Run `sw.verify` on the built-in ``model``, without output."""
    [subject] = find_subjects(model, BUILT_IN)
    return sw.verify(
        subject.model_fn,
        subject.batch_fn,
        loss_fn=subject.loss_fn,
        units=subject.units,
        quiet=True,
        **options,
    )

"""Arguments of `fully_shard` that are checked before anything is planned."""

from typing import Any

import pytest
from torch import nn

import shardwise as sw


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unused": "nones"}, r"unused='nones': expected one of none, .*; did you mean 'none'\?"),
        ({"on_different_values": "warning"}, "on_different_values='warning': .*'warn'"),
        ({"communicators": "one"}, "communicators='one': expected one of separate, shared"),
        ({"on_different_values": True}, "on_different_values=True: expected one of error, warn$"),
    ],
)
def test_unknown_words_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(sw.PlanError, match=message):
        sw.fully_shard(nn.Linear(2, 2), **options)

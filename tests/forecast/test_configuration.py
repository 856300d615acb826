"""Tests of `Configuration`: its mesh and its errors."""

import pytest

from shardwise.errors import PlanError
from shardwise.forecast.adapters import Adapters
from shardwise.forecast.configuration import Configuration


def test_mesh() -> None:
    configuration = Configuration(
        shard_size=8, replicas=4, tensor=2, pipeline=3, context=5, micro_batch=2, accumulation=7
    )
    assert configuration.data_parallel == 32
    assert configuration.shard_ranks == 40
    assert configuration.world_size == 32 * 2 * 3 * 5
    assert configuration.global_batch == 2 * 7 * 32
    assert configuration.tokens_per_step == configuration.global_batch * 2048


ON_DEVICE = {"offload": "optimizer", "offload_step": "device"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor": 0}, r"tensor=0: expected an integer of 1 or more"),
        ({"micro_batch": 1.5}, r"micro_batch=1.5: expected an integer"),
        ({"prefetch": -1}, r"prefetch=-1: expected an integer of 0 or more"),
        ({"strategy": "fsdq"}, r"strategy='fsdq'.*did you mean 'fsdp'"),
        ({"optimizer": "adamv"}, r"optimizer='adamv'.*did you mean 'adam'"),
        ({"checkpointing": ("none", "ful")}, r"checkpointing='ful'.*did you mean 'full'"),
        ({"chunks": 2}, r"chunks=2: expected pipeline to be 2 or more"),
        ({"shard_size": 4, "expert": 3}, r"expert=3: expected a divisor of the 4"),
        ({"offload_step": "device"}, r"offload_step='device' without offload"),
        (ON_DEVICE | {"optimizer": "muon"}, r"muon works on whole matrices"),
        (
            {"float8": "rowwise", "adapters": Adapters(quantized=True)},
            r"float8='rowwise': products",
        ),
        (ON_DEVICE | {"tensor": 2}, r"offload_step='device' with tensor=2"),
    ],
)
def test_invalid_settings_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Configuration(**options)  # type: ignore[arg-type]

"""The optimizer's step on the device, with shards and states in host memory."""

import pytest

from tests.ranks import on_ranks
from tests.streams.checker import check_ranks
from tests.streams.programs import Program, digest_of_training

PROGRAMS = {
    "fsdp": Program("stack", offload="device", steps=4),
    "in backward": Program("stack", offload="device", steps=4, steps_in_backward=True),
    "clipped, accumulated": Program("gpt", offload="device", steps=4, clip=0.5, accumulate=2),
    "hsdp": Program("stack", strategy="hsdp", offload="device", steps=4),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_race_and_the_host_never_waits(name: str) -> None:
    program = PROGRAMS[name]
    for verdict in check_ranks(program, 4, of=(0, 3)):
        assert not verdict.found, "\n".join(map(str, verdict.found[:5]))


@on_ranks(4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_late_streams_change_no_bit(name: str) -> None:
    program = PROGRAMS[name]
    plain = Program(**{**vars(program), "offload": None})
    assert digest_of_training(program, is_late=True) == digest_of_training(plain, is_late=True)

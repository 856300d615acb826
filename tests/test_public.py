"""What ``import shardwise`` offers."""

import shardwise as sw
from shardwise import public


def test_at_most_25_names_are_in_all_and_each_is_there() -> None:
    assert len(sw.__all__) <= 25
    assert sw.__all__ == sorted(sw.__all__)
    for name in sw.__all__:
        assert getattr(sw, name) is getattr(public, name)


def test_dir_has_all_public_names() -> None:
    assert {*public.__all__, "__version__"} <= set(dir(sw))


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(sw, "fuly_shard")

"""The text, its two parts, and an order that no number of ranks can change."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.train.config import DataConfig
from shardwise.train.data import Sampler, read_corpus

TEXT = np.random.default_rng(0).integers(0, 256, size=5000, dtype=np.uint8)


def sampler(*, seed: int = 0, global_batch: int = 24, context: int = 16) -> Sampler:
    return Sampler(TEXT, context, global_batch, seed)


@given(step=st.integers(1, 10**6), seed=st.integers(0, 2**63 - 1))
def test_the_global_batch_is_the_same_on_any_number_of_ranks(step: int, seed: int) -> None:
    whole = sampler(seed=seed).share(step, rank=0, num_ranks=1)
    for num_ranks in (2, 3, 4, 8):
        shares = [
            sampler(seed=seed).share(step, rank=rank, num_ranks=num_ranks)
            for rank in range(num_ranks)
        ]
        assert torch.equal(torch.cat(shares), whole)


def test_a_sequence_is_a_run_of_the_text() -> None:
    text = bytes(TEXT)
    for sequence in sampler().share(3, rank=0, num_ranks=1):
        assert bytes(sequence.tolist()) in text


def test_the_first_and_the_last_sequence_can_be_drawn() -> None:
    short = Sampler(TEXT[:18], context=16, global_batch=64, seed=0)
    assert set(short.draw(0).tolist()) == {0, 1}
    assert short.share(0, rank=0, num_ranks=1).shape == (64, 17)


def test_steps_and_seeds_differ() -> None:
    drawn = [sampler(seed=seed).draw(step).tolist() for seed in (0, 1) for step in (1, 2)]
    assert len({tuple(starts) for starts in drawn}) == 4


def test_the_order_is_the_same_on_every_machine_and_tomorrow() -> None:
    drawn = b"".join(sampler().draw(step).tobytes() for step in range(10))
    assert hashlib.sha256(drawn).hexdigest()[:16] == "23d6fd4fc5c0ee35"


def test_the_standard_library_is_there() -> None:
    corpus = read_corpus(DataConfig())
    assert corpus.num_files > 300
    assert b"def " in bytes(corpus.train)
    share = len(corpus.validation) / (len(corpus.train) + len(corpus.validation))
    assert 0.04 < share <= 0.0501
    corpus.check_holds(1024)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for number in range(40):
        folder = tmp_path / f"part{number % 3}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.py").write_text(f"<{number}>" * 50, encoding="utf-8")
    (tmp_path / "notes.txt").write_text("notes " * 100, encoding="utf-8")
    return tmp_path


def test_a_directory_is_split_by_whole_files(directory: Path) -> None:
    corpus = read_corpus(DataConfig(path=str(directory), validation_share=0.2))
    held_out = {n for n in range(40) if f"<{n}>".encode() in bytes(corpus.validation)}
    trained = {n for n in range(40) if f"<{n}>".encode() in bytes(corpus.train)}
    assert corpus.num_files == 40
    assert len(held_out) == 8
    assert held_out | trained == set(range(40))
    assert not held_out & trained


def test_the_split_does_not_hang_on_where_the_directory_is(directory: Path) -> None:
    before = read_corpus(DataConfig(path=str(directory)))
    moved = directory.rename(directory.parent / "moved")
    after = read_corpus(DataConfig(path=str(moved)))
    assert np.array_equal(before.train, after.train)
    assert np.array_equal(before.validation, after.validation)


def test_the_glob_chooses_files(directory: Path) -> None:
    corpus = read_corpus(DataConfig(path=str(directory), glob="*.txt", validation_share=0.1))
    assert bytes(corpus.train) + bytes(corpus.validation) == b"notes " * 100


def test_a_single_file_gives_its_end(directory: Path) -> None:
    path = directory / "notes.txt"
    corpus = read_corpus(DataConfig(path=str(path), validation_share=0.1))
    assert (len(corpus.train), len(corpus.validation)) == (540, 60)
    assert bytes(corpus.train) + bytes(corpus.validation) == path.read_bytes()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"path": "/no/such/place"}, "no such file or directory"),
        ({"path": "{directory}", "glob": "**/*.rs"}, "no file matches"),
        ({"path": "{directory}", "glob": "/etc/*"}, "data.glob"),
    ],
)
def test_a_text_that_is_not_there(directory: Path, data: dict[str, str], message: str) -> None:
    config = DataConfig.model_validate(
        {key: value.format(directory=directory) for key, value in data.items()}
    )
    with pytest.raises(ConfigError, match=message):
        read_corpus(config)


def test_a_text_that_is_too_short(directory: Path) -> None:
    corpus = read_corpus(DataConfig(path=str(directory / "notes.txt"), validation_share=0.1))
    corpus.check_holds(59)
    with pytest.raises(ConfigError, match=r"leaves 60 bytes .* needs at least 61"):
        corpus.check_holds(60)

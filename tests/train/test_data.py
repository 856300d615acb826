"""Text and its split; the order of the data does not depend on the number of ranks."""

import hashlib
import itertools
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from shardwise.errors import ConfigError
from shardwise.train.config import Config
from shardwise.train.data import IGNORED, Batch, Corpus, Sequences, open_corpus as open_corpus_of
from shardwise.train.text import Text

VALUES = np.random.default_rng(0).integers(0, 256, size=5000, dtype=np.uint8)
CUTS = (0, 1, 700, 700, 2500, 4990, 5000)  # boundaries of the files, one of which is empty

MakeText = Callable[..., Text]


@pytest.fixture(scope="module")
def make_text(tmp_path_factory: pytest.TempPathFactory) -> MakeText:
    """Write values to files and open them as a text."""

    def make(values: NDArray[np.uint8], cuts: tuple[int, ...] = (0, 10**9)) -> Text:
        folder = tmp_path_factory.mktemp("text")
        paths: list[Path] = []
        for start, end in itertools.pairwise(cuts):
            paths.append(folder / str(len(paths)))
            values[start:end].tofile(paths[-1])
        return Text(paths)

    return make


@pytest.fixture(scope="module")
def text(make_text: MakeText) -> Text:
    return make_text(VALUES, CUTS)


def open_corpus(**data: object) -> Corpus:
    return open_corpus_of(Config.model_validate({"data": data}))


def content(text: object) -> bytes:
    assert isinstance(text, Text)
    return text.read(0, len(text)).tobytes()


def tokens(batch: Batch) -> torch.Tensor:
    """The sequences, and the byte after each."""
    assert batch.positions is None
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    return torch.cat([batch.inputs, batch.targets[:, -1:]], dim=1)


def sequences(text: Text, *, seed: int = 0, rank: int = 0, world_size: int = 1) -> Sequences:
    return Sequences(
        text=text, context=16, global_batch=24, seed=seed, rank=rank, world_size=world_size
    )


@given(start=st.integers(0, 5000), size=st.integers(0, 5000))
def test_reads_cross_files(text: Text, start: int, size: int) -> None:
    size = min(size, 5000 - start)
    assert text.read(start, size).tobytes() == VALUES[start : start + size].tobytes()


@given(at=st.integers(0, 5000))
def test_a_text_is_split_anywhere(text: Text, at: int) -> None:
    first, second = text.split(at)
    assert (len(first), len(second)) == (at, 5000 - at)
    both = first.read(0, at).tobytes() + second.read(0, 5000 - at).tobytes()
    assert both == VALUES.tobytes()


def test_a_file_that_becomes_shorter_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"not short")
    text = Text([path])
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="text has changed during the run"):
        text.read(3, 5)


@given(step=st.integers(1, 10**6), seed=st.integers(0, 2**63 - 1))
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(
    text: Text, step: int, seed: int
) -> None:
    whole = tokens(sequences(text, seed=seed)[step])
    for world_size in (2, 3, 4, 8):
        parts = [
            tokens(sequences(text, seed=seed, rank=rank, world_size=world_size)[step])
            for rank in range(world_size)
        ]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_and_workers_do_not_change_the_order(text: Text, workers: int) -> None:
    reference = [tokens(sequences(text)[step]) for step in range(1, 9)]
    loaded = list(map(tokens, sequences(text).loader(range(1, 9), workers, pin_memory=False)))
    resumed = list(map(tokens, sequences(text).loader(range(4, 9), workers, pin_memory=False)))
    assert torch.equal(torch.stack(loaded), torch.stack(reference))
    assert torch.equal(torch.stack(resumed), torch.stack(reference[3:]))


def test_a_signal_to_all_processes_does_not_end_the_workers(text: Text) -> None:
    """They may have batches of the steps before the checkpoint of a stopped run."""
    before = {*multiprocessing.active_children()}
    batches = iter(sequences(text).loader(range(1, 20), 1, pin_memory=False))
    next(batches)
    [worker] = {*multiprocessing.active_children()} - before
    worker.terminate()
    assert len(list(batches)) == 18


def test_loading_draws_nothing_from_the_default_generator(text: Text) -> None:
    before = torch.get_rng_state()
    list(sequences(text).loader(range(1, 3), 0, pin_memory=False))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("length", [18, 33, 34, 1000, 24 * 16 + 1, 24 * 16 + 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_each_byte_is_a_target_once(make_text: MakeText, length: int, world_size: int) -> None:
    """Also of the last batch, which is not full."""
    parts = [
        sequences(make_text(VALUES[:length]), rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    whole: list[torch.Tensor] = []
    for number in range(parts[0].num_batches):
        batches = [part.in_order(number) for part in parts]
        assert {len(batch.inputs) for batch in batches} == {24 // world_size}
        for batch in batches:
            counts = batch.targets != IGNORED
            assert torch.equal(
                batch.targets[:, :-1].where(counts[:, :-1], batch.inputs[:, 1:]),
                batch.inputs[:, 1:],
            )
            whole.append(batch.targets[counts])
    assert bytes(torch.cat(whole).tolist()) == VALUES[1:length].tobytes()


def test_a_sequence_is_a_part_of_the_text(text: Text) -> None:
    for sequence in tokens(sequences(text)[3]):
        assert bytes(sequence.tolist()) in VALUES.tobytes()


def test_the_first_and_the_last_sequence_can_be_drawn(make_text: MakeText) -> None:
    short = Sequences(text=make_text(VALUES[:18]), context=16, global_batch=64, seed=0)
    assert set(short.draw(0).tolist()) == {0, 1}
    assert tokens(short[0]).shape == (64, 17)


def test_steps_and_seeds_differ(text: Text) -> None:
    drawn = [sequences(text, seed=seed).draw(step).tolist() for seed in (0, 1) for step in (1, 2)]
    assert len({tuple(starts) for starts in drawn}) == 4


def test_the_order_is_the_same_on_every_machine(text: Text) -> None:
    drawn = b"".join(sequences(text).draw(step).tobytes() for step in range(10))
    assert hashlib.sha256(drawn).hexdigest()[:16] == "23d6fd4fc5c0ee35"


def test_the_standard_library_is_there() -> None:
    corpus = open_corpus()
    assert corpus.num_files > 300
    assert b"def " in content(corpus.train)
    share = len(corpus.validation) / (len(corpus.train) + len(corpus.validation))
    assert 0.04 < share <= 0.0501
    corpus.check_length(1024)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for number in range(40):
        folder = tmp_path / f"part{number % 3}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.py").write_text(f"<{number}>" * 50, encoding="utf-8")
    (tmp_path / "notes.txt").write_text("notes " * 100, encoding="utf-8")
    return tmp_path


def test_a_directory_is_split_by_whole_files(directory: Path) -> None:
    corpus = open_corpus(path=str(directory), validation_share=0.2)
    held_out = {n for n in range(40) if f"<{n}>".encode() in content(corpus.validation)}
    trained = {n for n in range(40) if f"<{n}>".encode() in content(corpus.train)}
    assert corpus.num_files == 40
    assert len(held_out) == 8
    assert held_out | trained == set(range(40))
    assert not held_out & trained


def test_bytes_of_another_directory_are_for_validation(directory: Path) -> None:
    whole = open_corpus(path=str(directory))
    corpus = open_corpus(path=str(directory), validation=str(directory / "part0"))
    assert (corpus.num_files, len(corpus.validation)) == (40, 14 * 50 * 4 - 4 * 50)
    every = len(whole.train) + len(whole.validation)
    assert len(corpus.train) == every - len(corpus.validation), "a part of the same directory"
    assert corpus.digest != whole.digest


def test_the_split_does_not_depend_on_where_the_directory_is(directory: Path) -> None:
    before = open_corpus(path=str(directory))
    assert before.digest  # read before its files are moved
    moved = directory.rename(directory.parent / "moved")
    after = open_corpus(path=str(moved))
    assert (len(before.train), before.digest) == (len(after.train), after.digest)


def test_the_glob_selects_files(directory: Path) -> None:
    corpus = open_corpus(path=str(directory), glob="*.txt", validation_share=0.1)
    assert content(corpus.train) + content(corpus.validation) == b"notes " * 100


def test_the_end_of_a_single_file_is_for_validation(directory: Path) -> None:
    path = directory / "notes.txt"
    corpus = open_corpus(path=str(path), validation_share=0.1)
    assert (len(corpus.train), len(corpus.validation)) == (540, 60)
    assert content(corpus.train) + content(corpus.validation) == path.read_bytes()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"path": "/no/such/place"}, "no such file or directory"),
        ({"path": "{directory}", "glob": "**/*.rs"}, "no file matches"),
        ({"path": "{directory}", "glob": "/etc/*"}, "data.glob"),
    ],
)
def test_a_missing_text(directory: Path, data: dict[str, str], message: str) -> None:
    given = {key: value.format(directory=directory) for key, value in data.items()}
    with pytest.raises(ConfigError, match=message):
        open_corpus(**given)


def test_a_text_that_is_too_short(directory: Path) -> None:
    corpus = open_corpus(path=str(directory / "notes.txt"), validation_share=0.1)
    corpus.check_length(59)
    with pytest.raises(ConfigError, match=r"leaves 60 bytes .* needs at least 61"):
        corpus.check_length(60)

"""Documents: reading every format, tokenizing once, and packing without attention between them."""

import contextlib
import itertools
import json
import os
import shutil
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from tokenizers import processors
from transformers import AutoTokenizer

from shardwise.errors import ConfigError
from shardwise.train import documents as preparing
from shardwise.train.config import Config
from shardwise.train.data import IGNORED, Batch, Corpus, Packed, open_corpus
from shardwise.train.documents import Documents
from shardwise.train.tokenizer import Subwords

TEXTS = [f"document {n} says {'word ' * (n % 7)}and ends" for n in range(60)]
CHATS = [
    [
        {"role": "user", "content": f"what is {n}?"},
        {"role": "assistant", "content": f"it is the number {n}" + " indeed" * (n % 5)},
        {"role": "user", "content": "thanks"},
        {"role": "assistant", "content": "welcome"},
    ]
    for n in range(60)
]


def write_jsonl(path: Path, rows: list[Any], column: str = "text") -> None:
    path.write_text("".join(json.dumps({column: row}) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "texts.jsonl", TEXTS)
    return tmp_path / "texts.jsonl"


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "chats.jsonl", CHATS, "messages")
    return tmp_path / "chats.jsonl"


def opened(path: Path, context: int = 128, **data: Any) -> Corpus:
    given = {"path": str(path), "cache": str(path.parent / "cache"), "validation_share": 0.2}
    return open_corpus(
        Config.model_validate(
            {
                "data": given | data,
                "tokenizer": {"vocabulary": 300},
                "model": {"context": context},
            }
        )
    )


def texts_of(corpus: Corpus) -> set[str]:
    return {text for side in (corpus.train, corpus.validation) for text in _decoded(corpus, side)}


def _decoded(corpus: Corpus, side: Any) -> Iterator[str]:
    assert isinstance(side, Documents)
    tokens = np.array(side.tokens)
    for start, end in zip([0, *side.ends[:-1]], side.ends, strict=True):
        yield corpus.tokenizer.decode(tokens[start:end].tolist()).removesuffix("<|endoftext|>")


@pytest.mark.parametrize("format_", ["jsonl", "parquet", "datasets", "text"])
def test_every_format_has_the_same_documents(tmp_path: Path, format_: str) -> None:
    path = tmp_path / f"data.{format_}"
    options: dict[str, Any] = {}
    match format_:
        case "jsonl":
            write_jsonl(path, TEXTS)
        case "parquet":
            parquet.write_table(pa.table({"text": TEXTS, "other": TEXTS}), path, row_group_size=7)
        case "datasets":
            datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(path, num_shards=3)
        case _:
            path.mkdir()
            for number, text in enumerate(TEXTS):
                (path / f"{number}.txt").write_text(text)
            options = {"glob": "*.txt"}
    corpus = opened(path, **options)
    assert texts_of(corpus) == set(TEXTS)
    assert isinstance(corpus.validation, Documents)
    assert 4 < len(corpus.validation.ends) < 25


def test_documents_are_tokenized_once(jsonl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(jsonl)
    with monkeypatch.context() as patch:
        patch.setattr(preparing, "_write", None)
        assert opened(jsonl).digest == first.digest
    write_jsonl(jsonl, TEXTS[:40])
    assert opened(jsonl).digest != first.digest


def test_halves_of_characters_in_json_are_replaced(tmp_path: Path) -> None:
    """As bytes that are no UTF-8 are in text files; `json.loads` keeps such halves."""
    texts = ["a whole \U0001f600", "and half a \ud83d"]
    write_jsonl(tmp_path / "texts.jsonl", texts + TEXTS)
    assert {*texts[:1], "and half a ?"} < texts_of(opened(tmp_path / "texts.jsonl"))
    chat = [{"role": "user", "content": texts[1]}, {"role": "assistant", "content": texts[0]}]
    write_jsonl(tmp_path / "chats.jsonl", [chat, *CHATS], "messages")
    documents = texts_of(opened(tmp_path / "chats.jsonl", column="messages"))
    assert any("and half a ?" in text and texts[0] in text for text in documents)


def test_validation_documents_of_their_own(jsonl: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "other.jsonl", ["held out"] * 3)
    corpus = opened(jsonl, validation=str(tmp_path / "other.jsonl"))
    assert set(_decoded(corpus, corpus.validation)) == {"held out"}
    assert set(_decoded(corpus, corpus.train)) == set(TEXTS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"column": "body"}, "line 1: expected a JSON object with the key 'body'"),
        ({"format": "jsnl"}, "did you mean 'jsonl'"),
        ({"format": "no.such:reader"}, "No module named 'no'"),
    ],
)
def test_errors_name_the_key(jsonl: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(jsonl, **changes)


def test_splits_are_named(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "both")
    with pytest.raises(ConfigError, match=r"has the splits train, test; set data.path"):
        opened(tmp_path / "both")


def packed(corpus: Corpus, *, rank: int = 0, world_size: int = 1, context: int = 16) -> Packed:
    return Packed(
        text=corpus.train,
        context=context,
        global_batch=4,
        seed=0,
        rank=rank,
        world_size=world_size,
    )


def whole(corpus: Corpus, context: int = 16) -> Batch:
    """All windows of the training documents, in their order."""
    data = packed(corpus, context=context)
    batches = [data.in_order(number) for number in range(data.num_batches)]
    return Batch(*(torch.cat(parts)[: data.num_windows] for parts in zip(*batches, strict=True)))


def test_the_order_depends_on_neither_ranks_nor_resuming(jsonl: Path) -> None:
    corpus = opened(jsonl)
    steps = [packed(corpus)[step] for step in range(1, 30)]  # several epochs
    for world_size in (2, 4):
        parts = [packed(corpus, rank=rank, world_size=world_size) for rank in range(world_size)]
        for step, batch in enumerate(steps, start=1):
            for name in Batch._fields:
                joined = torch.cat([getattr(part[step], name) for part in parts])
                assert torch.equal(joined, getattr(batch, name))
    resumed = list(packed(corpus).loader(range(20, 30), 2, pin_memory=False))
    assert torch.equal(
        torch.stack([b.inputs for b in resumed]), torch.stack([b.inputs for b in steps[19:]])
    )


def test_each_window_is_read_once_in_order(jsonl: Path) -> None:
    corpus = opened(jsonl)
    epoch = packed(corpus)
    count = epoch.num_windows
    assert count % 4, "the last batch is full"
    expected = whole(corpus)
    for world_size in (1, 2, 4):
        parts = [packed(corpus, rank=rank, world_size=world_size) for rank in range(world_size)]
        found = [part.in_order(n) for n in range(epoch.num_batches) for part in parts]
        for name in Batch._fields:
            joined = torch.cat([getattr(batch, name) for batch in found])
            assert torch.equal(joined[:count], getattr(expected, name))
        assert (torch.cat([batch.targets for batch in found])[count:] == IGNORED).all()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"not parquet", r"a\.parquet: cannot be read as data\.format='parquet': "),
        ("a.jsonl", b'{"text": "\xff"}\n', r"cannot be read as data\.format='jsonl': .*utf-8"),
        ("a.jsonl", b'{"text": 7}\n', r"data\.column='text': expected a text, or a list .* got 7"),
        ("a.jsonl", b'{"text": [{"who": "I"}]}\n', r"expected .*\"role\".* got \[\{'who': 'I'\}\]"),
        ("a.jsonl", b"", "no documents for train"),
    ],
)
def test_an_unreadable_file_is_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path / name)


def test_answers_that_never_fit_are_refused(tmp_path: Path) -> None:
    long = [{"role": "user", "content": "why " * 99}, {"role": "assistant", "content": "so"}]
    write_jsonl(tmp_path / "chats.jsonl", [[*long, *chat] for chat in CHATS])
    message = 'context=64: no answer of the conversations for train .* the role "assistant"'
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path / "chats.jsonl", context=64)


def test_an_epoch_has_every_window_once(jsonl: Path) -> None:
    data = packed(opened(jsonl))
    count = len(data.windows)
    drawn = np.concatenate([data.draw(step) for step in range(1, 1 + count)])  # four epochs
    for epoch in range(4):
        assert sorted(drawn[epoch * count :][:count]) == list(range(count))
    assert drawn[:count].tolist() != drawn[count : 2 * count].tolist()


def test_every_token_but_a_first_one_is_a_target(jsonl: Path) -> None:
    """Each token occurs once per epoch, at its position in the document."""
    corpus = opened(jsonl)
    documents = corpus.train
    assert isinstance(documents, Documents)
    tokens, firsts = np.array(documents.tokens), {0, *documents.ends.tolist()}
    every = whole(corpus)
    windows = documents.windows(16).tolist()
    assert every.positions is not None
    for (start, stop), inputs, positions in zip(
        windows, every.inputs, every.positions, strict=True
    ):
        size = min(stop - start, 16)
        assert inputs[:size].tolist() == tokens[start : start + size].tolist()
        begins = [p == 0 for p in positions[1:size]]
        assert begins == [at in firsts for at in range(start + 1, start + size)]
    counted = every.targets[every.targets != IGNORED]
    expected = [token for at, token in enumerate(tokens.tolist()) if at not in firsts]
    assert counted.tolist() == expected


def test_only_answers_count(chats: Path) -> None:
    corpus = opened(chats, column="messages")
    documents, tokenizer = corpus.train, corpus.tokenizer
    assert isinstance(documents, Documents)
    every = whole(corpus, context=200)
    assert every.positions is not None
    for inputs, targets, positions in zip(
        every.inputs, every.targets, every.positions, strict=True
    ):
        begins = [*np.flatnonzero(positions.numpy() == 0), len(inputs)]
        for start, end in itertools.pairwise(begins):
            answers = tokenizer.decode([t for t in targets[start:end].tolist() if t != IGNORED])
            if answers:
                text = tokenizer.decode(inputs[start:end].tolist())
                assert text.startswith("<|im_start|>user\nwhat is ")
                number = text.split("what is ")[1].split("?")[0]
                indeed = " indeed" * (int(number) % 5)
                assert answers == (
                    f"it is the number {number}{indeed}<|im_end|>\nwelcome<|im_end|>\n"
                )


def test_conversations_are_whole_unless_they_do_not_fit(chats: Path) -> None:
    documents = opened(chats, column="messages").train
    assert isinstance(documents, Documents)
    edges = {0, *documents.ends.tolist()}
    longest = int(np.diff([0, *documents.ends]).max())
    for start, stop in documents.windows(context=2 * longest).tolist():
        assert {start, stop} <= edges
        assert stop - start <= 2 * longest + 1
    cut = documents.windows(context=10)
    assert set(cut[:, 0].tolist()) == edges - {len(documents)}
    assert (cut[:, 1] - cut[:, 0] == 11).all()


def test_texts_among_conversations_are_cut_and_not_truncated(tmp_path: Path) -> None:
    """Only of a conversation, what does not fit into a sequence is left out."""
    long_chat = [CHATS[4][0], {"role": "assistant", "content": "it goes on" * 60}]
    long_text = " ".join(str(number) for number in range(300))
    documents = [*CHATS[:20], long_text, long_chat, *TEXTS[:20], long_text, *CHATS[20:]]
    write_jsonl(tmp_path / "mixed.jsonl", documents)
    write_jsonl(tmp_path / "other.jsonl", TEXTS)
    corpus = opened(tmp_path / "mixed.jsonl", 100, validation=str(tmp_path / "other.jsonl"))
    train = corpus.train
    assert isinstance(train, Documents)
    tokens, ends = np.array(train.tokens), train.ends.tolist()
    is_target = np.array(train.counted)
    is_target[[0, *ends[:-1]]] = False
    (at,) = (n for n, one in enumerate(documents) if one is long_chat)
    end = ends[at - 1] + 101
    is_target[end : ends[at]] = False
    every = whole(corpus, context=100)
    assert every.targets[every.targets != IGNORED].tolist() == tokens[is_target].tolist()
    found = (ends[at] - end) / len(tokens)
    line = (
        "1 of 83 documents for training are conversations longer than model.context=100; their "
        f"ends are not used, {found:.1%} of the tokens"
    )
    assert list(corpus.truncations(100)) == [line]
    assert not list(corpus.truncations(1000))


def test_an_empty_conversation_at_the_end_is_no_window(tmp_path: Path) -> None:
    for name, tokens, ends in (("a", 20, [20, 20]), ("b", 0, [0])):
        np.zeros(tokens, np.uint16).tofile(_made(tmp_path / name) / "tokens.bin")
        np.zeros(tokens, bool).tofile(tmp_path / name / "counted.bin")
        np.array(ends, np.int64).tofile(tmp_path / name / "ends.bin")
        facts = {"dtype": "uint16", "digest": 0, "has_answers": True}
        (tmp_path / name / "facts.json").write_text(json.dumps(facts))
    assert Documents(tmp_path / "a").windows(context=8).tolist() == [[0, 9]]
    assert Documents(tmp_path / "b").windows(context=8).tolist() == [[0, 0]]


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def test_a_vocabulary_has_all_bytes() -> None:
    assert Subwords.train(TEXTS, 259).vocabulary == 259
    with pytest.raises(ConfigError, match=r"tokenizer\.vocabulary=258: expected at least 259"):
        Subwords.train(TEXTS, 258)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"set tokenizer\.path to .*, or tokenizer\.voc"):
        Subwords.open(tmp_path)


def test_a_template_that_changes_messages_is_refused() -> None:
    tokenizer = Subwords.train(TEXTS, 300)
    tokenizer.hf_tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.last %}{{ m.content }}{% else %}.{% endif %}{% endfor %}"
    )
    with pytest.raises(ConfigError, match="chat template changes a message"):
        tokenizer.encode_chat(CHATS[0])


def test_a_file_that_moves_to_validation_is_no_longer_trained_on(tmp_path: Path) -> None:
    """The same files are read, in the same order."""
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:40])
    write_jsonl(tmp_path / "b.jsonl", TEXTS[40:])
    opened(tmp_path, cache=str(tmp_path / "cache"))
    validation = str(tmp_path / "b.jsonl")
    corpus = opened(tmp_path / "a.jsonl", cache=str(tmp_path / "cache"), validation=validation)
    assert set(_decoded(corpus, corpus.train)) == set(TEXTS[:40])


def test_validation_files_inside_the_data_are_not_trained_on(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:40])
    write_jsonl(tmp_path / "b.jsonl", TEXTS[40:])
    validation = str(tmp_path / "b.jsonl")
    corpus = opened(tmp_path, validation=validation)
    assert set(_decoded(corpus, corpus.train)) == set(TEXTS[:40])
    assert set(_decoded(corpus, corpus.validation)) == set(TEXTS[40:])
    corpus = opened(tmp_path / "b.jsonl", validation=validation)  # all of them
    assert set(_decoded(corpus, corpus.train)) == set(_decoded(corpus, corpus.validation))


def save_gpt2(directory: Path, vocabulary: int) -> Path:
    """A tokenizer in the files of GPT-2, without a tokenizer.json."""
    directory.mkdir()
    model = Subwords.train(TEXTS, vocabulary).hf_tokenizer.backend_tokenizer.model
    model.save(str(directory))
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def test_tokenizers_are_told_apart_by_all_of_their_files(jsonl: Path, tmp_path: Path) -> None:
    found = []
    for vocabulary in (280, 320):
        path = save_gpt2(tmp_path / str(vocabulary), vocabulary)
        sections = {"data": {"path": str(jsonl), "cache": str(tmp_path / "cache")}}
        corpus = open_corpus(Config.model_validate(sections | {"tokenizer": {"path": str(path)}}))
        found.append((corpus.tokenizer.vocabulary, len(corpus.train) + len(corpus.validation)))
        assert texts_of(corpus) == set(TEXTS)
    assert [vocabulary for vocabulary, _ in found] == [280, 320]
    assert found[0][1] > found[1][1]


def test_a_reader_that_was_changed_reads_again(
    jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for word in ("one", "another"):
        module = tmp_path / "own_reader.py"
        module.write_text(f"def read(path, column):\n    yield from ['{word}'] * 3\n")
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        monkeypatch.delitem(sys.modules, "own_reader", raising=False)
        corpus = opened(jsonl, format="own_reader:read", validation=str(second(jsonl)))
        assert texts_of(corpus) == {word}


def second(file: Path) -> Path:
    copy = file.with_name("copy.jsonl")
    shutil.copy2(file, copy)
    return copy


def test_a_cache_that_cannot_be_written_is_named(jsonl: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.cache: .* cannot be written: File exists"):
        opened(jsonl, cache=str(jsonl))


def test_hosts_without_a_common_lock_may_tokenize_at_once(
    jsonl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(directory: Path, *args: Any) -> None:
        original(directory, *args)
        with monkeypatch.context() as patch:  # another host does the same, and is faster
            patch.setattr(preparing, "_write", original)
            patch.setattr(preparing, "_locked", lambda _path: contextlib.nullcontext())
            patch.setattr("socket.gethostname", lambda: "another")
            opened(jsonl)

    original = preparing._write
    monkeypatch.setattr(preparing, "_write", write)
    assert texts_of(opened(jsonl)) == set(TEXTS)
    assert not [*(jsonl.parent / "cache").glob("*.partial")]


def test_what_a_killed_process_has_left_in_the_cache_is_removed(jsonl: Path) -> None:
    cache = jsonl.parent / "cache"
    for name, age in (("old", 100_000), ("new", 1000)):
        file = cache / f"tokens-0.{name}.partial" / "train" / "tokens.bin"
        file.parent.mkdir(parents=True)
        file.touch()
        for path in (file, *file.parents[:2]):
            os.utime(path, (time.time() - age,) * 2)
    opened(jsonl)
    assert [path.name for path in cache.glob("*.partial")] == ["tokens-0.new.partial"]


def test_a_reader_may_be_in_an_archive(
    jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "readers.zip", "w") as archive:
        archive.writestr("zipped_reader.py", "def read(path, column):\n    yield from ['a'] * 3\n")
    monkeypatch.syspath_prepend(tmp_path / "readers.zip")
    corpus = opened(jsonl, format="zipped_reader:read", validation=str(second(jsonl)))
    assert texts_of(corpus) == {"a"}


def test_json_lines_of_other_programs(jsonl: Path) -> None:
    """With a byte order mark, and empty lines."""
    lines = jsonl.read_text(encoding="utf-8").splitlines()
    jsonl.write_text("\ufeff" + "\n\n".join(lines) + "\n \n", encoding="utf-8")
    assert texts_of(opened(jsonl)) == set(TEXTS)


def test_results_that_datasets_leaves_in_a_directory_are_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "data"
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(path)
    datasets.load_from_disk(str(path)).map(lambda row: {"text": row["text"].upper()})
    assert len([*path.glob("*.arrow")]) == 2
    assert texts_of(opened(path)) == set(TEXTS)


@pytest.mark.parametrize("content", ["{}", '["a state"]', "of another program"])
def test_a_state_of_another_program_is_no_dataset(tmp_path: Path, content: str) -> None:
    write_jsonl(tmp_path / "texts.jsonl", TEXTS)
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(ConfigError, match=r"its state\.json is not that of .*; set data\.format"):
        opened(tmp_path)
    assert texts_of(opened(tmp_path, format="jsonl")) == set(TEXTS)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl.gz", "data-00000-of-00001.arrow"])
def test_what_is_no_text_is_not_trained_on_as_text(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("[1]" * 1000)
    with pytest.raises(ConfigError, match=f"data.format='auto': cannot tell what '{name}' con"):
        opened(tmp_path / name)
    assert opened(tmp_path / name, format="text", validation=str(second(tmp_path / name)))


def test_files_in_folders_have_a_format_too(tmp_path: Path) -> None:
    (tmp_path / "data" / "train").mkdir(parents=True)
    (tmp_path / "data" / ".cache").mkdir()
    (tmp_path / "data" / ".cache" / "a.parquet").touch()
    write_jsonl(tmp_path / "data" / "train" / "a.jsonl", TEXTS)
    assert texts_of(opened(tmp_path / "data")) == set(TEXTS)
    sources = {f"print({number})\n" * 20 for number in range(20)}
    for number, source in enumerate(sorted(sources)):  # of a program, with results in folders
        (tmp_path / "data" / f"{number}.py").write_text(source)
    assert texts_of(opened(tmp_path / "data")) == sources


def test_a_document_begins_as_the_tokenizer_begins_texts(jsonl: Path, tmp_path: Path) -> None:
    """As with tokenizers of Llama and Gemma, whose models expect it."""
    tokenizer = Subwords.train(TEXTS, 300).hf_tokenizer
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    first = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", first)]
    )
    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    sections = {"data": {"path": str(jsonl), "cache": str(tmp_path / "cache")}}
    path = {"tokenizer": {"path": str(tmp_path / "tokenizer")}}
    corpus = open_corpus(Config.model_validate(sections | path))
    documents = corpus.train
    assert isinstance(documents, Documents)
    starts = [0, *documents.ends[:-1].tolist()]
    assert {int(documents.tokens[start]) for start in starts} == {first}
    assert (np.array(documents.tokens) == first).sum() == len(starts)
    assert texts_of(corpus) == set(TEXTS)
    loaded = AutoTokenizer.from_pretrained(str(tmp_path / "tokenizer"))
    assert corpus.tokenizer.encode("a word") == loaded("a word")["input_ids"]
    assert corpus.tokenizer.decode(loaded("a word")["input_ids"]) == "a word"


def test_a_message_that_is_not_a_string_is_refused() -> None:
    """One without a content, as those that call tools, is empty."""
    tokenizer = Subwords.train(TEXTS, 300)
    content: Any = [{"type": "text", "text": "hello"}]
    with pytest.raises(ConfigError, match=r"does not take the messages \[\{.*is not a string"):
        tokenizer.encode_chat([{"role": "user", "content": content}])
    for message in ({"role": "user"}, {"role": "user", "content": None}):
        tokens, _ = tokenizer.encode_chat([message])
        assert tokenizer.decode(tokens) == "<|im_start|>user\n<|im_end|>\n"


def test_a_template_that_refuses_messages_is_named() -> None:
    """As that of Gemma does with a system message."""
    tokenizer = Subwords.train(TEXTS, 300)
    tokenizer.hf_tokenizer.chat_template = (
        "{% if messages[0].role == 'assistant' %}{{ raise_exception('user first') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(ConfigError, match=r"chat template does not take .*: user first"):
        tokenizer.encode_chat(CHATS[0][1:])


def test_spaces_that_a_tokenizer_trims_belong_to_their_message() -> None:
    """As with the tokenizers of GPT-2 and Llama 3, whose tokens of spaces have no extent."""
    tokenizer = Subwords.train(TEXTS, 300)
    tokenizer.hf_tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(
        trim_offsets=True
    )
    tokenizer.hf_tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}  {% endfor %}"
    )
    tokens, counted = tokenizer.encode_chat(CHATS[0][:2])
    answer = [token for token, counts in zip(tokens, counted, strict=True) if counts]
    assert tokenizer.decode(answer) == "assistant:it is the number 0  "

"""Converts text to token numbers and back: bytes, or subwords of a `transformers` tokenizer."""

import json
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError, PackageMissing
from shardwise.train.config import Config

__all__ = ["Bytes", "Message", "Subwords", "Tokenizer", "vocabulary_of"]

END = "<|endoftext|>"
# The chat template of tokenizers that have none.
CHATML = (
    "{% for message in messages %}{% if message.content and message.content is not string %}"
    "{{ raise_exception('the content of a message is not a string') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content or '' }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Message = dict[str, Any]  # at least "role" and "content"


class Tokenizer(Protocol):
    """Encodes the prompt and decodes the sample."""

    vocabulary: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class Bytes:
    """A tokenizer in which each byte is a token."""

    vocabulary = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


class Subwords:
    """A fast tokenizer of `transformers`; documents end with its end-of-text token.

    They begin with its beginning-of-text token if it adds one to texts, as it does in inference.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.is_fast or tokenizer.eos_token_id is None:
            raise ConfigError("[tokenizer]: expected a fast tokenizer that has an eos_token")
        tokenizer.model_max_length = int(1e30)  # no warning: the trainer cuts documents itself
        tokenizer.chat_template = tokenizer.chat_template or CHATML
        self.hf_tokenizer = tokenizer
        self.vocabulary = len(tokenizer)
        first = tokenizer("")["input_ids"][:1]
        self._begin: list[int] = first if first == [tokenizer.bos_token_id] else []

    @property
    def description(self) -> str:
        """Everything that determines the tokens of documents, as JSON."""
        given = self.hf_tokenizer
        special = {name: str(token) for name, token in given.special_tokens_map.items()}
        return json.dumps(
            [given.backend_tokenizer.to_str(), given.chat_template, special, self._begin]
        )

    @classmethod
    def open(cls, directory: str | Path) -> "Subwords":
        """Read the tokenizer of a directory; raise a ConfigError if there is none."""
        PackageMissing.check("transformers", extra="hf", needed_for="[tokenizer]")
        from transformers import AutoTokenizer  # noqa: PLC0415 (optional, and takes seconds)

        if not Path(directory).is_dir():
            raise ConfigError(f"[tokenizer]: {directory}: no such directory")
        try:
            return cls(AutoTokenizer.from_pretrained(str(directory), local_files_only=True))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"[tokenizer]: {directory} has no readable tokenizer; set tokenizer.path to "
                f"a directory that has one, or tokenizer.vocabulary=8192 to train one ({error})"
            ) from None

    @classmethod
    def train(cls, texts: Iterable[str], vocabulary: int) -> "Subwords":
        """Train a byte-level BPE of at most ``vocabulary`` tokens on ``texts``."""
        PackageMissing.check("transformers", extra="hf", needed_for="tokenizer.vocabulary")
        from tokenizers import Tokenizer as Model, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415 (optional)
        from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

        alphabet, special = pre_tokenizers.ByteLevel.alphabet(), [END, "<|im_start|>", "<|im_end|>"]
        if vocabulary < len(alphabet) + len(special):
            raise ConfigError(
                f"tokenizer.vocabulary={vocabulary}: expected at least "
                f"{len(alphabet) + len(special)}, a token for each byte and {len(special)} special "
                "ones"
            )
        model = Model(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=special,
            initial_alphabet=alphabet,
            show_progress=False,
        )
        model.train_from_iterator(texts, trainer)
        return cls(PreTrainedTokenizerFast(tokenizer_object=model, eos_token=END, pad_token=END))

    def encode(self, text: str) -> list[int]:
        return [*self._begin, *self.hf_tokenizer.encode(text, add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        begins = self._begin and list(tokens[:1]) == self._begin
        return str(self.hf_tokenizer.decode(tokens[1:] if begins else tokens))

    def save(self, directory: Path) -> None:
        self.hf_tokenizer.save_pretrained(str(directory))

    def encode_texts(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Yield the tokens of each text, with those of its beginning and end."""
        encoded = self.hf_tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        for tokens in encoded:
            yield [*self._begin, *tokens, self.hf_tokenizer.eos_token_id]

    def encode_chat(self, messages: Sequence[Message]) -> tuple[list[int], NDArray[np.bool_]]:
        """Return the tokens of a conversation, and whether the assistant wrote each of them.

        Raise a ConfigError if the template refuses the messages, or writes a message differently
        when others follow it.
        """
        texts = ["", *(self._render(messages[: n + 1]) for n in range(len(messages)))]
        if not all(text.startswith(start) for start, text in pairwise(texts)):
            raise ConfigError(
                "[tokenizer]: its chat template changes a message when others follow, so the "
                "answers cannot be located; use a chat_template.jinja that only appends"
            )
        is_answer = np.zeros(len(texts[-1]), bool)  # by character
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = self._render(messages[:number], add_generation_prompt=True)
                follows = texts[number + 1].startswith(prompt)
                start = len(prompt) if follows else len(texts[number])
                is_answer[start : len(texts[number + 1])] = True
        encoded = self.hf_tokenizer(
            texts[-1], add_special_tokens=False, return_offsets_mapping=True
        )
        # Tokenizers that trim offsets leave out spaces: a token of spaces alone starts at its end.
        firsts = [max(0, min(start, stop - 1)) for start, stop in encoded["offset_mapping"]]
        return encoded["input_ids"], is_answer[firsts]

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        from jinja2 import TemplateError  # noqa: PLC0415 (optional)

        try:
            return str(
                self.hf_tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
                )
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ConfigError(
                f"[tokenizer]: its chat template does not take the messages "
                f"{reprlib.repr(list(messages))}: {error}"
            ) from None


def vocabulary_of(config: Config) -> int:
    if config.tokenizer.vocabulary:
        return config.tokenizer.vocabulary
    path = config.tokenizer.path or config.model.path
    return Subwords.open(Path(path).expanduser()).vocabulary if path else Bytes.vocabulary

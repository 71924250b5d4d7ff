"""Loads a checkpoint's tokenizer from local files. `Tokenizer` is the frontend's interface to it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_engine.frontend.client_text import ClientText
from compiled_engine.frontend.tokenizer_backend import (
    FastTokenizerBackend,
    Pair,
    SlowTokenizerBackend,
    TokenizerBackend,
)
from compiled_engine.frontend.tokenizer_files import (
    CONFIG_FILE,
    TOKENIZER_FILE,
    NotReadHere,
    Templates,
    read_templates,
    read_tokenizer,
)
from compiled_engine.models.checkpoint.json_fields import JsonFields, describe_lfs_pointer, is_lfs_pointer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("compiled_engine")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))


class Tokenizer:
    """The frontend's interface to a tokenizer, whether the `tokenizers` library or transformers runs it."""

    def __init__(
        self,
        backend: TokenizerBackend,
        special_tokens: dict[str, str],
        chat_template: Templates,
        in_transformers: Callable[[], PreTrainedTokenizerBase],
    ) -> None:
        """Create the interface to `backend`.

        special_tokens: text by name, such as eos_token. chat_template: one template, or several by name.
        in_transformers: loads the tokenizer with transformers; called on the first access to `hf`.
        """
        self._backend, self._in_transformers = backend, in_transformers
        # special_tokens: text by name, such as eos_token. chat_template: one template, or several by name.
        self.special_tokens, self.chat_template = special_tokens, chat_template
        # The ids that skip_special_tokens leaves out of the text.
        self.special_ids = frozenset(token_id for token_id, token in backend.added_tokens().items() if token.special)
        bytes_of_tokens = ((backend.token_to_id(token), byte) for byte, token in enumerate(BYTE_TOKENS))
        # SentencePiece's single-byte tokens, <0x00> to <0xFF>. A run of them is decoded as a whole.
        self.byte_ids = {token_id: byte for token_id, byte in bytes_of_tokens if token_id is not None}
        # A short word, decoded before a token to see whether the token begins with a space.
        self.word_ids = self.encode("a", add_special_tokens=False)
        self._decoded_tokens: dict[int, str] = {}
        self._known_ids: set[int] = set()
        self._hf: PreTrainedTokenizerBase | None = None

    @classmethod
    def of_transformers(cls, hf: PreTrainedTokenizerBase) -> Tokenizer:
        """Return a Tokenizer for a tokenizer that transformers has loaded."""
        backend: TokenizerBackend
        if hf.is_fast:
            hf.backend_tokenizer.no_truncation()  # as hf itself does whenever it is called
            hf.backend_tokenizer.no_padding()
            backend = FastTokenizerBackend(hf.backend_tokenizer)
        else:
            backend = SlowTokenizerBackend(hf)
        return cls(backend, dict(hf.special_tokens_map), hf.chat_template, lambda: hf)

    @cached_property
    def ids_of_special(self) -> dict[str, int]:
        """Ids of the special tokens, by text."""
        return {token.content: token_id for token_id, token in self._backend.added_tokens().items() if token.special}

    @cached_property
    def client_text(self) -> ClientText:
        """Renders values that clients send. Text in the values that looks like a special token stays ordinary text."""
        return ClientText(self._backend.added_tokens())

    @property
    def hf(self) -> PreTrainedTokenizerBase:
        """The tokenizer as an object of transformers. The first access imports transformers and loads it."""
        if self._hf is None:
            self._hf = self._in_transformers()
        return self._hf

    @property
    def eos_token_id(self) -> int | None:
        """The id of the tokenizer's end-of-sequence token, or None."""
        end = self.special_tokens.get("eos_token")
        return None if end is None else self._backend.token_to_id(end)

    def knows(self, token_id: int) -> bool:
        """Return whether the tokenizer has a token with this id. A model's padded vocabulary may have further ids."""
        if token_id in self._known_ids:
            return True
        if self._backend.id_to_token(token_id) is None:
            return False
        self._known_ids.add(token_id)
        return True

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return token ids of `text`, by default with the tokenizer's special tokens around it."""
        return self._backend.encode(text, add_special_tokens)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return token ids of each text. Fast tokenizers use several threads."""
        return self._backend.encode_batch(texts, add_special_tokens)

    def join(self, first: list[int], second: list[int], most: int | None = None) -> Pair:
        """Join two texts into one token sequence, with the special tokens that the tokenizer adds to a pair of texts.

        first, second: the texts' token ids, without special tokens. most: the longer text is truncated until the
        sequence has at most that many tokens; None: no limit. Raises ValueError if `most` leaves no token for the
        texts.
        """
        return self._backend.join(first, second, most)

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound on the number of a text's tokens, without tokenising it; 0 if no bound is known."""
        longest = self._backend.longest_token()
        return 0 if longest is None else -(-len(text) // longest)

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Return the token ids of one text given in parts: strings, and ids of special tokens.

        Strings that look like a special token are encoded as ordinary text.
        """
        return self._backend.encode_parts(parts)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, special tokens included. Unknown ids have no text."""
        return self._backend.decode(token_ids)

    def to_json(self) -> str:
        """Return the tokenizer in tokenizer.json format. Raises ValueError for a slow (Python) tokenizer."""
        return self._backend.to_json()

    def entry(self, token_id: int) -> str:
        """Return a token's entry in the vocabulary, such as Ġdef, or "" for an unknown id."""
        return self._backend.id_to_token(token_id) or ""

    def decode_token(self, token_id: int) -> str:
        """Return the text that a token has within a longer text, including its leading space, if any.

        Special tokens are decoded alone.
        """
        text = self._decoded_tokens.get(token_id)
        if text is None:
            text = self._decoded_tokens[token_id] = self._decode_token(token_id)
        return text

    def _decode_token(self, token_id: int) -> str:
        before, both = self.decode(self.word_ids), self.decode([*self.word_ids, token_id])
        if token_id in self.special_ids or not both.startswith(before):
            return self.decode([token_id])
        return both[len(before) :]


def has_tokenizer(path: Path) -> bool:
    """Return whether the folder has a tokenizer file."""
    return any((path / name).is_file() for name in TOKENIZER_FILES)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer in the folder `path` from its files alone, without downloads or the checkpoint's code.

    Raises FileNotFoundError or ValueError, whose message has the folder, the reason, and the damaged file, if any.
    """
    find_tokenizer_folder(path, path)
    try:
        parts = read_tokenizer(path)
    except NotReadHere as reason:
        log.info("tokenizer: transformers reads the one in %s: %s", path, reason)
        tokenizer = Tokenizer.of_transformers(load_by_transformers(path))
        if tokenizer.chat_template is None:  # transformers reads chat_template.json only for processors
            tokenizer.chat_template = read_templates(path, {})
        return tokenizer
    except Exception as error:  # the Rust library raises nothing more special
        raise _not_loaded(path, error) from error
    return Tokenizer(
        FastTokenizerBackend(parts.backend),
        parts.special_tokens,
        parts.chat_template,
        partial(load_by_transformers, path),
    )


def load_by_transformers(path: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer in the folder, loaded by AutoTokenizer. Raises ValueError as `load_tokenizer` does."""
    from compiled_engine.models.foreign.description import IMPORTING  # imports torch, as transformers does

    try:
        with IMPORTING:
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise _not_loaded(path, error) from error


def _not_loaded(path: Path, error: Exception) -> ValueError:
    why = _damage(path) or f"{type(error).__name__}: {error}"
    return ValueError(f"tokenizer: cannot load the one in {str(path)!r}: {why}")


def _damage(path: Path, *, vocabularies: bool = True) -> str:
    """Return a description of the first damaged tokenizer file in the folder, or "" if none is damaged.

    vocabularies: read large files completely; otherwise only their ends are read.
    """
    for file in (path / name for name in TOKENIZER_FILES if (path / name).is_file()):
        if is_lfs_pointer(file):
            return describe_lfs_pointer(file)
        if file.suffix == ".json":
            if not vocabularies and file.name != CONFIG_FILE and _ends_as_object(file):
                continue
            try:
                fields = JsonFields.from_file(file)
            except ValueError as error:
                return str(error)
            if file.name == TOKENIZER_FILE and "model" not in fields:
                return f"{file}: the field model is missing"
    return ""


def _ends_as_object(file: Path) -> bool:
    """Return whether the file's last character closes an object, unlike in a truncated file."""
    with file.open("rb") as content:
        content.seek(max(0, file.stat().st_size - 1024))
        return content.read().rstrip().endswith(b"}")


def read_json_if_there(path: Path) -> dict[str, Any]:
    """Return the JSON object in an optional file, or {} without the file. Raises ValueError if it is damaged."""
    return JsonFields.from_file(path).values if path.is_file() else {}


def find_tokenizer_folder(given: Path | None, model_path: Path) -> Path | None:
    """Return the folder of the tokenizer: `given`, or `model_path` if `given` is None.

    Returns None if `given` is None and `model_path` has no tokenizer. Raises the errors of `load_tokenizer` for defects
    that can be found without reading the vocabulary.
    """
    if given is None and not has_tokenizer(model_path):
        return None
    path = model_path if given is None else given
    if not path.is_dir():
        raise FileNotFoundError(f"tokenizer must be a folder, and there is none at {str(path)!r}")
    if not has_tokenizer(path):
        raise FileNotFoundError(f"tokenizer: {str(path)!r} has none of {', '.join(TOKENIZER_FILES)}")
    if why := _damage(path, vocabularies=False):
        raise ValueError(f"tokenizer: cannot load the one in {str(path)!r}: {why}")
    return path


def read_eos_token_ids(model_path: Path, tokenizer: Tokenizer | None, overrides: str = "") -> frozenset[int]:
    """Return every end-of-sequence id in generation_config.json, config.json and the tokenizer.

    `overrides` is a JSON object, whose fields replace those of config.json. Raises ValueError for invalid ids.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        stated = read_json_if_there(model_path / name)
        if overrides and name == "config.json":
            stated |= json.loads(overrides)
        value = stated.get("eos_token_id")
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
            raise ValueError(f"eos_token_id in {str(model_path / name)!r} must be an integer or a list, got {value!r}")
        found.update(values)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(found)


def encode_bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word at the start of a text and, in some cases, those of the word after a space.

    As in vLLM, the ids after a space are included if there are equally many and the first one differs. If there are
    more, the first is a token for the space alone.

    Raises ValueError for a word without tokens.
    """
    encoded: list[tuple[int, ...]] = []
    for index, word in enumerate(words):
        bare = word.lstrip()
        at_start = tuple(tokenizer.encode(bare, add_special_tokens=False))
        if not at_start:
            raise ValueError(f"bad_words[{index}] must have a token after leading spaces and line ends, got {word!r}")
        encoded.append(at_start)
        after_space = tuple(tokenizer.encode(f" {bare}", add_special_tokens=False))
        if after_space[0] != at_start[0] and len(after_space) == len(at_start):
            encoded.append(after_space)
    return tuple(encoded)

"""Tokenizer backends: the `tokenizers` library, and the Python tokenizers of transformers."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from tokenizers import AddedToken, Tokenizer

from compiled_engine.process.memory import return_free_memory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Text lengths in characters. LONG_TEXT: from here, encode as a batch of one, which releases the GIL and skips offsets.
# QUICK_TEXT: up to here, a text does not wait for longer ones. HUGE_TEXT: from here, memory is returned afterwards.
LONG_TEXT, QUICK_TEXT, HUGE_TEXT = 8192, 1 << 18, 1 << 20
UNKNOWN = "\U0010fffe"  # a code point that no text has


class Pair(NamedTuple):
    """Two texts joined into one token sequence."""

    token_ids: list[int]
    second: int | None  # Index of the second text's first token; None if the tokenizer does not distinguish the texts.

    @classmethod
    def of(cls, token_ids: list[int], type_ids: Sequence[int]) -> Pair:
        """Return the pair with these tokens.

        type_ids: 0 for each token of the first text and 1 for each of the second; empty if unknown.
        """
        return cls(token_ids, type_ids.index(1) if 1 in type_ids else None)


@dataclass(frozen=True)
class PairForm:
    """The template by which a tokenizer joins two texts."""

    # Each piece is a text (0 or 1) or fixed token ids, with the token type of its tokens.
    pieces: tuple[tuple[int | tuple[int, ...], int], ...]

    def join(self, first: list[int], second: list[int], most: int | None) -> Pair:
        """Return the two texts joined; see `TokenizerBackend.join`."""
        num_special = sum(len(what) for what, _ in self.pieces if isinstance(what, tuple))
        _require_room(most, num_special)
        room = None if most is None else most - num_special
        if room is not None and room < len(first) + len(second):
            short = min(len(first), len(second), room // 2)
            sizes = (short, room - short) if len(first) <= len(second) else (room - short, short)
            first, second = first[: sizes[0]], second[: sizes[1]]
        token_ids: list[int] = []
        start = None
        for what, kind in self.pieces:
            piece = what if isinstance(what, tuple) else (first, second)[what]
            if kind == 1 and start is None and piece:
                start = len(token_ids)
            token_ids += piece
        return Pair(token_ids, start)


def _require_room(most: int | None, num_special: int) -> None:
    if most is not None and most <= num_special:
        raise ValueError(
            f"truncate_prompt_tokens must be more than {num_special}, the special tokens of a pair of texts, got {most}"
        )


class TokenizerBackend(Protocol):
    """Converts between text and token ids."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]: ...

    def join(self, first: list[int], second: list[int], most: int | None) -> Pair:
        """Return two texts, given as token ids without special tokens, as a pair with special tokens.

        most: the longer text is truncated until the pair has at most that many tokens; None: no limit. Raises
        ValueError if `most` leaves no token for the texts.
        """
        ...

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Return the token ids of one text given in parts: strings, and ids of special tokens.

        Strings that look like a special token are encoded as ordinary text.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text, special tokens included. Unknown ids have no text."""
        ...

    def longest_token(self) -> int | None:
        """Return the largest number of characters that one token can cover, or None if unknown."""
        ...

    def token_to_id(self, token: str) -> int | None: ...

    def id_to_token(self, token_id: int) -> str | None: ...

    def added_tokens(self) -> dict[int, AddedToken]:
        """Return the added tokens by id, special tokens included. They are matched in a text before it is tokenised."""
        ...

    def to_json(self) -> str: ...


class FastTokenizerBackend:
    """Runs a tokenizer of the `tokenizers` library."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self.token_to_id = backend.token_to_id
        self.id_to_token = backend.id_to_token
        self._apart: _SpecialsApart | None = None
        self._pair_form: PairForm | None = None
        self._longest_token: int | None = None
        self._lock = threading.Lock()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return _ids(self._backend, text, add_special_tokens)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def join(self, first: list[int], second: list[int], most: int | None) -> Pair:
        if self._pair_form is None:
            self._pair_form = self._find_pair_form()
        return self._pair_form.join(first, second, most)

    def _find_pair_form(self) -> PairForm:
        """Return the tokenizer's template for pairs, found by encoding a pair of one-token words."""
        words = ("a", *self._backend.get_vocab())
        word = next(word for word in words if self._backend.encode(word, add_special_tokens=False).ids)
        example = self._backend.encode(word, word)
        tokens = zip(example.ids, example.type_ids, example.sequence_ids, strict=True)
        pieces: list[tuple[int | tuple[int, ...], int]] = []
        for (place, kind), group in groupby(tokens, lambda token: (token[2], token[1])):
            pieces.append((tuple(token_id for token_id, _, _ in group) if place is None else place, kind))
        return PairForm(tuple(pieces))

    def longest_token(self) -> int | None:
        if self._longest_token is None:
            longest = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)
            # A normaliser such as NFC merges at most four characters into one.
            self._longest_token = longest * (1 if self._backend.normalizer is None else 4)
        return self._longest_token

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        with self._lock:
            if self._apart is None:
                self._apart = _SpecialsApart(self._backend)
        return self._apart.encode(parts)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def added_tokens(self) -> dict[int, AddedToken]:
        return self._backend.get_added_tokens_decoder()

    def to_json(self) -> str:
        return self._backend.to_str()


def _ids(backend: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    if len(text) < LONG_TEXT:
        return backend.encode(text, add_special_tokens=add_special_tokens).ids
    ids = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    if len(text) >= HUGE_TEXT:
        return_free_memory()
    return ids


class _SpecialsApart:
    """A copy of a tokenizer in which special tokens have random texts, so that no client's text contains such a token.

    All other text is tokenised as by `backend`. In particular, an added token ends the text before it and may take
    adjacent spaces.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self._tokenizer = Tokenizer.from_str(backend.to_str())  # a copy: the setting would also affect other calls
        self._tokenizer.encode_special_tokens = True
        secret = secrets.token_hex(8)
        self._special = {i: token for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._names = {token_id: token.content + secret for token_id, token in self._special.items()}
        self._break = secret
        self._tokenizer.add_tokens([_named(token, self._names[i]) for i, token in self._special.items()])
        self._tokenizer.add_tokens([AddedToken(self._break, normalized=False)])
        self._ids = {self._tokenizer.token_to_id(name): token_id for token_id, name in self._names.items()}
        self._break_id = self._tokenizer.token_to_id(self._break)
        # Characters outside the vocabulary map to the unknown token, which may be special.
        self._of_no_text = self._special.keys() - set(_ids(self._tokenizer, UNKNOWN, False))

    def encode(self, parts: Sequence[str | int]) -> list[int]:
        ids = self._encode(parts)
        if not self._of_no_text.isdisjoint(ids):  # a vocabulary may hold the text of a special token like any other
            ids = self._encode([part if isinstance(part, int) else self._broken(part) for part in parts])
        return [self._ids.get(token_id, token_id) for token_id in ids if token_id != self._break_id]

    def _encode(self, parts: Sequence[str | int]) -> list[int]:
        written = (self._names[part] if isinstance(part, int) else part for part in parts)
        return _ids(self._tokenizer, "".join(written), False)

    def _broken(self, text: str) -> str:
        for token in self._special.values():
            text = text.replace(token.content, self._break.join((token.content[:1], token.content[1:])))
        return text


def _named(token: AddedToken, content: str) -> AddedToken:
    return AddedToken(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=False,
    )


class SlowTokenizerBackend:
    """Runs a Python tokenizer of transformers."""

    def __init__(self, hf: PreTrainedTokenizerBase) -> None:
        self._hf = hf
        self._vocabulary = hf.get_vocab()
        self._tokens = {index: token for token, index in self._vocabulary.items()}
        self.token_to_id = self._vocabulary.get
        self.id_to_token = self._tokens.get

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._hf(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return [self._hf(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"] for text in texts]

    def join(self, first: list[int], second: list[int], most: int | None) -> Pair:
        _require_room(most, self._hf.num_special_tokens_to_add(pair=True))
        options = {} if most is None else {"truncation": "longest_first", "max_length": most}
        joined = self._hf.prepare_for_model(first, second, return_token_type_ids=True, verbose=False, **options)  # type: ignore[attr-defined]
        return Pair.of(joined["input_ids"], joined.get("token_type_ids", ()))

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        found = ([part] if isinstance(part, int) else self._hf(part, **options)["input_ids"] for part in parts)
        return [token_id for ids in found for token_id in ids]

    def longest_token(self) -> int | None:
        return None

    def decode(self, token_ids: Sequence[int]) -> str:
        text = self._hf.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return cast(str, text)

    def added_tokens(self) -> dict[int, AddedToken]:
        plain = {i: token for i, token in self._hf.added_tokens_decoder.items() if not token.special}
        special = zip(self._hf.all_special_ids, self._hf.all_special_tokens, strict=True)
        return plain | {i: AddedToken(token, special=True, normalized=False) for i, token in special}

    def to_json(self) -> str:
        raise ValueError("structured_outputs needs a tokenizer of the library `tokenizers`, and this is a slow one")

"""Text to token ids and back, by the library `tokenizers` or by transformers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Words(Protocol):
    """What turns text into token ids and back."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def encode_as_text(self, text: str) -> list[int]:
        """Without special tokens: what looks like one is text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Special tokens included; ids that are unknown add nothing."""
        ...

    def token_to_id(self, token: str) -> int | None: ...

    def id_to_token(self, token_id: int) -> str | None: ...

    def special_ids(self) -> frozenset[int]: ...

    def to_json(self) -> str: ...


class FastWords:
    """By the library `tokenizers`."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self.token_to_id = backend.token_to_id
        self.id_to_token = backend.id_to_token
        self._as_text: Tokenizer | None = None
        self._lock = threading.Lock()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_as_text(self, text: str) -> list[int]:
        with self._lock:
            if self._as_text is None:  # a copy: the setting would hold for texts that others encode meanwhile
                self._as_text = Tokenizer.from_str(self._backend.to_str())
                self._as_text.encode_special_tokens = True
        return self._as_text.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def special_ids(self) -> frozenset[int]:
        return frozenset(index for index, token in self._backend.get_added_tokens_decoder().items() if token.special)

    def to_json(self) -> str:
        return self._backend.to_str()


class SlowWords:
    """By the Python code that transformers has for some tokenizers."""

    def __init__(self, hf: PreTrainedTokenizerBase) -> None:
        self._hf = hf
        self._vocabulary = hf.get_vocab()
        self._tokens = {index: token for token, index in self._vocabulary.items()}
        self.token_to_id = self._vocabulary.get
        self.id_to_token = self._tokens.get

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._hf(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]

    def encode_as_text(self, text: str) -> list[int]:
        return self._hf(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]

    def decode(self, token_ids: Sequence[int]) -> str:
        text = self._hf.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return cast(str, text)

    def special_ids(self) -> frozenset[int]:
        return frozenset(self._hf.all_special_ids)

    def to_json(self) -> str:
        raise ValueError("structured_outputs needs a tokenizer of the library `tokenizers`, and this is a slow one")

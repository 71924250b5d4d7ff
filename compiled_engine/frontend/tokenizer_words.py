"""Text to token ids and back, by the library `tokenizers` or by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Words(Protocol):
    """What turns text into token ids and back."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Special tokens included; ids that are unknown add nothing."""
        ...

    def token_to_id(self, token: str) -> int | None: ...

    def id_to_token(self, token_id: int) -> str | None: ...

    def special_ids(self) -> frozenset[int]: ...


class FastWords:
    """By the library `tokenizers`."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self.token_to_id = backend.token_to_id
        self.id_to_token = backend.id_to_token

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def special_ids(self) -> frozenset[int]:
        return frozenset(index for index, token in self._backend.get_added_tokens_decoder().items() if token.special)


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

    def decode(self, token_ids: Sequence[int]) -> str:
        text = self._hf.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return cast(str, text)

    def special_ids(self) -> frozenset[int]:
        return frozenset(self._hf.all_special_ids)

"""The vocabulary that grammars are compiled for: its own file, as the frontend imports no more of grammars."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GrammarVocabulary:
    """A tokenizer and the tokens of a model."""

    tokenizer: str  # in the format of tokenizer.json
    vocab_size: int  # width of the logits
    eos_token_ids: frozenset[int]

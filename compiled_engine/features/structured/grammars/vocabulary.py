"""The vocabulary that grammars are compiled for.

It has a module of its own because the frontend imports nothing else of this package.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiled_engine.engine.messages import ControlCall


@dataclass(frozen=True)
class GrammarVocabulary:
    """A model's tokenizer, the size of its vocabulary, and its end-of-sequence tokens."""

    tokenizer: str  # in the format of tokenizer.json
    vocab_size: int  # width of the logits
    eos_token_ids: frozenset[int]

    def as_call(self) -> ControlCall:
        """Return the control call that gives a core the vocabulary, before its first request with a grammar."""
        eos_token_ids = sorted(self.eos_token_ids)
        arguments = {"tokenizer": self.tokenizer, "vocab_size": self.vocab_size, "eos_token_ids": eos_token_ids}
        return ControlCall("set_vocabulary", arguments)

"""Converts grammars and token masks of requests for the engine core, and gives the core the vocabulary."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from compiled_engine.engine.messages import EngineRequest
from compiled_engine.features.structured.extras import NAME, extras_of
from compiled_engine.features.structured.grammars.text import grammar_text
from compiled_engine.features.structured.grammars.vocabulary import GrammarVocabulary
from compiled_engine.frontend.request_hooks import NO_PART, AsyncCore, Core, RequestFeature, RequestPart
from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.sampling.params import SamplingParams


class StructuredRequests(RequestFeature):
    """Converts structured_outputs to grammars, and gives the core the vocabulary before the first grammar.

    `objects_allowed` is "" if the engine takes objects such as token masks; otherwise it is the condition under which
    it would take them, for errors.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: frozenset[int], objects_allowed: str = ""
    ) -> None:
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids
        self._objects_allowed = objects_allowed
        self._has_vocabulary = False  # the core has the vocabulary

    @cached_property
    def vocabulary(self) -> GrammarVocabulary:
        """The vocabulary, which the core needs before its first request with a grammar.

        Raises ValueError without a tokenizer, or if the library `tokenizers` cannot read the tokenizer.
        """
        if self._tokenizer is None:
            raise ValueError("structured_outputs needs a tokenizer, and there is none")
        return GrammarVocabulary(self._tokenizer.to_json(), self._vocab_size, self._eos_token_ids)

    def check(self, params: SamplingParams) -> None:
        if self._tokenizer is None and params.structured_outputs:
            raise ValueError(f"structured_outputs needs a tokenizer, got {params.structured_outputs!r} without one")

    def parts(self, params: Sequence[SamplingParams], given: Mapping[str, Any]) -> Sequence[RequestPart]:
        for each in params:
            if each.structured_outputs is not None or each.token_mask is not None:
                return [self._part(each) for each in params]
        return ()

    def _part(self, params: SamplingParams) -> RequestPart:
        if params.structured_outputs is not None:
            return RequestPart(extras_of(grammar_text(params.structured_outputs)))
        if params.token_mask is not None and self._objects_allowed:
            raise ValueError(f"sampling_params.token_mask must be None {self._objects_allowed}")
        return NO_PART if params.token_mask is None else RequestPart(given=params.token_mask)

    def is_slow(self, params: object) -> bool:
        return getattr(params, "structured_outputs", None) is not None

    def before(self, requests: Sequence[EngineRequest], core: Core) -> None:
        if not self._has_vocabulary and any(NAME in each.extras for each in requests):
            self._give(self.vocabulary, core)

    async def before_async(self, requests: Sequence[EngineRequest], core: AsyncCore) -> None:
        if any(NAME in each.extras for each in requests):
            await self.give_vocabulary(core)

    async def give_vocabulary(self, core: AsyncCore) -> None:
        """Give the core the vocabulary, once. Raises the errors of `vocabulary`."""
        if not self._has_vocabulary:
            self._give(await asyncio.to_thread(lambda: self.vocabulary), core)

    def _give(self, vocabulary: GrammarVocabulary, core: Core | AsyncCore) -> None:
        if not self._has_vocabulary:
            self._has_vocabulary = True
            core.tell(vocabulary.as_call())

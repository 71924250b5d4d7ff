"""Requests with a grammar or a token mask, as the frontend makes them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_tokenizers import byte_level
from token_masks import OneOf

from compiled_engine.engine.messages import ControlCall, RequestLimits
from compiled_engine.features.structured.extras import grammar_of
from compiled_engine.features.structured.frontend.requests import StructuredRequests
from compiled_engine.features.structured.grammars.vocabulary import GrammarVocabulary
from compiled_engine.frontend.input_processor import InputProcessor
from compiled_engine.frontend.prepared_request import PreparedRequest
from compiled_engine.frontend.prompts import parse_prompts
from compiled_engine.sampling.params import SamplingParams

EOS = frozenset({1})
VOCAB_SIZE = len(byte_level().hf)
GRAMMAR = SamplingParams(structured_outputs={"regex": "a+"})  # type: ignore[arg-type]


def process(params: SamplingParams, *, has_tokenizer: bool = True, objects_allowed: str = "") -> PreparedRequest:
    tokenizer = byte_level() if has_tokenizer else None
    feature = StructuredRequests(tokenizer, VOCAB_SIZE, EOS, objects_allowed)
    processor = InputProcessor(tokenizer, RequestLimits(VOCAB_SIZE, 20, 20), EOS, features=[feature])
    (request,) = processor.process(parse_prompts([[3]]), params)
    return request


def test_a_grammar_is_in_the_request_and_needs_a_tokenizer() -> None:
    (child,) = process(GRAMMAR).engine_requests
    assert "a+" in str(grammar_of(child))
    assert child.sampling_params.structured_outputs is None
    (plain,) = process(SamplingParams()).engine_requests
    assert plain.extras == {}
    with pytest.raises(ValueError, match=r"sampling_params: structured_outputs needs a tokenizer, got .* without one"):
        process(GRAMMAR, has_tokenizer=False)


def test_the_vocabulary_is_the_tokenizers() -> None:
    vocabulary = StructuredRequests(byte_level(), VOCAB_SIZE, EOS).vocabulary
    assert vocabulary == GrammarVocabulary(byte_level().to_json(), VOCAB_SIZE, EOS)
    with pytest.raises(ValueError, match="structured_outputs needs a tokenizer, and there is none"):
        _ = StructuredRequests(None, VOCAB_SIZE, EOS).vocabulary


@pytest.mark.parametrize("is_async", [False, True])
def test_the_core_gets_the_vocabulary_once_before_the_first_grammar(is_async: bool) -> None:
    """No answer is awaited; a request without a vocabulary ends with its own error."""
    feature, calls = StructuredRequests(byte_level(), VOCAB_SIZE, EOS), list[ControlCall]()
    core: Any = SimpleNamespace(tell=calls.append)

    def ready(params: SamplingParams) -> int:
        requests = process(params).engine_requests
        if is_async:
            asyncio.run(feature.before_async(requests, core))
        else:
            feature.before(requests, core)
        return len(calls)

    assert [ready(params) for params in (SamplingParams(), GRAMMAR, GRAMMAR)] == [0, 1, 1]
    assert calls == [feature.vocabulary.as_call()]


def test_a_token_mask_comes_besides_the_request_where_the_core_is_near() -> None:
    mask: Any = OneOf([[5]], VOCAB_SIZE)
    params = SamplingParams(token_mask=mask)
    request = process(params)
    assert request.given is mask
    assert request.engine_requests[0].sampling_params.token_mask is None
    with pytest.raises(ValueError, match=r"^sampling_params.token_mask must be None unless core is 'in_process'$"):
        process(params, objects_allowed="unless core is 'in_process'")

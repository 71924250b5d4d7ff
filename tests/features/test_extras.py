"""Extras of messages: what one side writes is what the other side reads, in the same process or in another."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import pytest

from compiled_engine.engine.control import apply
from compiled_engine.engine.messages import ControlCall, EngineOutput, EngineRequest, LateInputs
from compiled_engine.features.adapters import extras as adapters
from compiled_engine.features.adapters.extras import AdapterRef
from compiled_engine.features.pooling import extras as pooling
from compiled_engine.features.prompt_logprobs import extras as prompt_logprobs
from compiled_engine.features.structured import extras as structured
from compiled_engine.features.structured.constraints import GrammarQueue
from compiled_engine.features.structured.grammars.vocabulary import GrammarVocabulary
from compiled_engine.features.structured.plan import Structured
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.sampled_tokens import LogprobRows, TokenLogprobs

Message = TypeVar("Message", EngineRequest, EngineOutput, LateInputs, ControlCall)
PLAIN = EngineRequest("r", (1, 2), SamplingParams())


def sent(message: Message, crosses: bool) -> Message:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)) if crosses else message


def test_a_plain_request_has_none() -> None:
    assert adapters.extras_of(None) == structured.extras_of(None) == {}
    assert pooling.extras_of(by_token=False, second_text=None) == {}
    assert prompt_logprobs.resumed(PLAIN, prompt_logprobs.FIRST) == {}
    assert (adapters.adapter_of(PLAIN), structured.grammar_of(PLAIN)) == (None, None)
    assert (pooling.vectors_in({}), prompt_logprobs.rows_in({})) == (None, None)
    assert prompt_logprobs.next_position(PLAIN) == 1


@pytest.mark.parametrize("crosses", [False, True])
def test_requests_have_their_adapters(crosses: bool) -> None:
    refs = [AdapterRef("x", "/x", "one"), None, AdapterRef("y", "/y"), AdapterRef("x", "/x", "one")]
    requests = [
        sent(EngineRequest("r", (1,), SamplingParams(), extras=adapters.extras_of(ref)), crosses) for ref in refs
    ]
    assert [adapters.adapter_of(each) for each in requests] == refs


def test_each_adapter_is_named_once() -> None:
    refs = [AdapterRef("x", "/x", "one"), None, AdapterRef("y", "/y"), AdapterRef("x", "/x", "one")]
    requests = [EngineRequest("r", (1,), SamplingParams(), extras=adapters.extras_of(ref)) for ref in refs]
    assert adapters.adapters_of(requests) == [refs[0], refs[2]]


@pytest.mark.parametrize("crosses", [False, True])
def test_requests_of_several_features(crosses: bool) -> None:
    ref = AdapterRef("x", "/x")
    extras = structured.extras_of("a grammar") | adapters.extras_of(ref)
    begun = EngineRequest("r", (1, 2), SamplingParams(), extras=extras)
    rest = sent(msgspec.structs.replace(begun, extras=prompt_logprobs.resumed(begun, 5)), crosses)
    assert (structured.grammar_of(rest), adapters.adapter_of(rest)) == ("a grammar", ref)
    assert prompt_logprobs.next_position(rest) == 5
    assert prompt_logprobs.next_position(begun) == 1


@pytest.mark.parametrize("crosses", [False, True])
def test_outputs_have_vectors_and_rows(crosses: bool) -> None:
    vectors, rows = pooling.Vectors(3, 2, bytes(16)), LogprobRows.of([TokenLogprobs((5, 7), (-0.25, -1.5), 1)])
    pooled = sent(EngineOutput("r", (), extras={pooling.NAME: vectors}), crosses)
    assert pooling.vectors_in(pooled.extras) == vectors
    scored = sent(EngineOutput("r", (4,), extras={prompt_logprobs.NAME: (2, rows)}), crosses)
    assert prompt_logprobs.rows_in(scored.extras) == (2, rows)
    assert pooling.vectors_in(scored.extras) is None


@pytest.mark.parametrize("crosses", [False, True])
def test_steps_have_their_masks(crosses: bool) -> None:
    made = structured.TokenMasks(["a", "b"], memoryview(bytes(range(16))))
    late = sent(LateInputs({structured.NAME: made}), crosses)
    masks = structured.masks_in(late.extras[structured.NAME])
    assert (masks.request_ids, bytes(masks.words)) == (["a", "b"], bytes(range(16)))


@pytest.mark.parametrize("crosses", [False, True])
def test_a_core_is_given_the_vocabulary_by_a_control_call(crosses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[GrammarVocabulary] = []
    monkeypatch.setattr(GrammarQueue, "set_vocabulary", lambda queue, vocabulary: given.append(vocabulary))
    vocabulary = GrammarVocabulary("{}", 9, frozenset({0, 2}))
    call = sent(vocabulary.as_call(), crosses)
    feature = Structured(2, 9)
    apply(call, {name: getattr(feature, name) for name in feature.calls})
    assert given == [vocabulary]

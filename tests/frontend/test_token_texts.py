"""decoded_token of log-probabilities: the texts of consecutive tokens join to the completion's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_fallback, byte_level

from compiled_engine.engine.messages import EngineOutput, EngineRequest
from compiled_engine.features.prompt_logprobs.extras import NAME
from compiled_engine.frontend.completion import Completion
from compiled_engine.frontend.logprob_list import TokenTexts
from compiled_engine.frontend.output_processor import RunningRequest
from compiled_engine.frontend.outputs import CompletionOutput
from compiled_engine.frontend.prepared_request import PreparedRequest
from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.sampled_tokens import LogprobRows, TokenLogprobs

EMOJI = ("ð", "Ł", "ĺ", "ģ")  # the four bytes of 😁, as byte-level tokenizers write them


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    vocabulary = tokenizer.hf.get_vocab()
    return [vocabulary[token] for token in tokens]


def complete(
    tokenizer: Tokenizer, prompt: Sequence[int], token_ids: Sequence[int], params: SamplingParams
) -> CompletionOutput:
    """One token a step, the last one ends it by its length."""
    completion = Completion(0, tuple(prompt), params, tokenizer)
    for index, token_id in enumerate(token_ids):
        reason = "length" if index == len(token_ids) - 1 else None
        entry = TokenLogprobs((token_id, 5, 6), (-1.0, -0.5, -0.75), rank=3)
        completion.update(EngineOutput("0", (token_id,), LogprobRows.of([entry]), finish_reason=reason))
    return completion.snapshot()


def decoded_tokens(output: CompletionOutput) -> list[str]:
    assert output.logprobs is not None
    texts = [next(iter(entry.values())).decoded_token for entry in output.logprobs]
    assert None not in texts
    return [text for text in texts if text is not None]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_they_join_to_the_text_of_any_tokens(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Also of bytes that make no character. Special tokens, which the text leaves out, have a text of their own."""
    plain = [i for i in range(len(tokenizer.hf)) if i not in tokenizer.special_ids]
    prompt, token_ids = (data.draw(st.lists(st.sampled_from(plain), min_size=1, max_size=20)) for _ in range(2))
    output = complete(tokenizer, prompt, token_ids, SamplingParams(logprobs=2, max_tokens=None))
    assert "".join(decoded_tokens(output)) == output.text


@settings(max_examples=150, deadline=None)
@given(text=st.text(min_size=1, max_size=20))
def test_they_join_to_any_text_and_show_no_part_of_a_character(text: str) -> None:
    tokenizer = byte_level()
    token_ids = tokenizer.encode(text)
    output = complete(tokenizer, tokenizer.encode("a"), token_ids, SamplingParams(logprobs=2))
    texts = decoded_tokens(output)
    assert "".join(texts) == output.text == text
    assert "\N{REPLACEMENT CHARACTER}" in text or "\N{REPLACEMENT CHARACTER}" not in "".join(texts)


def test_the_token_that_completes_a_character_has_it() -> None:
    tokenizer = byte_level()
    ids = ids_of(tokenizer, "a", *EMOJI, "a")
    params = SamplingParams(logprobs=2)
    assert decoded_tokens(complete(tokenizer, ids[:1], ids, params)) == ["a", "", "", "", "😁", "a"]
    assert decoded_tokens(complete(tokenizer, ids[:3], ids[3:], params)) == ["", "😁", "a"]


def test_without_detokenize_there_are_no_texts() -> None:
    tokenizer = byte_level()
    ids = ids_of(tokenizer, "a", *EMOJI, "a")
    output = complete(tokenizer, ids[:1], ids, SamplingParams(logprobs=2, detokenize=False))
    assert output.logprobs is not None
    assert {found.decoded_token for entry in output.logprobs for found in entry.values()} == {None}


def test_what_is_incomplete_at_the_end_is_the_last_tokens() -> None:
    tokenizer = byte_level()
    output = complete(tokenizer, [5], ids_of(tokenizer, "a", *EMOJI[:2]), SamplingParams(logprobs=2))
    assert decoded_tokens(output) == ["a", "", "\N{REPLACEMENT CHARACTER}"]
    assert output.logprobs is not None
    assert len(output.logprobs[-1]) == 3


def test_a_token_keeps_its_space_and_a_special_one_is_named() -> None:
    tokenizer = byte_fallback()
    ids = ids_of(tokenizer, "▁the", "▁a", "</s>", "▁hello")
    params = SamplingParams(logprobs=2)
    assert decoded_tokens(complete(tokenizer, ids[:1], ids[1:], params)) == [" a", "</s>", " hello"]


def test_others_read_as_they_would_in_its_place() -> None:
    tokenizer = byte_level()
    first, second, third, fourth, a = ids_of(tokenizer, *EMOJI, "a")
    texts = TokenTexts(tokenizer, [a])
    assert texts.push([first, a, fourth]) == ["", "a", ""]
    assert texts.push([second, a]) == ["", "a"]
    assert texts.push([third, fourth]) == ["", ""]
    assert texts.push([a, fourth, third])[1:] == ["😁", "😘"]


@settings(max_examples=60, deadline=None)
@given(text=st.text(min_size=2, max_size=20), cut=st.integers(0, 20))
def test_those_of_a_prompt_join_to_its_text(text: str, cut: int) -> None:
    """It comes in chunks, wherever they end."""
    tokenizer = byte_level()
    prompt = [*tokenizer.encode("a"), *tokenizer.encode(text)]
    params = SamplingParams(prompt_logprobs=0)
    requests = (EngineRequest("0", tuple(prompt), params),)
    state = RunningRequest(PreparedRequest("0", text, tuple(prompt), params, requests), tokenizer, 0.0)
    entries = tuple(TokenLogprobs((token_id,), (-1.0,), rank=1) for token_id in prompt[1:])
    for first, part in ((1, entries[:cut]), (1 + len(entries[:cut]), entries[cut:])):
        state.update(EngineOutput("0", (), extras={NAME: (first, LogprobRows.of(part))}), 0.0)
    found = state.snapshot().prompt_logprobs
    assert found is not None
    assert "".join(str(entry[i].decoded_token) for i, entry in zip(prompt[1:], found[1:], strict=True) if entry) == text


@pytest.mark.parametrize(
    ("tokens", "skip", "texts"),
    [
        (["<0xC3>", "<0xA9>", "o"], True, ["", "", "éo"]),
        (["<0xC3>", "<0xA9>", "<s>", "o"], True, ["", "", "<s>", "éo"]),
        (["<0xC3>", "<s>", "<0xA9>", "o"], True, ["", "<s>", "", "éo"]),
        (["<0xC3>", "<0xA9>", "<s>"], True, ["", "", "é<s>"]),
        (["<0xC3>", "<0xA9>", "<s>", "o"], False, ["", "", "é<s>", "o"]),
        (["<0xC3>", "<s>", "<0xA9>", "o"], False, ["", "\ufffd<s>", "", "\ufffdo"]),
    ],
)
def test_characters_of_byte_tokens_come_with_the_token_behind_their_run(
    tokens: list[str], skip: bool, texts: list[str]
) -> None:
    """A special token ends a run only where it is part of the text."""
    tokenizer = byte_fallback()
    params = SamplingParams(logprobs=0, skip_special_tokens=skip, max_tokens=None)
    assert decoded_tokens(complete(tokenizer, [5], ids_of(tokenizer, *tokens), params)) == texts

"""text_offset of an echoed prompt: where its tokens are in the text of the answer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_fallback, byte_level, with_bos

from compiled_engine.frontend.logprob_list import GrowingLogprobs, first_text
from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.sampled_tokens import LogprobRows, TokenLogprobs
from compiled_engine.server.logprob_shapes import CompletionLogprobs, echoed_logprobs

KINDS = {"byte_level": byte_level, "with_bos": with_bos, "byte_fallback": byte_fallback}


def echoed(tokenizer: Tokenizer, text: str, token_ids: list[int], skip: bool = True) -> CompletionLogprobs:
    params = SamplingParams(prompt_logprobs=0, skip_special_tokens=skip)
    growing = GrowingLogprobs(0, tokenizer, token_ids[:1], params, first=[None])
    growing.add(LogprobRows.of([TokenLogprobs((each,), (-1.0,), rank=1) for each in token_ids[1:]]))
    growing.end()
    first = first_text(tokenizer, token_ids, params)
    return echoed_logprobs(growing.since(0), token_ids, text, first, tokenizer.special_ids, as_ids=False)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), as_ids=st.booleans(), skip=st.booleans())
def test_places_fit_the_text(kind: str, data: st.DataObject, as_ids: bool, skip: bool) -> None:
    """Also behind a first character of several tokens, a token before all texts, and special tokens within a text."""
    tokenizer = KINDS[kind]()
    parts = st.sampled_from(["é", "😁", "a", " the", "hello", "a</s>", "\n", "你"])
    text = "".join(data.draw(st.lists(parts, min_size=1, max_size=8)))
    token_ids = tokenizer.encode(text)
    if as_ids:
        text = tokenizer.decode(token_ids)
    found = echoed(tokenizer, text, token_ids, skip)
    covered = ""
    for token_id, token, offset in zip(token_ids, found.tokens, found.text_offset, strict=True):
        if not text.startswith(token, offset):  # the token before all texts, or a space that the tokenizer put there
            assert (tokenizer.decode([token_id]), offset) == ("<s>", 0) or token == " "
        elif token and offset >= len(covered):
            assert not text[len(covered) : offset].strip()
            covered = text[: offset + len(token)]
    assert not text[len(covered) :].strip()


def test_a_prompt_that_was_normalised_is_found_again() -> None:
    tokenizer = byte_level()
    token_ids = [each for part in ("caf", "é", " hello", " the") for each in tokenizer.encode(part)]
    found = echoed(tokenizer, "cafe\u0301 hello the", token_ids)
    assert (found.tokens[-1], found.text_offset[-1]) == (" the", 11)


def test_a_space_that_a_tokenizer_puts_behind_a_special_token_is_not_taken_for_a_later_one() -> None:
    tokenizer = byte_fallback()
    text = "a</s>你 the</s> the"
    found = echoed(tokenizer, text, tokenizer.encode(text))
    places = dict(zip(found.tokens, found.text_offset, strict=True))
    assert (places["</s>"], places["你 "], found.text_offset[-1]) == (10, 5, len(text) - 1)

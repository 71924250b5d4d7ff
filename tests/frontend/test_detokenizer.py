from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_fallback, byte_level, word_piece, wrap
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from compiled_engine.frontend.detokenizer import Detokenizer
from compiled_engine.frontend.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
EMOJI = ("ð", "Ł", "ĺ", "ģ")  # the four bytes of 😁, as byte-level tokenizers write them


def deltas(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push([token_id]) for token_id in token_ids), detokenizer.flush()]


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    vocabulary = tokenizer.hf.get_vocab()
    return [vocabulary[token] for token in tokens]


def whole(tokenizer: Tokenizer, token_ids: Sequence[int], skip: bool) -> str:
    decoded = tokenizer.hf.decode(list(token_ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert isinstance(decoded, str)
    return decoded


@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_deltas_of_any_tokens_join_to_the_whole_decode(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    # Two ids past the vocabulary stand for the padding that models have there.
    token_ids = data.draw(st.lists(st.integers(0, len(tokenizer.hf) + 1), max_size=30))
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    assert "".join(deltas(detokenizer, token_ids)) == whole(tokenizer, token_ids, skip)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans(), spaces=st.booleans())
def test_it_does_not_matter_how_many_tokens_come_at_a_time(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool, spaces: bool
) -> None:
    prompt, token_ids = (data.draw(st.lists(st.integers(0, len(tokenizer.hf) + 1), max_size=30)) for _ in range(2))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=4)))
    one, other = (
        Detokenizer(tokenizer, prompt, skip_special_tokens=skip, spaces_between_special_tokens=spaces) for _ in range(2)
    )
    pieces = [token_ids[start:end] for start, end in itertools.pairwise([0, *cuts, len(token_ids)])]
    assert "".join(map(one.push, pieces)) + one.flush() == "".join(deltas(other, token_ids))


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=30))
def test_deltas_of_any_text_join_to_it_and_never_hold_part_of_a_character(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text)
    *pushed, flushed = deltas(Detokenizer(tokenizer), token_ids)
    assert "".join(pushed) + flushed == whole(tokenizer, token_ids, skip=True)
    assert REPLACEMENT in text or REPLACEMENT not in "".join(pushed)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_text_goes_on_where_the_prompt_ended(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    text = data.draw(st.text("helo a.wrd你é", min_size=1, max_size=10))
    prompt = tokenizer.encode(text)
    token_ids = data.draw(st.lists(st.sampled_from(tokenizer.encode(text + " hello")), max_size=10))
    completion = "".join(deltas(Detokenizer(tokenizer, prompt, skip_special_tokens=skip), token_ids))
    prompt_text = whole(tokenizer, prompt, skip)
    if whole(tokenizer, prompt + token_ids, skip).startswith(prompt_text):
        assert prompt_text + completion == whole(tokenizer, prompt + token_ids, skip)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_text_goes_on_after_any_cut_of_any_tokens(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    """Bytes are drawn often, so that most cuts are within a character or beside invalid bytes."""
    bytes_of = sorted(tokenizer.byte_ids) or range(len(tokenizer.hf))
    token = st.one_of(st.integers(0, len(tokenizer.hf) + 1), st.sampled_from(bytes_of))
    prompt, token_ids = (data.draw(st.lists(token, max_size=12)) for _ in range(2))
    completion = "".join(deltas(Detokenizer(tokenizer, prompt, skip_special_tokens=skip), token_ids))
    before, both = (whole(tokenizer, ids, skip) for ids in (prompt, prompt + token_ids))
    assert both.endswith(completion)
    # A prompt of a space as a byte has no text, as a first space goes, and is U+FFFD with an invalid byte after it.
    has_lost_bytes = not before and not tokenizer.byte_ids.keys().isdisjoint(prompt)
    if REPLACEMENT not in before and both.startswith(before) and not has_lost_bytes:
        assert before + completion == both


def bytes_as_tokens(tokenizer: Tokenizer, character: str) -> list[int]:
    if tokenizer.byte_ids:
        return ids_of(tokenizer, *(f"<0x{byte:02X}>" for byte in character.encode()))
    return tokenizer.encode(character)


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["byte_level", "byte_fallback"])
@settings(max_examples=300, deadline=None)
@given(text=st.text("a é你€😀😁\n\ufffd", min_size=1, max_size=8), data=st.data())
def test_a_character_that_is_cut_belongs_to_the_output(tokenizer: Tokenizer, text: str, data: st.DataObject) -> None:
    """No text is lost or repeated, wherever the tokens are cut."""
    tokens = [(place, each) for place, c in enumerate(text) for each in bytes_as_tokens(tokenizer, c)]
    cut = data.draw(st.integers(0, len(tokens)))
    first = tokens[cut][0] if cut < len(tokens) else len(text)
    is_inside = 0 < cut < len(tokens) and tokens[cut - 1][0] == first
    assume(not (is_inside and text[first] == REPLACEMENT))  # its beginning reads as it does itself
    ids = [each for _, each in tokens]
    detokenizer = Detokenizer(tokenizer, [*ids_of(tokenizer, "h"), *ids[:cut]])
    assert "".join(deltas(detokenizer, ids[cut:])) == text[first:]


@pytest.mark.parametrize(
    ("tokens", "text"), [(("<0xAC>", "h"), "€h"), (("h", "e"), "he"), (("<0xC3>", "h"), "\ufffdh")]
)
def test_bytes_that_a_prompt_began(tokens: tuple[str, ...], text: str) -> None:
    """The output completes the bytes, or they belong to the prompt."""
    tokenizer = byte_fallback()
    prompt = ids_of(tokenizer, "▁a", "<0xC3>", "<0xA9>", "<0xE2>", "<0x82>")
    assert "".join(deltas(Detokenizer(tokenizer, prompt), ids_of(tokenizer, *tokens))) == text


class CountingTokenizer:
    """Counts the tokens that are decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.num_decoded = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, token_ids: Sequence[int]) -> str:
        self.num_decoded += len(token_ids)
        return self._tokenizer.decode(token_ids)


@cache
def with_odd_tokens() -> Tokenizer:
    """A byte-level tokenizer with an empty token, and a whole token whose text is U+FFFD."""
    described = json.loads(byte_level().to_json())
    vocabulary = described["model"]["vocab"]
    vocabulary[""] = 10 + max(*vocabulary.values(), *(token["id"] for token in described["added_tokens"]))
    backend = Backend.from_str(json.dumps(described))
    backend.add_tokens([AddedToken(REPLACEMENT)])
    return wrap(backend)


@cache
def words_and_nothing() -> Tokenizer:
    described = json.loads(word_piece().to_json())
    vocabulary = described["model"]["vocab"]
    vocabulary["##"] = len(vocabulary)
    return wrap(Backend.from_str(json.dumps(described)))


@cache
def bytes_and_replacement() -> Tokenizer:
    backend = Backend.from_str(byte_fallback().to_json())
    backend.add_tokens([AddedToken(REPLACEMENT)])
    return wrap(backend)


HELD = {
    "continuation bytes": (with_odd_tokens, ["Ģ"]),
    "beginnings": (with_odd_tokens, ["ð"]),
    "unfinished characters": (with_odd_tokens, ["ð", "Ł", "ĺ"]),
    "no text": (with_odd_tokens, [""]),
    "no text within characters": (with_odd_tokens, ["ð", "", "Ł", ""]),
    "whole U+FFFD": (with_odd_tokens, [REPLACEMENT]),
    "empty parts of words": (words_and_nothing, ["##"]),
    "byte tokens": (byte_fallback, ["<0xC3>", "<0xA9>"]),
    "byte tokens that are no text": (byte_fallback, ["<0xA9>"]),
    "byte tokens and U+FFFD": (bytes_and_replacement, ["<0xC3>", REPLACEMENT]),
}


@pytest.mark.parametrize("kind", HELD)
@pytest.mark.parametrize("is_prompt", [False, True], ids=["output", "prompt"])
def test_tokens_that_make_no_character_are_decoded_a_bounded_number_of_times(kind: str, is_prompt: bool) -> None:
    """Also before another of them, with alternatives to each; their text is that of the whole."""
    make, tokens = HELD[kind]
    tokenizer = make()
    once = ids_of(tokenizer, *tokens)
    token_ids = [once[0], *once * (2000 // len(once))]
    counting = CountingTokenizer(tokenizer)
    as_tokenizer: Any = counting
    detokenizer = Detokenizer(as_tokenizer, token_ids if is_prompt else ())
    texts = []
    for token_id in token_ids:
        detokenizer.peek(token_id)
        texts.append(detokenizer.push([token_id]))
    text = "".join(texts) + detokenizer.flush()
    assert counting.num_decoded < 60 * len(token_ids)
    if not is_prompt:
        assert text == whole(tokenizer, token_ids, skip=True)


def test_tokens_that_came_at_once_are_not_decoded_with_each_that_is_held() -> None:
    tokenizer = with_odd_tokens()
    counting: Any = CountingTokenizer(tokenizer)
    detokenizer = Detokenizer(counting)
    words = tokenizer.encode("hello world " * 300, add_special_tokens=False)
    text = detokenizer.push(words)
    for token_id in ids_of(tokenizer, "Ģ") * 12:
        text += detokenizer.push([token_id])
    assert text.strip() == "hello world " * 299 + "hello world"
    assert counting.num_decoded < 3 * len(words)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), kind=st.sampled_from(["continuation bytes", "empty parts of words", "byte tokens and U+FFFD"]))
def test_deltas_of_long_runs_join_to_the_whole_decode(data: st.DataObject, kind: str) -> None:
    make, _ = HELD[kind]
    tokenizer = make()
    odd = [
        *(
            token
            for token in ("ð", "Ł", "ĺ", "ģ", "Ģ", "Ã", "a", "", "##", REPLACEMENT)
            if token in tokenizer.hf.get_vocab()
        ),
        *(f"<0x{byte:02X}>" for byte in (0xF0, 0x9F, 0x98, 0x81, 0xC3) if tokenizer.byte_ids),
    ]
    runs = st.tuples(st.lists(st.sampled_from(ids_of(tokenizer, *odd)), min_size=1, max_size=4), st.integers(1, 30))
    token_ids = [each for run, times in data.draw(st.lists(runs, max_size=4)) for each in run * times]
    assert "".join(deltas(Detokenizer(tokenizer), token_ids)) == whole(tokenizer, token_ids, skip=True)


def test_a_character_of_several_tokens_comes_out_whole() -> None:
    tokenizer = byte_level()
    assert deltas(Detokenizer(tokenizer), ids_of(tokenizer, *EMOJI)) == ["", "", "", "😁", ""]


def test_a_character_that_the_prompt_began_is_completed() -> None:
    tokenizer = byte_level()
    ids = ids_of(tokenizer, *EMOJI, "a")
    assert deltas(Detokenizer(tokenizer, ids[:2]), ids[2:]) == ["", "😁", "a", ""]


def test_a_run_of_byte_tokens_is_held_until_it_ends() -> None:
    tokenizer = byte_fallback()
    ids = ids_of(tokenizer, "▁a", "<0xC3>", "<0xA9>", "h", "<0xC3>")
    assert deltas(Detokenizer(tokenizer), ids) == ["a", "", "", "éh", "", REPLACEMENT]


@pytest.mark.parametrize(("skip", "text"), [(True, "a the"), (False, "a</s> the")])
def test_skipped_special_tokens_leave_the_spaces_alone(skip: bool, text: str) -> None:
    tokenizer = byte_fallback()
    ids = ids_of(tokenizer, "▁a", "</s>", "▁the")
    assert "".join(deltas(Detokenizer(tokenizer, skip_special_tokens=skip), ids)) == text


@pytest.mark.parametrize(
    ("spaces", "text"), [(True, "hello <s> </s> <|user|> world"), (False, "hello <s></s><|user|> world")]
)
def test_spaces_between_special_tokens(spaces: bool, text: str) -> None:
    tokenizer = word_piece()
    ids = ids_of(tokenizer, "hello", "<s>", "</s>", "<|user|>", "world")
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False, spaces_between_special_tokens=spaces)
    assert "".join(deltas(detokenizer, ids)) == text

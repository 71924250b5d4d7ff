from __future__ import annotations

from typing import Any

import pytest
from tiny_tokenizers import byte_level, with_bos

from compiled_engine.engine.messages import RequestLimits, prefix_root
from compiled_engine.frontend.input_processor import InputProcessor
from compiled_engine.frontend.prepared_request import PreparedRequest
from compiled_engine.frontend.prompts import has_long_text, num_characters, parse_prompts
from compiled_engine.frontend.tokenizer import encode_bad_words
from compiled_engine.sampling.params import SamplingParams

EOS = frozenset({1})
VOCAB_SIZE = len(byte_level().hf)
MAX_MODEL_LEN = 20


def make_processor(
    *, has_tokenizer: bool = True, has_priorities: bool = False, num_slots: int = MAX_MODEL_LEN
) -> InputProcessor:
    limits = RequestLimits(VOCAB_SIZE, MAX_MODEL_LEN, num_slots, has_priorities)
    return InputProcessor(byte_level() if has_tokenizer else None, limits, EOS)


def process(
    prompts: Any, params: Any = None, priority: Any = None, processor: InputProcessor | None = None
) -> list[PreparedRequest]:
    processor = processor or make_processor()
    return processor.process(parse_prompts(prompts), SamplingParams() if params is None else params, priority)


def token_ids(prompts: Any) -> list[tuple[int, ...]]:
    return [request.prompt_token_ids for request in process(prompts)]


def test_every_form_of_prompt() -> None:
    ids = tuple(byte_level().encode("hello world"))
    keyed = [{"prompt": "hello world"}, {"prompt_token_ids": list(ids)}, {"prompt": None, "prompt_token_ids": ids}]
    for prompt in ["hello world", list(ids), ids, *keyed]:
        assert token_ids(prompt) == [ids]
        assert token_ids([prompt, prompt]) == [ids, ids]


def test_the_text_of_a_prompt_is_kept() -> None:
    assert [request.prompt for request in process(["hello", {"prompt": "hello"}, [1, 2]])] == [
        "hello",
        "hello",
        None,
    ]


def test_given_both_the_ids_are_run_and_the_text_is_kept() -> None:
    (request,) = process({"prompt": "hello", "prompt_token_ids": [3, 4]})
    assert (request.prompt, request.prompt_token_ids) == ("hello", (3, 4))


def test_keys_for_other_inputs_may_be_none() -> None:
    nothing = {"multi_modal_data": None, "mm_processor_kwargs": None, "prompt_embeds": None}
    assert token_ids({"prompt_token_ids": [3, 4], **nothing}) == [(3, 4)]
    with pytest.raises(ValueError, match=r"^prompts\['multi_modal_data'\] must be absent: the engine takes only text$"):
        process({"prompt": "hello", **nothing, "multi_modal_data": {"image": 1}})


def test_no_prompts_are_no_requests() -> None:
    assert process([]) == process((), [], []) == []


def test_integers_of_other_kinds_are_token_ids() -> None:
    numpy = pytest.importorskip("numpy")
    assert token_ids(list(numpy.array([3, 4]))) == [(3, 4)]


def test_request_ids_are_never_used_twice() -> None:
    processor = make_processor()
    params = [SamplingParams(n=3), SamplingParams()]
    ids = [
        engine_request.request_id
        for _ in range(2)
        for request in process(["hello", "a"], params, processor=processor)
        for engine_request in request.engine_requests
    ]
    assert len(set(ids)) == 8


BAD_PROMPTS: list[tuple[Any, type[Exception], str]] = [
    (None, TypeError, "prompts must be a string, a list of token ids, .* got None"),
    (7, TypeError, "prompts must be .* got 7"),
    ("", ValueError, "prompts must have at least one token, got ''"),
    (["hello", ""], ValueError, r"prompts\[1\] must have at least one token, got ''"),
    ([[]], ValueError, r"prompts\[0\] must have at least one token, got \[\]"),
    ({"prompt": ""}, ValueError, r"prompts\['prompt'\] must have at least one token, got ''"),
    (
        {"prompt_token_ids": []},
        ValueError,
        r"prompts\['prompt_token_ids'\] must have at least one token, got \[\]",
    ),
    (["hello", 3], TypeError, r"prompts\[1\] must be a string, a list of token ids, .* got 3"),
    ([3, "hello"], TypeError, r"prompts\[1\] must be a token id \(an integer\), got 'hello'"),
    (["a", [3, 1.5]], TypeError, r"prompts\[1\]\[1\] must be a token id \(an integer\), got 1.5"),
    ([[True]], TypeError, r"prompts\[0\]\[0\] must be a token id \(an integer\), got True"),
    ([b"hello"], TypeError, r"prompts\[0\] must be .* got b'hello'"),
    (
        {"text": "a"},
        ValueError,
        "prompts has the unknown key 'text'; known are 'prompt', 'prompt_token_ids', 'cache_salt', "
        "'multi_modal_data', 'mm_processor_kwargs', 'multi_modal_uuids'",
    ),
    ({}, ValueError, "prompts must have 'prompt' or 'prompt_token_ids', got {}"),
    (["a", {"prompt": None}], ValueError, r"prompts\[1\] must have 'prompt' or 'prompt_token_ids', got"),
    ({"prompt": [1], "prompt_token_ids": [1]}, TypeError, r"prompts\['prompt'\] must be a string, got \[1\]"),
    (
        {"prompt": "a", "prompt_token_ids": []},
        ValueError,
        r"prompts\['prompt_token_ids'\] must have at least one token, got",
    ),
    ({"prompt": [1]}, TypeError, r"prompts\['prompt'\] must be a string, got \[1\]"),
    (
        {"prompt_token_ids": "a"},
        TypeError,
        r"prompts\['prompt_token_ids'\] must be a list of token ids, got 'a'",
    ),
    (
        ["a", [3, VOCAB_SIZE]],
        ValueError,
        rf"prompts\[1\]: token 1 must be within the vocabulary, 0 to {VOCAB_SIZE - 1}, got {VOCAB_SIZE}",
    ),
    ([-1], ValueError, "prompts: token 0 must be within the vocabulary, 0 to .*, got -1"),
    (
        [[3] * 19, [3] * 20],
        ValueError,
        r"prompts\[1\] must have at most 19 tokens \(max_model_len 20, less one to generate\), got 20",
    ),
    (["a", "\ud800"], ValueError, r"prompts\[1\] must be valid Unicode, got '\\ud800'"),
]


@pytest.mark.parametrize(("prompts", "error", "message"), BAD_PROMPTS)
def test_bad_prompts(prompts: Any, error: type[Exception], message: str) -> None:
    processor = make_processor()
    with pytest.raises(error, match=message):
        process(prompts, processor=processor)
    assert process("hello", processor=processor)[0].prompt == "hello"


BAD_PARAMS: list[tuple[Any, type[Exception], str]] = [
    (
        {"temperature": 0},
        TypeError,
        "sampling_params must be SamplingParams or a list of them, got {'temperature': 0}",
    ),
    (
        [SamplingParams()],
        ValueError,
        "sampling_params must have one entry for each prompt, got 1 for 2 prompts",
    ),
    ([SamplingParams(), None], TypeError, r"sampling_params\[1\] must be SamplingParams, got None"),
    (
        [SamplingParams(), SamplingParams(stop_token_ids=[VOCAB_SIZE])],
        ValueError,
        rf"sampling_params\[1\]: stop_token_ids\[0\] must be within the vocabulary, 0 to {VOCAB_SIZE - 1}, got",
    ),
    (
        SamplingParams(bad_words=["a", "\ud800"]),
        ValueError,
        r"sampling_params: bad_words\[1\] must be valid Unicode, got '\\ud800'",
    ),
    (
        SamplingParams(bad_words=[" "]),
        ValueError,
        r"sampling_params: bad_words\[0\] must have a token after leading spaces and line ends, got ' '",
    ),
    (
        SamplingParams(min_tokens=19, max_tokens=None),
        ValueError,
        r"prompts\[1\]: min_tokens must be at most 18 after 2 prompt tokens \(max_model_len 20\), got 19",
    ),
]


@pytest.mark.parametrize(("params", "error", "message"), BAD_PARAMS)
def test_bad_sampling_params(params: Any, error: type[Exception], message: str) -> None:
    processor = make_processor()
    with pytest.raises(error, match=message):
        process([[3], [3, 4]], params, processor=processor)
    assert len(process([[3], [3, 4]], processor=processor)) == 2


def test_sampling_params_for_each_prompt() -> None:
    params = [SamplingParams(max_tokens=3), SamplingParams(max_tokens=5)]
    requests = process(["hello", "a"], params)
    assert [request.engine_requests[0].sampling_params.max_tokens for request in requests] == [3, 5]


def test_unlimited_max_tokens_reach_to_the_end_of_the_model() -> None:
    (request,) = process([3, 4, 5], SamplingParams(max_tokens=None))
    assert request.engine_requests[0].sampling_params.max_tokens == MAX_MODEL_LEN - 3


@pytest.mark.parametrize(("keep", "kept"), [(2, [4, 5]), (8, [3, 4, 5]), (1, [5])])
def test_truncation_keeps_the_last_tokens(keep: int, kept: list[int]) -> None:
    (request,) = process([3, 4, 5], SamplingParams(truncate_prompt_tokens=keep))
    assert request.prompt_token_ids == tuple(kept)
    assert request.engine_requests[0].prompt_token_ids == tuple(kept)


@pytest.mark.parametrize("keep", [-1, MAX_MODEL_LEN])
def test_truncation_leaves_room_for_a_token(keep: int) -> None:
    (request,) = process(list(range(3, 33)), SamplingParams(truncate_prompt_tokens=keep))
    assert request.prompt_token_ids == tuple(range(14, 33))


def test_completions_of_a_prompt_have_ids_and_seeds_of_their_own() -> None:
    (request,) = process("hello", SamplingParams(n=3, seed=5, prompt_logprobs=2))
    children = request.engine_requests
    assert len({child.request_id for child in children}) == 3
    assert [child.sampling_params.seed for child in children] == [5, 6, 7]
    assert [child.sampling_params.n for child in children] == [1, 1, 1]
    assert [child.sampling_params.prompt_logprobs for child in children] == [2, None, None]
    assert {child.eos_token_ids for child in children} == {EOS}


def test_completions_without_a_seed_have_none() -> None:
    (request,) = process("hello", SamplingParams(n=2))
    assert [child.sampling_params.seed for child in request.engine_requests] == [None, None]


def test_bad_words_are_forbidden_with_and_without_a_space_before_them() -> None:
    tokenizer = byte_level()
    (request,) = process("a", SamplingParams(bad_words=["a", " naive"]))
    a, spaced_a = tokenizer.encode("a"), tokenizer.encode(" a")
    assert len(spaced_a) == 1
    words = request.engine_requests[0].sampling_params.bad_words_token_ids
    assert words[:2] == (tuple(a), tuple(spaced_a))
    assert tuple(tokenizer.encode("naive")) in words[2:]


def test_bad_words_have_no_tokens_but_their_own() -> None:
    """Tokens before a text, and a token for the space alone, are left out."""
    tokenizer = with_bos()
    plain, spaced = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in ("zz", " zz"))
    assert (len(spaced), spaced[1:]) == (len(plain) + 1, plain)
    assert encode_bad_words(tokenizer, ["zz"]) == (plain,)
    plain, spaced = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in ("a", " a"))
    assert encode_bad_words(tokenizer, ["a"]) == (plain, spaced)


def test_priorities() -> None:
    processor = make_processor(has_priorities=True)
    assert [r.engine_requests[0].priority for r in process(["a", "a"], None, [2, 1], processor)] == [2, 1]
    assert [r.engine_requests[0].priority for r in process(["a", "a"], None, 3, processor)] == [3, 3]
    with pytest.raises(ValueError, match="priority must have one entry for each prompt, got 1 for 2 prompts"):
        process(["a", "a"], None, [1], processor)
    with pytest.raises(TypeError, match=r"priority\[1\] must be an integer, got 'high'"):
        process(["a", "a"], None, [1, "high"], processor)
    with pytest.raises(TypeError, match="priority must be an integer or a list of integers, got 'high'"):
        process(["a", "a"], None, "high", processor)
    with pytest.raises(TypeError, match=r"priority\[1\] must be an integer, got True"):
        process(["a", "a"], None, [0, True], processor)
    for most in (-(2**63), 2**63 - 1):
        assert process("a", None, most, processor)[0].engine_requests[0].priority == most
    for beyond in (-(2**63) - 1, 2**63):
        with pytest.raises(ValueError, match=rf"priority\[0\] must be an integer of 64 bits, got {beyond}"):
            process(["a"], None, beyond, processor)
    assert [r.engine_requests[0].priority for r in process(["a", "a"], None, [0, 0])] == [0, 0]
    assert len(process("a", None, 0)) == 1
    with pytest.warns(UserWarning, match="priority has no effect unless scheduling_policy is 'priority'") as warned:
        assert [r.engine_requests[0].priority for r in process(["a", "a"], None, [1, -1])] == [0, 0]
    assert len(warned) == 1


def test_more_tokens_than_the_model_has_room_for_are_as_many_as_it_has() -> None:
    """A message to the engine core holds integers of 64 bits."""
    (request,) = process("a", SamplingParams(max_tokens=2**70))
    (least,) = process("a", SamplingParams(max_tokens=3))
    assert request.engine_requests[0].sampling_params.max_tokens == MAX_MODEL_LEN
    assert least.engine_requests[0].sampling_params.max_tokens == 3


def test_without_a_tokenizer_only_token_ids_can_be_run() -> None:
    processor = make_processor(has_tokenizer=False)
    with pytest.raises(ValueError, match=r"prompts\[1\] must be token ids, as there is no tokenizer, got 'hello'"):
        process([[3], "hello"], processor=processor)
    with pytest.raises(ValueError, match=r"sampling_params: stop needs a tokenizer, got \['x'\] without one"):
        process([3], SamplingParams(stop="x"), processor=processor)
    with pytest.raises(ValueError, match=r"sampling_params: bad_words needs a tokenizer, got \['x'\] without one"):
        process([3], SamplingParams(bad_words=["x"]), processor=processor)
    assert process([3], processor=processor)[0].prompt_token_ids == (3,)


def test_what_the_kv_cache_cannot_hold_is_refused_by_its_place() -> None:
    processor = make_processor(num_slots=8)
    with pytest.raises(ValueError, match=r"prompts\[1\] must have at most the 8 tokens that the KV cache holds, got 9"):
        process([[3] * 8, [3] * 9], processor=processor)
    with pytest.raises(
        ValueError, match=r"min_tokens must be at most 3 after 6 prompt tokens \(tokens in the KV cache"
    ):
        process([[3] * 6], SamplingParams(min_tokens=4, max_tokens=9), processor=processor)
    assert process([[3] * 6], SamplingParams(min_tokens=3, max_tokens=9), processor=processor)


def test_a_request_has_parameters_of_its_own() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[3], max_tokens=5, n=2)
    (request,) = process("hello", params)
    params.max_tokens = 7
    params.stop.append("b")  # type: ignore[union-attr]
    params.stop_token_ids.clear()  # type: ignore[union-attr]
    for own in (request.sampling_params, *(child.sampling_params for child in request.engine_requests)):
        assert (own.max_tokens, own.stop, own.stop_token_ids) == (5, ["a"], [3])


def test_what_was_put_into_a_list_is_checked_with_the_request() -> None:
    params = SamplingParams(stop_token_ids=[3], stop=["a"])
    params.stop_token_ids.append("b")  # type: ignore[union-attr]
    with pytest.raises(TypeError, match=r"^sampling_params: stop_token_ids\[1\] must be an integer >= 0, got 'b'$"):
        process("hello", params)
    params.stop_token_ids = []
    params.stop.append("")  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"^sampling_params\[1\]: stop\[1\] must not be empty, got ''$"):
        process(["hello", "a"], [SamplingParams(), params])


def test_no_completion_loses_a_seed_below_zero() -> None:
    """A seed of -1 would mean no seed."""
    (request,) = process("hello", SamplingParams(n=4, seed=-3))
    seeds = [child.sampling_params.seed for child in request.engine_requests]
    assert seeds == [2**64 - 3, 2**64 - 2, 2**64 - 1, 0]


def test_allowed_token_ids_are_checked_against_the_vocabulary() -> None:
    params = SamplingParams(allowed_token_ids=[0, VOCAB_SIZE])
    with pytest.raises(ValueError, match=rf"^sampling_params: allowed_token_ids\[1\] must be .* got {VOCAB_SIZE}$"):
        process("hello", params)


def test_a_prompt_shares_a_prefix_only_with_those_of_its_salt() -> None:
    prompts = [{"prompt": "a", "cache_salt": "one"}, {"prompt_token_ids": [3], "cache_salt": "two"}, "a"]
    requests = process(prompts, SamplingParams(n=2))
    roots = [[child.prefix_root for child in request.engine_requests] for request in requests]
    assert roots == [[prefix_root(salt=salt)] * 2 for salt in ("one", "two", None)]
    assert len({root for each in roots for root in each}) == 3


@pytest.mark.parametrize(
    ("salt", "error", "message"),
    [
        (7, TypeError, r"prompts\['cache_salt'\] must be a string, got 7"),
        ("", ValueError, r"prompts\['cache_salt'\] must have 1 to 256 characters, got 0"),
        ("x" * 257, ValueError, r"prompts\['cache_salt'\] must have 1 to 256 characters, got 257"),
        ("a\ud800", ValueError, r"prompts\['cache_salt'\] must be valid Unicode"),
        ("\udfffa", ValueError, r"prompts\['cache_salt'\] must be valid Unicode"),
    ],
)
def test_salts_that_are_none(salt: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        process({"prompt": "a", "cache_salt": salt})
    assert process({"prompt": "a", "cache_salt": "\ud7ff\ue000" * 128})


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (iter([3]), "got <.*>; list\\(\\) makes one of it$"),
        ([{3, 4}], "got {3, 4}; list\\(\\) makes one of it$"),
        (b"a", "got b'a'$"),
    ],
)
def test_what_could_be_a_list_is_told_how(prompts: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        process(prompts)
    numpy = pytest.importorskip("numpy")
    with pytest.raises(TypeError, match=r"; its tolist\(\) is a list$"):
        process(numpy.array([3, 4]))
    with pytest.raises(ValueError, match=r"unknown key 'input_ids'; known are .*; token ids are 'prompt_token_ids'$"):
        process({"input_ids": [3]})


def test_errors_of_arrays_are_one_line_however_large() -> None:
    numpy = pytest.importorskip("numpy")
    for prompt in (numpy.zeros((2, 3), int), {"prompt_token_ids": numpy.arange(1000)}):
        with pytest.raises(TypeError, match=r"got array\(\[.*; its tolist\(\) is a list$") as raised:
            process(prompt)
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 400
    with pytest.raises(TypeError, match=r"got 'a'$"):
        process({"prompt_token_ids": "a"})


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    """With truncation it must be tokenised, since only that shows its last tokens."""
    text = "hello world " * 1000
    with pytest.raises(ValueError, match=r"^prompts must have at most 19 tokens .*, got at least [1-9]"):
        process(text)
    (request,) = process(text, SamplingParams(truncate_prompt_tokens=4))
    assert request.prompt_token_ids == tuple(byte_level().encode(text)[-4:])
    with pytest.raises(ValueError, match=r"^prompts must have at most 19 tokens .*, got [1-9]"):
        process("hello world " * 100)


def test_characters_are_counted_in_all_that_is_text() -> None:
    conversation = [{"role": "user", "content": [{"type": "text", "text": "xyz"}]}, ("a", None, 7)]
    assert num_characters(conversation) == 4 + 4 + 3 + 1
    assert [num_characters(value) for value in ("", "abc", [1, 2], [], {}, {"a": {"b": "cd"}})] == [0, 3, 0, 0, 0, 2]
    assert [has_long_text("x" * length) for length in (8191, 8192)] == [False, True]


def test_requests_have_the_prefix_of_their_process_in_their_ids() -> None:
    processor = InputProcessor(None, RequestLimits(VOCAB_SIZE, MAX_MODEL_LEN, MAX_MODEL_LEN), EOS, "api-")
    requests = process([[3], [4]], [SamplingParams(), SamplingParams(n=2)], processor=processor)
    ids = [(each.request_id, [child.request_id for child in each.engine_requests]) for each in requests]
    assert ids == [("api-0", ["api-0"]), ("api-1", ["api-1-0", "api-1-1"])]


def test_more_likely_tokens_than_there_are_are_all() -> None:
    for asked, taken in ((VOCAB_SIZE + 5, VOCAB_SIZE), (VOCAB_SIZE, VOCAB_SIZE), (3, 3), (-1, -1)):
        (request,) = process("a", SamplingParams(top_k=asked))
        assert request.engine_requests[0].sampling_params.top_k == taken

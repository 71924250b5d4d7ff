"""Fields of requests against their bounds, and what they mean together, without a server."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from compiled_engine.frontend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.server.chat_messages import ChatMessage, Tool, messages_for_template, tools_for_template
from compiled_engine.server.chat_prompt import renamed_fields, tool_use
from compiled_engine.server.errors import ApiError, require_at_most
from compiled_engine.server.logprob_shapes import chat_logprobs, completion_logprobs, prompt_logprobs
from compiled_engine.server.options import Limits
from compiled_engine.server.protocol import ChatRequest, CompletionRequest, UsageCounter, parse_prompts
from compiled_engine.server.replies import decoded, warned
from compiled_engine.server.request_fields import MOST_UNKNOWN, read_request
from compiled_engine.server.sampling_fields import MOST_ALLOWED, MOST_EXTRA_BYTES, check_bounds, sampling_params

LIMITS = Limits(
    max_stop=2, max_stop_length=3, max_token_list=2, max_logprobs=5, max_messages=2, max_tools=1, max_json_depth=3
)


def fields_of(**given: Any) -> Any:
    return read_request({"prompt": "x", **given}, CompletionRequest)[0]


def refusal(fields: Any, limits: Limits = LIMITS, logprobs: int | None = None) -> str | None:
    """The field that is to blame, if one is."""
    try:
        check_bounds(fields, limits, 20, logprobs)
    except ApiError as error:
        return error.param if error.status == 400 else f"a status of {error.status}"
    return None


@pytest.mark.parametrize(
    ("name", "most", "more"),
    [
        ("stop", ["a", "b"], ["a", "b", "c"]),
        ("stop", ["abc"], ["abcd"]),
        ("stop", "abc", "abcd"),
        ("stop_token_ids", [1, 2], [1, 2, 3]),
        ("logit_bias", {"1": 1, "2": 1}, {"1": 1, "2": 1, "3": 1}),
        ("bad_words", ["a", "b"], ["a", "b", "c"]),
        ("bad_words", ["abc"], ["abcd"]),
        ("bad_words_token_ids", [[1], [2]], [[1], [2], [3]]),
        ("bad_words_token_ids", [[1, 2, 3]], [[1, 2, 3, 4]]),
        ("extra_args", {"a": "x" * (MOST_EXTRA_BYTES - 9)}, {"a": "x" * (MOST_EXTRA_BYTES - 8)}),
        ("prompt_logprobs", 5, 6),
        ("prompt_logprobs", 0, -1),
        ("max_tokens", 20, 21),
        ("min_tokens", 20, 21),
    ],
)
def test_bounds_are_the_most_that_is_taken(name: str, most: Any, more: Any) -> None:
    assert refusal(fields_of(**{name: most})) is None
    assert refusal(fields_of(**{name: more})) == name


def test_bounds_that_depend_on_several_fields() -> None:
    """Equal tokens count once, in each completion; a stream has no place for a prompt's log-probabilities."""
    half = list(range(MOST_ALLOWED // 2))
    for ids, n, param in ((half, 2, None), (half, 3, "allowed_token_ids"), ([*half, *half], 2, None)):
        assert refusal(fields_of(allowed_token_ids=ids, n=n)) == param
    twice = fields_of(allowed_token_ids=[5, 3, 5])
    check_bounds(twice, LIMITS, 20, None)
    assert twice.allowed_token_ids == [5, 3]
    assert refusal(fields_of(prompt_logprobs=1, stream=True)) == "prompt_logprobs"
    assert refusal(fields_of(prompt_logprobs=1, stream=False)) is None
    for logprobs, param in ((5, None), (6, "logprobs"), (-1, "logprobs")):
        assert refusal(fields_of(), logprobs=logprobs) == param
        assert refusal(fields_of(), replace(LIMITS, max_logprobs=-1), logprobs) is None
    assert refusal(fields_of(prompt_logprobs=-1), replace(LIMITS, max_logprobs=-1)) is None
    chat = read_request(
        {"messages": [], "logprobs": True, "top_logprobs": 6, "max_completion_tokens": 21}, ChatRequest
    )[0]
    assert refusal(chat) == "top_logprobs"
    assert refusal(chat, replace(LIMITS, max_logprobs=6)) == "max_completion_tokens"


@pytest.mark.parametrize(
    ("given", "checkpoint", "limit", "found"),
    [
        ({}, None, -1, None),  # as long as the context
        ({}, 9, -1, 9),
        ({}, None, 20, 20),
        ({}, 9, 20, 9),
        ({}, 90, 20, 20),
        ({"max_tokens": 7}, 9, 20, 7),
        ({"max_tokens": 12}, 9, -1, 12),
        ({"min_tokens": 11}, 9, -1, 11),
        ({"min_tokens": 3}, 9, -1, 9),
    ],
)
def test_an_answer_is_as_long_as_the_first_of_request_checkpoint_and_server_says(
    given: dict[str, Any], checkpoint: int | None, limit: int, found: int | None
) -> None:
    defaults = SamplingParams(max_tokens=checkpoint, temperature=0.25)
    params = sampling_params(fields_of(**given), defaults, replace(LIMITS, max_answer_tokens=limit), 20)
    assert params.max_tokens == found
    assert params.temperature == 0.25
    assert defaults.max_tokens == checkpoint


def test_what_a_request_gives_goes_before_the_checkpoint() -> None:
    defaults = SamplingParams(temperature=0.25, stop=["a"], top_k=3)
    params = sampling_params(fields_of(stop="", temperature=0.0), defaults, LIMITS, 20, logprobs=4)
    assert (params.stop, params.temperature, params.top_k, params.logprobs) == ([], 0.0, 3, 4)
    with pytest.raises(ApiError) as caught:
        sampling_params(fields_of(min_tokens=5, max_tokens=4), defaults, LIMITS, 20)
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize("key", ["a", "-1", "01", "1.0", "1234567890", "", "٣"])
def test_keys_of_biases_are_token_ids(key: str) -> None:
    params = sampling_params(fields_of(logit_bias={"0": 1.5, "123456789": -2}), SamplingParams(), LIMITS, 20)
    assert params.logit_bias == {0: 1.5, 123456789: -2.0}
    with pytest.raises(ApiError) as caught:
        sampling_params(fields_of(logit_bias={key: 1.0}), SamplingParams(), LIMITS, 20)
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize(
    ("given", "found"),
    [("x", ["x"]), (["x", "y"], ["x", "y"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ([1.0, 2], [[1, 2]])],
)
def test_forms_of_prompts(given: Any, found: list[Any]) -> None:
    assert parse_prompts(given, 2) == found


@pytest.mark.parametrize(
    ("given", "param"),
    [
        *((given, "input") for given in (5, None, [], {}, ["x", "y", "z"], [[1], [2], [3]])),
        *((["x", 5], "input[1]"), ([[1], "x"], "input[1]"), ([[1], []], "input[1]"), ([1, "x"], "input[1]")),
        *(([1, True], "input[1]"), ([[1], [2, 1.5]], "input[1][1]"), ([1, 2, None], "input[2]")),
    ],
)
def test_prompts_that_are_wrong_are_named(given: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_prompts(given, 2, "input")
    assert caught.value.param == param


def test_usage_counts_each_prompt_once_and_each_completion() -> None:
    def output(tokens: list[int], cached: int | None, finished: bool = False) -> RequestOutput:
        completions = [CompletionOutput(i, "", [5] * n, None, None, None, None) for i, n in enumerate(tokens)]
        return RequestOutput("0", None, [1] * 7, None, completions, finished, cached, RequestMetrics(0.0))

    usage = UsageCounter()
    usage.begin(0, 7)
    found = usage.usage()
    assert (found.prompt_tokens, found.completion_tokens, found.total_tokens) == (7, 0, 7)
    for tokens, cached in (([2, 1], 4), ([1, 0], 4)):
        usage.add(0, output(tokens, cached))
    usage.add(1, output([5], None, finished=True))
    found = usage.usage(unwanted=2)
    assert (found.prompt_tokens, found.completion_tokens, found.total_tokens) == (14, 7, 21)
    assert found.prompt_tokens_details.cached_tokens == 4


class Chat:
    """A chat format whose template knows some names."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def knows(self, name: str) -> bool:
        return name in self._names


def rendered(*given: dict[str, Any], chat: Any = None, limits: Limits = LIMITS) -> list[dict[str, Any]]:
    messages = [msgspec.convert(message, ChatMessage) for message in given]
    return messages_for_template(messages, chat or Chat(), limits)


CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}


def test_messages_as_a_template_takes_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert rendered({"role": "developer", "content": parts}) == [{"role": "system", "content": parts}]
    assert rendered({"role": "developer", "content": "a"}, chat=Chat("developer"))[0]["role"] == "developer"
    (message,) = rendered(
        {"role": "assistant", "tool_calls": [CALL], "reasoning": "r", "reasoning_content": "rc", "name": "n"}
    )
    assert message == {
        **{"role": "assistant", "content": "", "name": "n", "reasoning_content": "rc"},
        "tool_calls": [CALL],
    }


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([], "messages"),
        ([{"role": "user", "content": "a"}] * 3, "messages"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}] * 3}], "messages"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], "messages[1].content"),
        ([{"role": "assistant", "tool_calls": []}], "messages[0].content"),
    ],
)
def test_messages_that_are_wrong_are_named(given: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        rendered(*given)
    assert caught.value.param == param


def tool(name: str, **more: Any) -> Tool:
    return msgspec.convert({"type": "function", "function": {"name": name, **more}}, Tool)


def test_tools_as_a_template_takes_them() -> None:
    chat: Any = Chat("tools")
    schema = {"type": "object", "properties": {"a": {}}}
    (found,) = tools_for_template([tool("add", description="d", parameters=schema, strict=True)], chat, LIMITS) or ()
    assert found == {"type": "function", "function": {"name": "add", "description": "d", "parameters": schema}}
    (found,) = tools_for_template([tool("add")], chat, LIMITS) or ()
    assert found["function"] == {"name": "add", "parameters": {"type": "object", "properties": {}}}
    assert tools_for_template(None, chat, LIMITS) is tools_for_template([], chat, LIMITS) is None
    unknown: Any = Chat()
    for given, knows in (([tool("a"), tool("b")], chat), ([tool("a")], unknown)):
        with pytest.raises(ApiError) as caught:
            tools_for_template(given, knows, LIMITS)
        assert caught.value.param == "tools"


ADD, MUL = tool("add"), tool("mul")


@pytest.mark.parametrize(
    ("choice", "tools", "one_call", "found"),
    [
        (None, None, False, None),
        ("auto", [], False, None),
        ("none", [ADD], False, None),
        (None, [ADD, MUL], False, ([ADD, MUL], False, True)),
        ("auto", [ADD, MUL], True, ([ADD, MUL], False, False)),
        ("required", [ADD, MUL], False, ([ADD, MUL], True, True)),
        ("required", [ADD, MUL], True, ([ADD, MUL], True, False)),
        ({"type": "function", "function": {"name": "mul"}}, [ADD, MUL, MUL], False, ([MUL], True, False)),
        ({"type": "function", "name": "mul"}, [ADD, MUL], False, ([MUL], True, False)),
    ],
)
def test_which_tools_an_answer_may_call(choice: Any, tools: Any, one_call: bool, found: Any) -> None:
    use = tool_use(choice, tools, one_call=one_call)
    assert (None if use is None else (list(use.tools), use.required, use.several)) == found


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        "some",
        5,
        {"type": "web_search"},
        {"type": "function", "function": "add"},
        {"type": "function", "name": "x"},
    ],
)
def test_choices_of_tools_that_are_wrong(choice: Any) -> None:
    with pytest.raises(ApiError) as caught:
        tool_use(choice, [] if choice == "required" else [ADD], one_call=False)
    assert (caught.value.status, caught.value.param) == (400, "tool_choice")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": False}, {}),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 5}, {}),
        ({"max_tokens": 5, "max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ],
)
def test_fields_that_chats_have_under_other_names(given: dict[str, Any], found: Any) -> None:
    fields = read_request({"messages": [], **given}, ChatRequest)[0]
    if isinstance(found, dict):
        assert renamed_fields(fields) == found
        return
    with pytest.raises(ApiError) as caught:
        renamed_fields(fields)
    assert caught.value.param == found


ENTRY = {7: Logprob(-3.0, 3, "é"), 8: Logprob(-1.0, 1, None), 9: Logprob(float("-inf"), 2, "b")}


@pytest.mark.parametrize(
    ("top", "shown"), [(0, []), (1, [""]), (2, ["", "b"]), (3, ["", "b", "é"]), (-1, ["", "b", "é"])]
)
def test_log_probabilities_of_chats_are_ordered_by_rank(top: int, shown: list[str]) -> None:
    (found,) = chat_logprobs([ENTRY], top).content
    assert (found.token, found.logprob, found.bytes) == ("é", -3.0, [0xC3, 0xA9])
    assert [each.token for each in found.top_logprobs] == shown
    assert [(each.logprob, each.bytes) for each in found.top_logprobs[:2]] == [(-1.0, None), (-9999.0, [98])][
        : len(shown)
    ]


def test_log_probabilities_of_completions_have_places_in_the_text() -> None:
    entries = [ENTRY, {4: Logprob(-1.5, 1, "</s>")}, {5: Logprob(-0.5, 1, "abc")}]
    found, end = completion_logprobs(entries, [7, 4, 5], 10, {4})
    assert found.tokens == ["é", "</s>", "abc"]
    assert found.text_offset == [10, 11, 11]  # the text leaves the special token out
    assert found.token_logprobs == [-3.0, -1.5, -0.5]
    assert found.top_logprobs == [{"é": -3.0, "": -1.0, "b": -9999.0}, {"</s>": -1.5}, {"abc": -0.5}]
    assert end == 14
    both = found + completion_logprobs(entries[2:], [5], end)[0]
    assert (both.tokens[-2:], both.text_offset[-2:]) == (["abc", "abc"], [11, 14])
    assert len(both.token_logprobs) == len(both.top_logprobs) == 4


def test_log_probabilities_of_prompts_are_by_token_id() -> None:
    assert json.loads(msgspec.json.encode(prompt_logprobs([None, ENTRY]))) == [
        None,
        {
            "7": {"logprob": -3.0, "rank": 3, "decoded_token": "é"},
            "8": {"logprob": -1.0, "rank": 1, "decoded_token": None},
            "9": {"logprob": -9999.0, "rank": 2, "decoded_token": "b"},
        },
    ]


def body(values: Any) -> bytes:
    return json.dumps(values).encode()


def test_bodies_have_bounds() -> None:
    """Commas and brackets within strings are none."""
    assert decoded(body({"a": [1, 2], "b,": '[{,\\"'}), 2, 3) == {"a": [1, 2], "b,": '[{,\\"'}
    for depth, values in ((1, 3), (2, 2)):
        with pytest.raises(ApiError) as caught:
            decoded(body({"a": [1, 2], "b,": "x"}), depth, values)
        assert caught.value.status == 400
    for wrong in (b"[1]", b"{", b'{"a": "\xff"}', b'"x"', b""):
        with pytest.raises(ApiError):
            decoded(wrong, 9, 9)
    many = {"a": [[]] * ((1 << 16) - 2)}
    assert decoded(body(many), 9, 1 << 20) == many
    many["a"].append([])
    with pytest.raises(ApiError, match="arrays and objects"):
        decoded(body(many), 9, 1 << 20)


def test_warnings_fit_into_a_header() -> None:
    assert warned([]) == {}
    (text,) = warned(["a\nb", "é" * 2000]).values()
    assert text[:6] == "a?b; ?"
    assert len(text) == 1000


def test_unknown_fields_are_named_up_to_a_number() -> None:
    names = {f"strange{number}": 1 for number in range(MOST_UNKNOWN + 2)}
    _, ignored = read_request({"prompt": "x", "user": "me", "seed": None, "temprature": 1, **names}, CompletionRequest)
    assert len(ignored) == MOST_UNKNOWN + 1
    assert ignored[0] == "unknown field 'temprature' is ignored; did you mean temperature?"
    assert ignored[-1] == "3 more unknown fields are ignored"
    with pytest.raises(ApiError) as caught:
        read_request({"prompt": "x", "temprature": 1}, CompletionRequest, strict=True)
    assert (caught.value.param, str(caught.value)) == (
        "temprature",
        "unknown field 'temprature'; did you mean temperature?",
    )
    with pytest.raises(ApiError) as caught:
        read_request({"prompt": "x", "suffix": "y"}, CompletionRequest)
    assert (caught.value.param, caught.value.code) == ("suffix", "unsupported_parameter")
    assert read_request({"prompt": "x", "suffix": "", "best_of": 1}, CompletionRequest)[1] == []
    with pytest.raises(ApiError):
        read_request({"prompt": "x", "best_of": True}, CompletionRequest)  # which is 1 only in Python


def test_whole_numbers_may_be_written_as_floats() -> None:
    fields = fields_of(max_tokens=3.0, stop_token_ids=[5.0], logit_bias={"5": 2.0}, extra_args={"a": 1.0})
    assert (fields.max_tokens, fields.stop_token_ids) == (3, [5])
    for wrong in (3.5, 2.0**53):
        with pytest.raises(ApiError) as caught:
            fields_of(max_tokens=wrong)
        assert caught.value.param == "max_tokens"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"stop": [1]}, "stop"),
        ({"top_k": "x"}, "top_k"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
def test_values_of_a_wrong_type_are_named(given: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        fields_of(**given)
    assert str(caught.value.param).startswith(param)


def test_lists_have_the_most_entries_that_are_allowed() -> None:
    require_at_most("a", None, 0, "entries")
    require_at_most("a", [1, 2], 2, "entries")
    with pytest.raises(ApiError, match="a must have at most 2 entries, got 3"):
        require_at_most("a", [1, 2, 3], 2, "entries")

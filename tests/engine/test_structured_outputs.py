"""Requests whose text must have a form: JSON schemas, expressions, choices and grammars."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from busy_threads import busy
from hostile_grammars import HOSTILE
from random_schemas import is_valid, random_schema
from token_masks import ByLastToken

from compiled_engine.frontend.outputs import CompletionOutput
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.structured_outputs import StructuredOutputs

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PLAIN: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 30}
PROMPTS = ["def parse(", "import os\n", "x = [1, 2"]
LONG: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 300}
SMALL: dict[str, Any] = {"mode": "eager", "progress": False, "num_blocks": 2048, "max_model_len": 1024}


@pytest.fixture(scope="module")
def llm(one_thread: None) -> Iterator[LLM]:
    with LLM(**SMALL, max_num_seqs=32) as llm:
        yield llm
        llm.core.check_integrity()


def structured(given: Any, **rest: Any) -> SamplingParams:
    return SamplingParams(**{**LONG, **rest}, structured_outputs=given)


PREEMPTED = [structured({"json": PERSON}, seed=seed, max_tokens=50) for seed in range(6)]


def generate(
    llm: LLM, params: SamplingParams | list[SamplingParams], prompt: str = PROMPTS[0]
) -> list[CompletionOutput]:
    listed = params if isinstance(params, list) else [params]
    outputs = llm.generate([prompt] * len(listed), listed, use_tqdm=False)
    return [completion for output in outputs for completion in output.outputs]


@pytest.mark.parametrize(
    ("given", "is_right"),
    [
        ({"json": PERSON}, lambda text: is_valid(json.loads(text), PERSON)),
        ({"json": json.dumps(PERSON), "disable_any_whitespace": True}, lambda text: not re.search(r"[:,] |\n", text)),
        ({"regex": r"[a-c]{3}-\d{1,4}"}, lambda text: re.fullmatch(r"[a-c]{3}-\d{1,4}", text)),
        ({"regex": r"^\w{1,5}@x\.org$"}, lambda text: re.fullmatch(r"\w{1,5}@x\.org", text)),
        ({"choice": ["yes", "no", "mañana 😀\n"]}, lambda text: text in ("yes", "no", "mañana 😀\n")),
        ({"grammar": 'start: "x" NUMBER ";"\nNUMBER: /[0-9]{2}/'}, lambda text: re.fullmatch(r"x\d\d;", text)),
        ({"grammar": 'root ::= "a" [0-9] [0-9]? "b"'}, lambda text: re.fullmatch(r"a\d\d?b", text)),
    ],
)
def test_each_form(llm: LLM, given: dict[str, Any], is_right: Any) -> None:
    for params in (structured(given, n=3), structured(StructuredOutputs(**given), temperature=0)):
        for completion in generate(llm, params):
            assert completion.finish_reason == "stop"
            assert is_right(completion.text), completion.text


def test_any_object(llm: LLM) -> None:
    for completion in generate(llm, structured({"json_object": True}, n=3)):
        assert completion.finish_reason == "length" or isinstance(json.loads(completion.text), dict)


def test_random_schemas_end_by_themselves_and_are_valid(llm: LLM) -> None:
    """NUM_SCHEMAS=1000 in the environment makes it a thousand."""
    rng = random.Random(0)
    schemas = [random_schema(rng) for _ in range(int(os.environ.get("NUM_SCHEMAS", "24")))]
    # As many as the model takes: a text has fewer.
    params = [structured({"json": schema}, seed=seed, max_tokens=None) for seed, schema in enumerate(schemas)]
    for schema, completion in zip(schemas, generate(llm, params), strict=True):
        assert completion.finish_reason == "stop", completion.text
        assert is_valid(json.loads(completion.text), schema), (completion.text, schema)


@pytest.mark.parametrize(
    "further",
    [
        {"top_p": 0.8, "top_k": 30, "min_p": 0.01},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"logit_bias": {5: 3.0, 6: -3.0}, "bad_words": ["zzz"]},
        {"detokenize": False},
    ],
)
def test_it_goes_with_other_parameters(llm: LLM, further: dict[str, Any]) -> None:
    first, again = (generate(llm, [structured({"json": PERSON}, **further), SamplingParams(**PLAIN)]) for _ in range(2))
    assert first[0].token_ids == again[0].token_ids
    text = llm.get_tokenizer().decode(first[0].token_ids, skip_special_tokens=True)
    assert is_valid(json.loads(text), PERSON)
    if "logprobs" in further:
        assert first[0].logprobs is not None
        assert len(first[0].logprobs) == len(first[0].token_ids)
    (alone,) = generate(llm, SamplingParams(**PLAIN))
    assert first[1].token_ids == alone.token_ids


def test_the_length_and_stop_strings_end_it_as_ever(llm: LLM) -> None:
    (short,) = generate(llm, structured({"json": PERSON}, max_tokens=3))
    assert (short.finish_reason, len(short.token_ids)) == ("length", 3)
    (stopped,) = generate(llm, structured({"choice": ["alpha beta gamma"]}, stop=" beta"))
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("alpha", "stop", " beta")


def test_min_tokens_beyond_the_form_end_with_it(llm: LLM) -> None:
    params = [structured({"choice": ["ab"]}, min_tokens=20), SamplingParams(**PLAIN)]
    before = llm.metrics()
    complete, other = generate(llm, params)
    after = llm.metrics()
    assert (complete.text, complete.finish_reason, complete.stop_reason) == ("ab", "stop", None)
    assert other.finish_reason in ("stop", "length")
    assert [after[name] - before[name] for name in ("finished", "aborted")] == [2, 0]


def test_no_token_within_the_form_is_an_error_of_the_request(llm: LLM) -> None:
    impossible, other = generate(llm, [structured({"choice": ["ab"]}, allowed_token_ids=[17]), SamplingParams(**PLAIN)])
    assert impossible.finish_reason == "error"
    assert str(impossible.stop_reason).startswith("no token may come next")
    assert other.finish_reason in ("stop", "length")


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[Sequence[int]]:
    return [generate(llm, each)[0].token_ids for each in PREEMPTED]


@pytest.mark.parametrize("pipelined", [False, True])
def test_preemption_changes_nothing(pipelined: bool, alone: list[Sequence[int]]) -> None:
    options: dict[str, Any] = SMALL | {"num_blocks": 16, "block_size": 4, "max_num_seqs": 6, "max_model_len": 64}
    with LLM(**options, async_scheduling=pipelined, enable_prefix_caching=False) as llm:
        together = [completion.token_ids for completion in generate(llm, PREEMPTED)]
        assert llm.metrics()["preemptions"] > 0
        assert together == alone


def test_grammars_are_compiled_once(llm: LLM) -> None:
    given = {"regex": "only here [a-z]{2}"}
    before = llm.metrics()
    generate(llm, [structured(given, n=4), structured(given)])
    after = llm.metrics()
    assert after["grammar_compiles"] == before["grammar_compiles"] + 1
    assert after["grammar_cache_hits"] == before["grammar_cache_hits"] + 4
    assert after["grammar_requests"] == before["grammar_requests"] + 5


def test_a_matcher_that_gives_up_ends_its_request_alone(llm: LLM) -> None:
    """An ambiguous grammar compiles, and then asks for more than a step may take."""
    ambiguous = structured({"grammar": 'start: x\nx: x x | "a" | "b" | '})
    plain = SamplingParams(**PLAIN)
    (expected,) = generate(llm, plain)
    bad, other = generate(llm, [ambiguous, plain])
    assert bad.finish_reason == "error"
    assert str(bad.stop_reason).startswith("structured_outputs: ")
    assert other.token_ids == expected.token_ids
    assert generate(llm, structured({"choice": ["fine"]}))[0].text == "fine"


@pytest.mark.product(one_in=4)
@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_made_to_cost_too_much_costs_its_request_alone(llm: LLM, name: str) -> None:
    plain = SamplingParams(**PLAIN)
    (expected,) = generate(llm, plain)
    try:
        bad, other = generate(llm, [structured(HOSTILE[name], max_tokens=30), plain])
    except ValueError as error:
        if not str(error).startswith(("structured_outputs: ", "structured_outputs.")):
            raise
        return
    assert other.token_ids == expected.token_ids
    assert bad.finish_reason in ("length", "stop") or str(bad.stop_reason).startswith("structured_outputs: ")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "must have exactly one of json, regex, choice, grammar, json_object, got none"),
        ({"json": {}, "regex": "a"}, "got json, regex"),
        ({"jsn": {}}, "must not have 'jsn'; allowed: json, regex"),
        ({"json": "{"}, "structured_outputs.json must be valid JSON"),
        ({"json": "[]"}, "structured_outputs.json must be a JSON object, got list"),
        ({"json": nested(70)}, "at most 64 arrays and objects within each other"),
        ({"json": "[" * 100_000}, "at most 64 arrays and objects within each other"),
        ({"json": {"enum": ["x" * 200_000]}}, "structured_outputs.json must have at most 131072 bytes"),
        ({"json": {"type": "strng"}}, "structured_outputs: Invalid type: strng"),
        ({"json": {"not": {}}}, r'structured_outputs: Unimplemented keys: \["not"\]'),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"regex": "("}, r"structured_outputs: .*regex parse error: \( error: unclosed group$"),
        ({"grammar": 'start: "a" b\n'}, 'unknown name: "b"$'),
        ({"json": {"type": "string", "pattern": "("}}, r"regex parse error: \( error: unclosed group$"),
        ({"regex": ""}, "structured_outputs.regex must not be empty"),
        ({"choice": []}, "structured_outputs.choice must have at least one string"),
        ({"choice": ["a", ""]}, r"structured_outputs.choice\[1\] must not be empty"),
        ({"choice": [str(i) * 3 for i in range(20_000)]}, "structured_outputs.choice must have at most 131072 bytes"),
        ({"grammar": "start: undefined"}, "structured_outputs: "),
        ({"grammar": "root ::= ("}, "structured_outputs.grammar cannot be read"),
        ({"grammar": '{"grammars": [{}]}'}, "structured_outputs: "),
        ({"json": {"$ref": "#"}}, "structured_outputs: no text has this form"),
        ({"grammar": "start: start"}, "structured_outputs: no text has this form"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(llm: LLM, given: dict[str, Any], message: str) -> None:
    steps = llm.metrics()["steps"]
    with pytest.raises(ValueError, match=message) as caught:
        llm.generate(PROMPTS[0], structured(given), use_tqdm=False)
    assert llm.metrics()["steps"] == steps
    assert len(str(caught.value)) < 2000
    assert "\n" not in str(caught.value)


def test_objects_are_closed_where_that_is_asked_for() -> None:
    """Objects with properties are closed unless they state otherwise; values that only look like a schema are kept.

    Properties may have the names of keywords.
    """
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    open_one = {"type": "object", "properties": {}, "additionalProperties": True}
    properties = {"a": inner, "o": open_one, "enum": inner, "properties": inner}
    schema = {"type": "object", "properties": properties, "$defs": {"default": inner}, "default": inner}
    given = StructuredOutputs(json=schema, disable_additional_properties=True)
    closed = inner | {"additionalProperties": False}
    properties = {"a": closed, "o": open_one, "enum": closed, "properties": closed}
    expected = schema | {"properties": properties, "$defs": {"default": closed}, "additionalProperties": False}
    assert json.loads(str(given.json)) == expected
    assert json.loads(str(StructuredOutputs(json=schema).json)) == schema


def test_what_rules_each_other_out() -> None:
    for further, message in [
        ({"ignore_eos": True}, "ignore_eos must be False"),
        ({"token_mask": ByLastToken(8)}, "token_mask must be None"),
    ]:
        with pytest.raises(ValueError, match=message):
            structured({"regex": "a"}, **further)
    with pytest.raises(TypeError, match="structured_outputs must be StructuredOutputs or a dict"):
        SamplingParams(structured_outputs=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"structured_outputs.regex must be a string, got 5"):
        SamplingParams(structured_outputs={"regex": 5})  # type: ignore[arg-type]


def test_without_a_tokenizer_there_is_no_form() -> None:
    with (
        LLM(**SMALL, skip_tokenizer_init=True) as llm,
        pytest.raises(ValueError, match="structured_outputs needs a tokenizer"),
    ):
        llm.generate([[1, 2]], SamplingParams(structured_outputs={"regex": "a"}, detokenize=False), use_tqdm=False)


def test_a_request_that_waits_for_its_grammar_holds_up_nobody(llm: LLM) -> None:
    """The compiler is kept busy: other requests run to their end meanwhile, and this one may be aborted."""
    generate(llm, structured({"choice": ["a"]}))  # with the first one the compiler is made
    holds = llm.core._hooks.holds_back  # type: ignore[union-attr]
    threads = holds.__self__._grammars._compiler._threads
    with busy(threads):
        waiting = llm.stream(PROMPTS[0], structured({"regex": "waits [0-9]"}))
        aborted = llm.stream(PROMPTS[0], structured({"regex": "goes [0-9]"}))
        (plain,) = generate(llm, SamplingParams(temperature=0, max_tokens=2))
        assert plain.finish_reason == "length"
        aborted.close()  # type: ignore[attr-defined]
    *_, last = waiting
    assert re.fullmatch("waits [0-9]", last.outputs[0].text)


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3, "n": 3}, {"top_p": 0.9}])
def test_on_a_gpu(sampling: dict[str, Any]) -> None:
    """With CUDA graphs and steps launched ahead."""
    with LLM(progress=False, device="cuda", max_model_len=512, num_blocks=512, max_num_seqs=16) as llm:
        plain = SamplingParams(**LONG | sampling | {"max_tokens": 40}, ignore_eos=True)
        form = structured({"json": PERSON}, **sampling)
        completions = generate(llm, [form, plain, form, plain])
        n = form.n
        for completion in completions[:n] + completions[2 * n : 3 * n]:
            assert is_valid(json.loads(completion.text), PERSON)
        assert [len(c.token_ids) for c in completions[n : 2 * n] + completions[3 * n :]] == [40] * 2 * n

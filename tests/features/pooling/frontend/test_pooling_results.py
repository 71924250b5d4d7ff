"""Requests that pool: parameters that are refused, requests that come of texts, and results of a step's vectors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny_tokenizers import byte_level

from compiled_engine.engine.messages import EngineOutput, RequestLimits, prefix_root
from compiled_engine.features.pooling.extras import NAME, TOKEN_TYPES, Vectors
from compiled_engine.features.pooling.frontend.outputs import ClassificationOutput, EmbeddingOutput, PoolingOutput
from compiled_engine.features.pooling.frontend.processor import (
    PoolingProcessor,
    Scoring,
)
from compiled_engine.features.pooling.frontend.running import RunningPooling, classifications, embeddings, results
from compiled_engine.features.pooling.frontend.task import PoolingParams, PoolingTask
from compiled_engine.pooling import CLASSIFY, EMBED, LAST, NONE, NORMALISE, SIGMOID, SOFTMAX, Dense, Pooling

TOKENIZER = byte_level()
EMBEDS = Pooling(EMBED, LAST, (), NORMALISE, prompts=(("query", "find: "), ("other", "x ")))
LABELS = Pooling(CLASSIFY, LAST, (Dense("", 4, 3),), SOFTMAX, ("a", "b", "c"))
ONE_LABEL = Pooling(CLASSIFY, LAST, (Dense("", 4, 1),), SIGMOID, ("yes",))
JUDGES = Pooling(CLASSIFY, LAST, (Dense("", 4, 2, tokens=(5, 6)),), SOFTMAX, ("yes",), ("ab", "{query}|{document}", ""))
LONGEST = 20


def processor(pooling: Pooling = EMBEDS, *, has_tokenizer: bool = True, num_slots: int = 400) -> PoolingProcessor:
    limits = RequestLimits(len(TOKENIZER.hf), LONGEST, num_slots, has_priorities=True, yields_tokens=False)
    return PoolingProcessor(TOKENIZER if has_tokenizer else None, limits, pooling, 4, "r")


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"dimensions": 0}, ValueError, "dimensions must be at least 1, got 0"),
        ({"dimensions": -1}, ValueError, "dimensions must be at least 1, got -1"),
        ({"dimensions": True}, TypeError, "dimensions must be an integer or None, got True"),
        ({"dimensions": 2.0}, TypeError, "dimensions must be an integer or None, got 2.0"),
        ({"truncate_prompt_tokens": 0}, ValueError, "truncate_prompt_tokens must be at least 1, or -1, got 0"),
        ({"truncate_prompt_tokens": -2}, ValueError, "truncate_prompt_tokens must be at least 1, or -1, got -2"),
        ({"truncate_prompt_tokens": "3"}, TypeError, "truncate_prompt_tokens must be an integer or None, got '3'"),
        ({"use_activation": 1}, TypeError, "use_activation must be True, False or None, got 1"),
        ({"normalize": "no"}, TypeError, "normalize must be True, False or None, got 'no'"),
        ({"normalize": True, "use_activation": False}, ValueError, "normalize is True, but use_activation is False"),
    ],
)
def test_parameters_that_are_none(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        PoolingParams(**fields)


@pytest.mark.parametrize(
    ("use_activation", "normalize", "activates"),
    [(None, None, None), (True, None, True), (False, None, False), (None, False, False), (None, True, True)],
)
def test_two_names_of_one_parameter(use_activation: Any, normalize: Any, activates: Any) -> None:
    assert PoolingParams(use_activation=use_activation, normalize=normalize).activates is activates
    assert PoolingParams(use_activation=activates, normalize=activates).activates is activates
    assert PoolingParams(dimensions=1, truncate_prompt_tokens=-1).truncate_prompt_tokens == -1


@pytest.mark.parametrize(
    ("name", "pooling", "dimensions", "message"),
    [
        ("embed", LABELS, None, "task is 'embed', but the model can classify and token_classify; see convert"),
        ("token_embed", LABELS, None, "task is 'token_embed', but the model can classify and token_classify"),
        ("classify", EMBEDS, None, "task is 'classify', but the model can embed and token_embed"),
        ("sum", EMBEDS, None, "task is 'sum', but the model can embed and token_embed"),
        ("classify", LABELS, 2, "dimensions must be None, as the model classifies, got 2"),
        ("embed", EMBEDS, 5, "dimensions must be at most 4, the model's, got 5"),
    ],
)
def test_tasks_that_a_model_lacks(name: str, pooling: Pooling, dimensions: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        PoolingTask(name, pooling, PoolingParams(dimensions=dimensions), 4)


def test_tasks_that_a_model_has() -> None:
    found = {
        name: PoolingTask(name, pooling, PoolingParams(), 4).by_token
        for pooling in (EMBEDS, LABELS)
        for name in (pooling.task, f"token_{pooling.task}")
    }
    assert found == {"embed": False, "token_embed": True, "classify": False, "token_classify": True}
    assert PoolingTask("embed", EMBEDS, PoolingParams(dimensions=4), 4).params.dimensions == 4


ROWS = np.array([[3, 4, 12, 84], [-1, 0.5, 2, 1], [0, 0, 0, 0], [90, -90, 0, 1]], np.float32)


def normalised(rows: np.ndarray) -> np.ndarray:
    return np.array([row / max(float(np.sqrt((row.astype(np.float64) ** 2).sum())), 1e-12) for row in rows])


def softmax(rows: np.ndarray) -> np.ndarray:
    powers = np.exp(rows.astype(np.float64) - rows.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def sigmoid(rows: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-rows.astype(np.float64)))


@pytest.mark.parametrize(
    ("pooling", "params", "expected"),
    [
        (EMBEDS, {}, normalised(ROWS)),
        (EMBEDS, {"dimensions": 2}, normalised(ROWS[:, :2])),
        (EMBEDS, {"normalize": False}, ROWS),
        (Pooling(EMBED, LAST, (), NONE), {}, ROWS),
        (Pooling(EMBED, LAST, (), NONE), {"normalize": True}, normalised(ROWS)),
        (Pooling(EMBED, LAST, (), NORMALISE, dimensions=3), {}, normalised(ROWS[:, :3])),
        (Pooling(EMBED, LAST, (), NORMALISE, dimensions=3), {"dimensions": 2}, normalised(ROWS[:, :2])),
        (LABELS, {}, softmax(ROWS)),
        (LABELS, {"use_activation": True}, softmax(ROWS)),
        (LABELS, {"use_activation": False}, ROWS),
        (replace(LABELS, activates=False), {}, ROWS),
        (replace(LABELS, activates=False), {"use_activation": True}, softmax(ROWS)),
        (ONE_LABEL, {}, sigmoid(ROWS)),
        (JUDGES, {}, softmax(ROWS[:, :2])[:, 1:]),
        (JUDGES, {"use_activation": False}, ROWS[:, 1:2] - ROWS[:, :1]),
        (Pooling(CLASSIFY, LAST, (Dense("", 4, 1, tokens=(5,)),), SIGMOID, ("yes",)), {}, sigmoid(ROWS[:, :1])),
    ],
)
def test_vectors_become_results(pooling: Pooling, params: dict[str, Any], expected: np.ndarray) -> None:
    """Vectors are cut first. A request may disable or require the model's activation."""
    rows = ROWS[:, : expected.shape[1]] if pooling.task == CLASSIFY and pooling is not JUDGES else ROWS
    rows = ROWS[:, :2] if pooling is JUDGES else rows
    found = PoolingTask(pooling.task, pooling, PoolingParams(**params), 4).finish(rows)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_a_text_becomes_a_request() -> None:
    prompts: list[Any] = ["hello", {"prompt_token_ids": [3, 4], "cache_salt": "s"}]
    requests = processor().process(prompts, priority=3)
    for request, ids, salt in zip(requests, (TOKENIZER.encode("hello"), [3, 4]), (None, "s"), strict=True):
        (each,) = request.engine_requests
        assert list(request.prompt_token_ids) == list(each.prompt_token_ids) == ids
        assert (each.priority, each.prefix_root, each.extras) == (3, prefix_root(salt=salt), {})
        assert (each.sampling_params.max_tokens, each.request_id) == (1, request.request_id)
        assert collecting(request).task == PoolingTask("embed", EMBEDS, PoolingParams(), 4)
    assert [request.prompt for request in requests] == ["hello", None]
    assert [request.request_id for request in requests] == ["r0", "r1"]
    (named,) = processor().process("hello", prompt_name="query")
    assert list(named.prompt_token_ids) == TOKENIZER.encode("find: hello")


def test_a_model_of_lower_case_gets_no_other() -> None:
    pooling = Pooling(EMBED, LAST, (), NORMALISE, prompts=(("query", "Find: "),), lower_case=True)
    (plain,) = processor(pooling).process("Hello")
    (named,) = processor(pooling).process("Hello", prompt_name="query")
    assert list(plain.prompt_token_ids) == TOKENIZER.encode("hello")
    assert list(named.prompt_token_ids) == TOKENIZER.encode("find: hello")


@pytest.mark.parametrize(
    ("in_params", "asked", "task"),
    [(None, None, "embed"), ("token_embed", None, "token_embed"), ("embed", "token_embed", "token_embed")],
)
def test_the_task_of_a_call_goes_before_that_of_its_parameters(in_params: Any, asked: Any, task: str) -> None:
    (request,) = processor().process("hello", PoolingParams(task=in_params), asked)
    assert collecting(request).task.name == task
    assert request.engine_requests[0].extras == ({NAME: True} if task.startswith("token") else {})


@pytest.mark.parametrize(("keep", "most"), [(3, 3), (50, LONGEST), (-1, LONGEST)])
def test_token_ids_are_cut_behind(keep: int, most: int) -> None:
    (request,) = processor().process([[*range(3, 33)]], PoolingParams(truncate_prompt_tokens=keep))
    assert request.prompt_token_ids == tuple(range(3, 3 + most))


LONG = "hello world " * 2000


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        ("hello", {"params": {"dimensions": 3}}, TypeError, "pooling_params must be PoolingParams, got {'dimensions'"),
        ("hello", {"priority": "high"}, TypeError, "priority must be an integer"),
        ("hello", {"prompt_name": "x"}, ValueError, "prompt_name is 'x'; allowed: query, other"),
        (["a", ""], {}, ValueError, r"prompts\[1\] must have at least one token, got ''"),
        (["a", "\ud800"], {}, ValueError, r"prompts\[1\] must be valid Unicode"),
        ([[3, 100_000]], {}, ValueError, r"prompts\[0\]: token 1 must be within the vocabulary"),
        ([[3] * 20, [3] * 21], {}, ValueError, r"prompts\[1\] must have at most 20 tokens .*, got 21"),
        (LONG, {}, ValueError, "prompts must have at most 20 tokens .*, got at least [1-9]"),
    ],
)
def test_what_cannot_be_pooled(prompts: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        processor().process(prompts, **options)


def test_a_long_text_may_be_cut_and_the_cache_limits_too() -> None:
    (request,) = processor().process(LONG, PoolingParams(truncate_prompt_tokens=5))
    assert list(request.prompt_token_ids) == TOKENIZER.encode(LONG)[:5]
    assert len(processor(num_slots=8).process([[3] * 8])) == 1
    with pytest.raises(ValueError, match=r"at most the 8 tokens that the KV cache holds, got 9"):
        processor(num_slots=8).process([[3] * 9])


def test_prompts_that_a_model_does_not_pool_are_refused() -> None:
    pooling = Pooling(EMBED, ("mean",), (), NONE, prompts=(("query", "find: "),), include_prompt=False)
    with pytest.raises(ValueError, match="prompt_name is 'query', but the model does not pool its prompts"):
        processor(pooling).process("hello", prompt_name="query")
    with pytest.raises(ValueError, match="prompt_name is 'query'; allowed: None, the model has no prompts"):
        processor(LABELS).process("hello", prompt_name="query")


def test_without_a_tokenizer_only_token_ids_are_pooled() -> None:
    assert processor(has_tokenizer=False).process([[3, 4]])[0].prompt_token_ids == (3, 4)
    with pytest.raises(ValueError, match=r"prompts\[1\] must be token ids, as there is no tokenizer, got 'a'"):
        processor(has_tokenizer=False).process([[3], "a"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"queries\[0\] must be token ids, as there is no tokenizer"):
        processor(ONE_LABEL, has_tokenizer=False).score("a", "b")


def collecting(request: Any) -> RunningPooling:
    found = request.collect(request)
    assert isinstance(found, RunningPooling)
    return found


def ended(requests: Sequence[Any], rows: Sequence[Any], cached: Sequence[int | None] = ()) -> list[RunningPooling]:
    """Return finished requests with these rows of values."""
    found = []
    for request, values, num_cached in itertools.zip_longest(requests, rows, cached):
        running, data = collecting(request), np.atleast_2d(np.array(values, "<f4"))
        vectors = Vectors(0, data.shape[1], data.tobytes())
        output = EngineOutput(request.request_id, (), finish_reason="length", extras={NAME: vectors})
        running.update(EngineOutput(request.request_id, (), num_cached_tokens=num_cached), 0.0)
        assert running.unfinished_ids() == [request.request_id]
        assert running.update(output, 0.0) == "length"
        assert (running.finished, running.unfinished_ids()) == (True, [])
        found.append(running)
    return found


def test_embeddings_are_compared_by_their_angle() -> None:
    rows = [[3, 4, 0, 0], [6, 8, 0, 0], [-4, 3, 0, 0], [0, 0, 0, 0]]
    one = processor().score("a", ["b", "c", "d"], cache_salt="s", priority=2)
    assert one.compared == [(0, 1), (0, 2), (0, 3)]
    assert {request.engine_requests[0].prefix_root for request in one.requests} == {prefix_root(salt="s")}
    assert {request.engine_requests[0].priority for request in one.requests} == {2}
    scores = one.scores(ended(one.requests, rows, [1, 2, None, 4]))
    assert [each.outputs.score for each in scores] == pytest.approx([1, 0, 0], abs=1e-6)
    assert [each.request_id for each in scores] == ["r1", "r2", "r3"]
    assert [each.num_cached_tokens for each in scores] == [3, 1, 5]
    assert all(each.finished for each in scores)
    assert scores[1].prompt_token_ids == [*TOKENIZER.encode("a"), *TOKENIZER.encode("c")]
    each_with_one = processor().score(["a", "b"], ["c", "d"])
    assert each_with_one.compared == [(0, 2), (1, 3)]
    scores = each_with_one.scores(ended(each_with_one.requests, rows))
    assert [each.outputs.score for each in scores] == pytest.approx([0, 0], abs=1e-6)
    assert processor().score("a", "b").compared == [(0, 1)]


@pytest.mark.parametrize("pooling", [ONE_LABEL, JUDGES])
def test_a_pair_is_judged_in_one_request(pooling: Pooling) -> None:
    given = processor(pooling).score("a", ["b", "fox"], cache_salt="s", priority=2)
    assert given.compared is None
    for request, text in zip(given.requests, ("b", "fox"), strict=True):
        parts = ("ab", f"a|{text}") if pooling is JUDGES else ("a", text)
        assert list(request.prompt_token_ids) == [i for part in parts for i in TOKENIZER.encode(part)]
    for request in given.requests:
        (each,) = request.engine_requests
        assert (each.priority, each.prefix_root) == (2, prefix_root(salt="s"))
        assert each.extras == ({} if pooling is JUDGES else {TOKEN_TYPES: len(TOKENIZER.encode("a"))})
    rows = [[0.5], [-2]] if pooling is ONE_LABEL else [[0, 0.5], [1, -1]]
    found = [each.outputs.score for each in given.scores(ended(given.requests, rows))]
    assert found == pytest.approx(sigmoid(np.array([0.5, -2])).tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("pooling", "arguments", "options", "error", "message"),
    [
        (EMBEDS, (["a", "b"], ["a", "b", "c"]), {}, ValueError, "queries must be one, or one for each of the 3 docu"),
        (EMBEDS, (["a", "b"], ["a"]), {}, ValueError, "queries must be one, or one for each of the 1 documents, got 2"),
        (EMBEDS, ("a", []), {}, ValueError, "documents must have at least one input, got none"),
        (EMBEDS, ([], "a"), {}, ValueError, "queries must have at least one input, got none"),
        (EMBEDS, (7, "a"), {}, TypeError, "queries must be a string or a list of strings, got 7"),
        (EMBEDS, ("a", ["b", 7]), {}, TypeError, r"documents must be a string or a list of strings, got \['b', 7\]"),
        (ONE_LABEL, ("a", "b"), {"instruction": "x"}, ValueError, "instruction must be None, as the model has no temp"),
        (LABELS, ("a", "b"), {}, ValueError, "score needs a classifier with one label, and the model has 3"),
        (
            EMBEDS,
            ("a", "b"),
            {"params": PoolingParams(task="token_embed")},
            ValueError,
            "task is 'token_embed', but a score is of a whole text; allowed: embed",
        ),
        (
            ONE_LABEL,
            ("a", "b"),
            {"params": PoolingParams(task="token_classify")},
            ValueError,
            "task is 'token_classify', but a score is of a whole text; allowed: classify",
        ),
        (EMBEDS, (["a", ""], ["b", "c"]), {}, ValueError, r"queries\[1\] must have at least one token, got ''"),
        (EMBEDS, ("a", "b"), {"cache_salt": 7}, TypeError, "cache_salt must be"),
        (ONE_LABEL, ("a", "b"), {"cache_salt": ""}, ValueError, "cache_salt must "),
        (EMBEDS, ("a", ["b", ""]), {}, ValueError, r"documents\[1\] must have at least one token, got ''"),
        (ONE_LABEL, ("a", LONG), {}, ValueError, r"documents\[0\] must have at most 20 tokens .*, got at least"),
        (ONE_LABEL, ("a", ["b", "\ud800"]), {}, ValueError, r"documents\[1\] must be valid Unicode"),
        (ONE_LABEL, ("a", ["b", "fox" * 40]), {}, ValueError, r"documents\[1\] must have at most 20 tokens"),
    ],
)
def test_what_cannot_be_scored(
    pooling: Pooling, arguments: tuple[Any, Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        processor(pooling).score(*arguments, **options)


def test_results_have_the_names_of_their_kind() -> None:
    rows = [[3, 4, 0, 0], [0, 0, 5, 12]]
    running = ended(processor().process(["a", "hello"]), rows, [None, 2])
    expected = normalised(np.array(rows, np.float32))
    found = embeddings(running)
    np.testing.assert_allclose([each.outputs.embedding for each in found], expected, rtol=1e-6)
    assert [each.outputs.hidden_size for each in found] == [4, 4]
    assert [(each.request_id, each.finished, each.num_cached_tokens) for each in found] == [
        ("r0", True, None),
        ("r1", True, 2),
    ]
    assert found[1].prompt_token_ids == TOKENIZER.encode("hello")
    encoded = results(running)
    assert isinstance(encoded[1].outputs, PoolingOutput)
    np.testing.assert_allclose(encoded[1].outputs.data.numpy(), expected[1], rtol=1e-6)
    of_labels = classifications(ended(processor(LABELS).process(["a"]), [[1, 2, 3]]))
    assert of_labels[0].outputs.num_classes == 3
    np.testing.assert_allclose(of_labels[0].outputs.probs, softmax(np.array([[1, 2, 3]]))[0], rtol=1e-6)
    assert (embeddings([]), results([]), classifications([])) == ([], [], [])
    assert (EmbeddingOutput([0.5]).hidden_size, ClassificationOutput([]).num_classes) == (1, 0)


def test_results_of_tokens_are_those_of_their_requests() -> None:
    requests = processor().process(["a", "b", "c"], task="token_embed")
    rows: list[Any] = [[[1, 0], [0, 2]], [[3, 0]], [[0, 4], [5, 0], [0, 6]]]
    found = [each.outputs.values.tolist() for each in results(ended(requests, rows))]
    assert found == [[[1, 0], [0, 1]], [[1, 0]], [[0, 1], [1, 0], [0, 1]]]


@pytest.mark.parametrize(
    ("reason", "why", "has_vectors"), [("error", "NaN", True), ("abort", None, True), ("length", None, False)]
)
def test_a_request_that_ends_without_a_result_is_an_error(reason: str, why: str | None, has_vectors: bool) -> None:
    good, bad = processor().process(["a", "b"])
    running = ended([good], [[1, 2, 3, 4]])
    failed = collecting(bad)
    extras = {NAME: Vectors(0, 4, bytes(16))} if has_vectors else {}
    failed.update(EngineOutput("r1", (), finish_reason=reason, stop_reason=why, extras=extras), 0.0)
    for make in (results, embeddings, Scoring([good, bad], [(0, 1)]).scores):
        with pytest.raises(RuntimeError, match=rf"request r1 has no result \({reason}\): {why}"):
            make([*running, failed])  # type: ignore[operator]


def test_a_request_that_pools_gets_no_token() -> None:
    (request,) = processor().process("a")
    with pytest.raises(RuntimeError, match="'r0' got a token, but it pools"):
        collecting(request).look("r0", 0.0)

"""Prefixes of models with recurrences: snapshots of states where prompts end and part, for no other prefix."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from families import family, write_checkpoint
from simulated_engine import SimulatedEngine, outputs_of

from compiled_engine.engine.block_pool import BlockGroup
from compiled_engine.engine.kv_cache import KVCacheManager
from compiled_engine.engine.messages import EngineRequest
from compiled_engine.engine.request import Request
from compiled_engine.engine.steps import StepInFlight
from compiled_engine.features.recurrence.snapshots import LEAST_GAIN, StateSnapshots
from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.llm import LLM
from compiled_engine.options import EngineOptions
from compiled_engine.other_engines.translate import make_options
from compiled_engine.resolve.engine import resolve
from compiled_engine.resolve.recurrences import LEAST_SNAPSHOTS, MIB, resolve_snapshots
from compiled_engine.sampling.params import SamplingParams

VOCABULARY = 131
SMALL: dict[str, Any] = {"device": "cpu", "progress": False, "dtype": "float32", "max_num_seqs": 3, "block_size": 4}
PARAMS = SamplingParams(temperature=0, max_tokens=6, logprobs=1, detokenize=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen3_5_text")
    write_checkpoint(made, family("qwen3_5_text"))
    return made


def related_prompts(num_shared: int, num_own: int, count: int) -> list[list[int]]:
    """Random prompts with the same first tokens."""
    generator = random.Random(0)

    def tokens(number: int) -> list[int]:
        return [generator.randrange(VOCABULARY) for _ in range(number)]

    shared = tokens(num_shared)
    return [shared + tokens(num_own) for _ in range(count)]


def results(outputs: Sequence[RequestOutput]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of each."""
    completions = [output.outputs[0] for output in outputs]
    return [
        (list(one.token_ids), [entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs, strict=True)])
        for one in completions
    ]


def one_by_one(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    return [llm.generate([{"prompt_token_ids": prompt}], PARAMS)[0] for prompt in prompts]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("qwen3_5_text", "eager"),
        ("kimi_linear", "eager"),
        pytest.param(
            *("qwen3_5_text", "compiled"),
            marks=pytest.mark.shown_by(
                "features/recurrence/test_snapshots.py::test_tokens_and_log_probabilities_are_the_same_with_and_without",
                "recurrence/test_recurrent_models.py::test_logprobs_are_those_of_transformers",
            ),
        ),
    ],
)
def test_tokens_and_log_probabilities_are_the_same_with_and_without(kind: str, mode: str, tmp_path: Path) -> None:
    write_checkpoint(folder := tmp_path, family(kind))
    prompts = related_prompts(100, 30, 4)
    with LLM(folder, **SMALL, mode="eager", max_model_len=160, enable_prefix_caching=False) as llm:
        expected = results(one_by_one(llm, prompts))
    with LLM(folder, **SMALL, mode=mode, max_model_len=160) as llm:
        outputs = one_by_one(llm, prompts)
        # The second finds out where prompts part, the others begin there.
        assert [output.num_cached_tokens for output in outputs] == [0, 0, 100, 100]
        # At once and once more, with snapshots at the ends of prompts.
        again = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS)
        metrics = llm.metrics()
    for found in (outputs, again):
        for (tokens, logprobs), (same_tokens, same_logprobs) in zip(results(found), expected, strict=True):
            assert tokens == same_tokens
            assert logprobs == pytest.approx(same_logprobs, abs=1e-5 if mode == "eager" else 1e-4)
    assert metrics["prefix_hits"] == sum(output.num_cached_tokens for output in (*outputs, *again)) > 0


@pytest.mark.usefixtures("one_thread")
def test_a_long_prefix_is_cached_from_the_third_request_on(tmp_path: Path) -> None:
    short = family("lfm2")
    write_checkpoint(tmp_path, replace(short, changes={**short.changes, "max_position_embeddings": 4200}))
    prompts = related_prompts(4000, 50, 4)
    with LLM(tmp_path, **SMALL | {"block_size": 16}, mode="eager", max_model_len=4200) as llm:
        outputs = one_by_one(llm, prompts)
    for prompt, output in zip(prompts[2:], outputs[2:], strict=True):
        assert output.num_cached_tokens >= 0.9 * len(prompt)


@pytest.mark.usefixtures("one_thread")
def test_a_preempted_request_goes_on_from_a_snapshot(folder: Path) -> None:
    prompts = related_prompts(72, 20, 3)
    few = {"num_blocks": 50, "async_scheduling": True, "max_num_batched_tokens": 40, "max_model_len": 128}
    params = SamplingParams(temperature=0, max_tokens=30, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    with LLM(folder, **SMALL, mode="eager", **few | {"num_blocks": 128}, enable_prefix_caching=False) as llm:
        expected = [list(output.outputs[0].token_ids) for output in llm.generate(given, params)]
    with LLM(folder, **SMALL, mode="eager", **few) as llm:
        llm.generate(given[:2], params)
        found = [list(output.outputs[0].token_ids) for output in llm.generate(given, params)]
        metrics = llm.metrics()
    assert found == expected
    assert metrics["preemptions"] > 0


def test_the_number_follows_from_memory_and_is_part_of_the_key(folder: Path) -> None:
    def config_of(**options: Any) -> Any:
        return resolve(make_options({"model": folder, "device": "cpu", "max_num_seqs": 3} | options))

    config = config_of()
    assert config.cache.enable_prefix_caching
    assert config.model.recurrences.num_snapshots == 8 * 3
    assert config.reasons["model.recurrences.num_snapshots"].endswith("GiB of 0.25 GiB")
    assert config_of(num_state_snapshots=5).model.recurrences.num_snapshots == 5
    off = config_of(num_state_snapshots=0)
    assert not off.cache.enable_prefix_caching
    assert "num_state_snapshots is 0" in off.reasons["cache.enable_prefix_caching"]
    assert config_of(enable_prefix_caching=False).model.recurrences.num_snapshots == 0
    assert LEAST_SNAPSHOTS >= 3


def test_large_states_have_a_few_snapshots_beyond_the_budget() -> None:
    """With fewer none would be left where prompts part."""
    counts = [resolve_snapshots(EngineOptions(), size * MIB, 16, torch.device("cpu"), {}) for size in (1, 4, 100, 1000)]
    assert counts == [128, 64, LEAST_SNAPSHOTS, LEAST_SNAPSHOTS]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qwen3", {}, "num_state_snapshots is 4, but the model has no recurrences; allowed: None, 0"),
        (
            "qwen3_5_text",
            {"enable_prefix_caching": False},
            "num_state_snapshots is 4, but enable_prefix_caching is False; allowed: None, 0",
        ),
    ],
)
def test_snapshots_that_nothing_uses_are_refused(
    name: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, family(name))
    with pytest.raises(ValueError, match=f"^{message}$"):
        resolve(make_options({"model": tmp_path, "device": "cpu", "num_state_snapshots": 4} | options))


# The manager alone, in blocks of 4 tokens.


def made(num_slots: int, least_gain: int = 1) -> tuple[KVCacheManager, StateSnapshots]:
    snapshots, groups = StateSnapshots(num_slots, 4, least_gain), [BlockGroup(64, 4)]
    return KVCacheManager(groups, snapshots.resources(groups), enable_prefix_caching=True), snapshots


def saved(snapshots: StateSnapshots, request: Request) -> int | None:
    """Plan the step that computes a request up to the first of its ends. Returns the slot that its state gets."""
    end, *rest = request.step_ends
    request.step_ends = tuple(rest)
    snapshots.reached_end(request, end)
    step = SimpleNamespace(output=SimpleNamespace(extras={}))
    snapshots.planned(cast(StepInFlight, step))
    return step.output.extras.get("recurrence", {}).get(request.request_id)


def begins_with(snapshots: StateSnapshots, request: Request) -> int | None:
    """Return the slot of the state that an admitted request begins with."""
    extras: dict[str, Any] = {}
    snapshots.admitted(request, extras)
    return extras.get("recurrence")


def admitted(cache: KVCacheManager, tokens: Sequence[int]) -> Request:
    given = EngineRequest("r", tuple(tokens), SamplingParams())
    request = Request.of(given, order=(0, 0), max_total_tokens=1000)
    assert cache.admit(request, reserve=0)
    return request


def computed(cache: KVCacheManager, snapshots: StateSnapshots, tokens: Sequence[int]) -> tuple[int, list[int | None]]:
    """Admit a request, compute and free it. Returns its cached tokens, and the slots of its snapshots."""
    request, slots = admitted(cache, tokens), []
    num_cached = request.num_computed_tokens
    assert (begins_with(snapshots, request) is not None) == (num_cached > 0)
    while request.step_ends:
        request.num_computed_tokens = request.step_ends[0]
        slots.append(saved(snapshots, request))
    request.num_computed_tokens = len(tokens)
    cache.register(request)
    cache.take_registered()
    cache.free(request)
    cache.check_integrity([])
    return num_cached, slots


def test_snapshots_are_taken_at_the_end_and_where_prompts_part() -> None:
    cache, snapshots = made(8)
    assert computed(cache, snapshots, range(21)) == (0, [0])
    assert computed(cache, snapshots, [*range(10), *range(50, 61)]) == (0, [1, 2])  # after 8 tokens, and 20
    assert computed(cache, snapshots, [*range(10), *range(70, 81)]) == (8, [3])
    assert computed(cache, snapshots, range(21)) == (20, [])
    assert computed(cache, snapshots, range(20)) == (8, [4])  # one token is always computed


def test_a_snapshot_that_saves_little_is_not_taken() -> None:
    cache, snapshots = made(8, LEAST_GAIN)
    assert computed(cache, snapshots, range(LEAST_GAIN)) == (0, [])
    assert computed(cache, snapshots, range(LEAST_GAIN + 1)) == (0, [0])


def test_the_one_used_least_recently_gives_way() -> None:
    cache, snapshots = made(2)
    for first in (0, 20, 0, 40):  # the third use keeps the first one
        computed(cache, snapshots, range(first, first + 10))
    assert [computed(cache, snapshots, range(first, first + 10))[0] for first in (0, 40)] == [8, 8]
    assert computed(cache, snapshots, range(20, 30))[0] == 0


def test_a_request_that_goes_on_takes_snapshots_of_its_prompt_alone() -> None:
    """Blocks of its answer may be cached too."""
    cache, snapshots = made(8)
    computed(cache, snapshots, range(21))
    snapshots.unregister_all()
    given = EngineRequest("r", tuple(range(10)), SamplingParams(), output_token_ids=tuple(range(10, 21)))
    request = Request.of(given, order=(0, 0), max_total_tokens=1000)
    assert cache.admit(request, reserve=0)
    assert request.step_ends == (8,)
    cache.free(request)
    cache.check_integrity([])


def test_a_snapshot_that_another_request_comes_to_is_in_use() -> None:
    """The snapshot had not been taken when that request was admitted."""
    cache, snapshots = made(2)
    requests = [admitted(cache, range(first, first + 10)) for first in (0, 0, 20, 40)]
    one, same, other, last = requests
    slots = []
    for request in (one, other, same, last):
        slots.append(saved(snapshots, request))
        cache.take_registered()
    assert slots == [0, 1, None, 1]
    assert snapshots.longest_prefix(one, 9) == 8
    for request in requests:
        cache.free(request)
    cache.check_integrity([])


def test_a_step_gives_no_slot_twice_and_finds_none_that_it_fills() -> None:
    cache, snapshots = made(1)
    one, other, same = admitted(cache, range(10)), admitted(cache, range(20, 30)), admitted(cache, range(10))
    assert saved(snapshots, one) == 0
    assert saved(snapshots, other) is None
    assert saved(snapshots, same) is None
    assert snapshots.longest_prefix(one, 9) == 0
    cache.unregister(cache.take_registered())  # the step fails
    assert snapshots.longest_prefix(one, 9) == 0
    for request in (one, other, same):
        cache.free(request)
    cache.check_integrity([])


def test_a_reset_forgets_every_snapshot() -> None:
    cache, snapshots = made(4)
    computed(cache, snapshots, range(21))
    cache.reset_prefix_cache()
    assert computed(cache, snapshots, range(21)) == (0, [0])


def test_chunks_end_at_snapshots() -> None:
    engine = SimulatedEngine(num_snapshots=4, num_blocks=64, max_model_len=64)

    def counts_of(name: str, prompt: list[int]) -> list[int]:
        record, counts = engine.add(name, prompt, params=outputs_of(2)), []
        while record.finish_reason is None:
            counts += engine.begin_step().counts
            engine.finish_step()
        return counts

    assert counts_of("one", [token % 11 for token in range(30)]) == [28, 2, 1]
    assert counts_of("other", [*(token % 11 for token in range(18)), *([5] * 12)]) == [16, 12, 2, 1]
    assert counts_of("third", [*(token % 11 for token in range(18)), *([6] * 12)]) == [12, 2, 1]

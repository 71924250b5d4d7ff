"""Adapters beside what else an engine may have: drafts, quantised linears and an 8-bit KV cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapter_folders import BASE, LINEARS, OPTIONS, make_adapter
from checkpoints import make_checkpoint

from compiled_engine import LLM, LoRARequest, SamplingParams
from compiled_engine.frontend.outputs import RequestOutput

# Repetitive ones, from which n-grams are drafted.
PROMPTS = [[5, 9, 27, 5, 9, 27, 5, 9], [7] * 20, list(range(1, 34)), [90, 2, 90, 2, 90]]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, prompt_logprobs=0)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("base")


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    model = make_checkpoint(base, "qwen3", **BASE)
    folder = tmp_path_factory.mktemp("adapters")
    targets = {1: LINEARS, 8: (*LINEARS, "lm_head"), 64: LINEARS}
    return [make_adapter(folder / str(rank), model, rank, targets=targets[rank], seed=rank) for rank in targets]


def prompts_of(adapters: list[Path] | None) -> dict[str, Any]:
    """Arguments of generate: the first prompt without an adapter, each other one with its own, if any are given."""
    requests = None
    if adapters is not None:
        requests = [None, *(LoRARequest(path.name, 1 + place, path) for place, path in enumerate(adapters))]
    return {"prompts": [{"prompt_token_ids": ids} for ids in PROMPTS], "lora_request": requests}


def generate(base: Path, adapters: list[Path] | None, **options: Any) -> tuple[list[RequestOutput], dict[str, Any]]:
    lora = {name: value for name, value in OPTIONS.items() if adapters is not None or "lora" not in name}
    with LLM(base, **{"strict_passes": True} | lora | options) as llm:
        return llm.generate(**prompts_of(adapters), sampling_params=GREEDY), llm.metrics()


# Compiled engines with adapters and drafts are compared with merged models there.
SHOWN = pytest.mark.shown_by(
    "engine/test_adapters_beside.py::test_drafts_change_no_token",
    "engine/test_packed_beside.py::test_adapters_and_drafts",
)


@pytest.mark.parametrize("mode", [pytest.param("compiled", marks=SHOWN), "eager"])
def test_drafts_change_no_token(mode: str, base: Path, adapters: list[Path]) -> None:
    options = {"mode": "eager", "strict_passes": False} if mode == "eager" else {}
    expected, _ = generate(base, adapters, **options)
    found, metrics = generate(base, adapters, speculative_config=NGRAM, **options)
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]
    assert metrics["accepted_tokens"] > 0
    assert metrics["adapter_placements"] >= len(adapters)


def distance(one: RequestOutput, other: RequestOutput) -> float:
    """The largest difference of the prompt's log-probabilities."""
    pairs = zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], one.prompt_token_ids[1:], strict=True)
    return max(abs(x[token_id].logprob - y[token_id].logprob) for x, y, token_id in pairs)


SHOWN_CACHE = pytest.mark.shown_by(
    "engine/test_packed_beside.py::test_adapters_and_drafts",
    "engine/test_coded_cache_engine.py::test_int8_gives_the_same_tokens_however_it_runs",
)


@pytest.mark.parametrize(
    ("options", "share"),
    [({"quantization": "fp8"}, 0.3), pytest.param({"kv_cache_dtype": "int8"}, 0.1, marks=SHOWN_CACHE)],
)
def test_with_codes_a_request_is_near_its_merged_model(
    base: Path, adapters: list[Path], options: dict[str, Any], share: float
) -> None:
    """Nearer by far than the base model is. Codes of merged weights are others than those of the base."""
    options = OPTIONS | options | {"strict_passes": True, "compile_ranges": ()}
    with LLM(base, **options) as llm:
        plain = llm.generate(**prompts_of(None), sampling_params=GREEDY)
        llm.reset_prefix_cache()
        found = llm.generate(**prompts_of(adapters), sampling_params=GREEDY)
    assert distance(found[0], plain[0]) < 1e-3
    # With adapters, too, that no request has: so it finds the linears compiled.
    with LLM(base, **options, merge_adapter=adapters[1]) as llm:
        merged = llm.generate(**prompts_of(None), sampling_params=GREEDY)
    assert distance(found[2], merged[2]) < share * distance(plain[2], merged[2])

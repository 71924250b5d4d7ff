"""Weights in four bits beside what else an engine may have: adapters, drafts in an adaptive number, 8-bit KV caches.

Tokens and log-probabilities are those of the decoded weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapter_folders import OPTIONS, assert_is_of, make_adapter, merge
from checkpoints import load_checkpoint, make_checkpoint
from eagle_heads import head_config, random_tensors, write_head
from packed_checkpoints import PACKINGS, write_packed
from test_quantised_engine import EVEN, ONE_LAYER
from torch import float32

from compiled_engine import LLM, LoRARequest, SamplingParams
from compiled_engine.frontend.outputs import RequestOutput

# Repetitive ones, from which n-grams are drafted; the second is longer than a step.
PROMPTS = [[5, 9, 27, 5, 9, 27, 5, 9], [7] * 20, [90, 2, 90, 2, 90]]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, prompt_logprobs=0, detokenize=False)
PLAIN = {name: value for name, value in OPTIONS.items() if "lora" not in name} | {"skip_tokenizer_init": True}
COMPILED: dict[str, Any] = {"mode": "compiled", "strict_passes": True, "compile_ranges": ()}
EAGER: dict[str, Any] = {"mode": "eager"}
METHODS, CACHES = ("ngram", "draft_model", "eagle3"), ("auto", "int8", "fp8")
# Nothing reads a checkpoint's scales of keys and values in eager mode.
REFUSED = [("eager", method, "fp8") for method in METHODS]
ADAPTIVE = {"num_speculative_tokens": 3, "enable_adaptive_verification": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a model in four bits as `packed`, the same with the values of its codes as `decoded`, and a draft head."""
    folder = tmp_path_factory.mktemp("four bits")
    make_checkpoint(folder / "plain", "qwen3", **EVEN | ONE_LAYER | {"tie_word_embeddings": True})
    oracle: Any = write_packed(folder / "plain", folder / "packed", PACKINGS["awq, small groups"], [])
    oracle.save_pretrained(folder / "decoded")
    (folder / "head").mkdir()
    config = head_config(folder / "decoded", eagle_aux_hidden_state_layer_ids=[0])
    write_head(folder / "head", config, random_tensors(config, num_aux_layers=1))
    return folder


def drafts_of(method: str, folder: Path) -> dict[str, Any]:
    """Options for drafts of the prompt's n-grams, of the model itself, also in four bits, or of a head of noise."""
    if method == "ngram":
        return {"speculative_config": ADAPTIVE | {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}}
    model = folder / ("packed" if method == "draft_model" else "head")
    return {"speculative_config": ADAPTIVE | {"method": method, "model": str(model)}}


def generate(path: Path, adapter: Path | None = None, **options: Any) -> tuple[list[RequestOutput], dict[str, Any]]:
    """Run the prompts, the last two with an adapter if one is given. Returns outputs and the engine's metrics."""
    given = None if adapter is None else LoRARequest("own", 1, adapter)
    with LLM(path, **options) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=[None, given, given])
        llm.core.check_integrity()
        return outputs, llm.metrics()


def test_adapters_and_drafts(folder: Path, tmp_path: Path) -> None:
    decoded = load_checkpoint(folder / "decoded", float32)
    adapter = make_adapter(tmp_path, decoded, rank=8)
    options = OPTIONS | COMPILED | {"skip_tokenizer_init": True}
    outputs, metrics = generate(folder / "packed", adapter, **options, **drafts_of("ngram", folder))
    assert_is_of(decoded, outputs[0])
    merge(decoded, adapter)
    for output in outputs[1:]:
        assert_is_of(decoded, output)
    assert metrics["accepted_tokens"] > 0
    assert metrics["adapter_placements"] > 0


# Compiled codes meet several rows of a request above, and these drafts and caches below.
SHOWN = pytest.mark.shown_by(
    "engine/test_packed_beside.py::test_adapters_and_drafts",
    "engine/test_packed_beside.py::test_drafts_and_8_bit_caches",
)
CASES = [(mode, method, cache) for mode in ("eager", "compiled") for method in METHODS for cache in CACHES]


@pytest.mark.parametrize(
    ("mode", "method", "cache"),
    [each if each[0] == "eager" else pytest.param(*each, marks=SHOWN) for each in CASES if each not in REFUSED],
)
def test_drafts_and_8_bit_caches(mode: str, method: str, cache: str, folder: Path) -> None:
    """A draft model that is the model itself is always right, so its four bits and its cache are those of the model."""
    given = COMPILED if mode == "compiled" else EAGER
    options = PLAIN | {"kv_cache_dtype": cache}
    outputs, metrics = generate(folder / "packed", **options, **given, **drafts_of(method, folder))
    if cache == "auto":
        decoded = load_checkpoint(folder / "decoded", float32)
        for output in outputs:
            assert_is_of(decoded, output)
    else:
        expected, _ = generate(folder / "decoded", **options, **EAGER if cache == "int8" else COMPILED)
        for found, wanted in zip(outputs, expected, strict=True):
            assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
            rows = zip(found.prompt_token_ids, found.prompt_logprobs, wanted.prompt_logprobs, strict=True)
            for token, one, other in rows:
                assert one is None or abs(one[token].logprob - other[token].logprob) < 3e-4
    assert metrics["draft_tokens"] > 0
    assert method != "draft_model" or metrics["accepted_tokens"] == metrics["draft_tokens"]

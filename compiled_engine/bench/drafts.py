"""Draft methods and acceptance rates with which the performance table measures speculative decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compiled_engine.bench.shapes import write_shape
from compiled_engine.config import ModelConfig
from compiled_engine.resolve.speculation import DRAFT_MODEL, EAGLE3, NGRAM

NUM_DRAFTS = 3
# Shares of steps that accept the first draft, the first two, and all three, typical of heads for models of this size;
# and the tokens per step that follow.
RATES = (0.8, 0.56, 0.43)
LENGTH = 1 + sum(RATES)
# The draft model's shape, and a head's vocabulary size.
DRAFT_SHAPE, HEAD_VOCABULARY = "qwen3-0.6b", 32_000
SAID = {
    NGRAM: "drafts of n-grams, compared",
    DRAFT_MODEL: f"drafts of the {DRAFT_SHAPE} shape, {LENGTH:.2f} tokens a step at random",
    EAGLE3: f"drafts of a head, {LENGTH:.2f} tokens a step at random",
}


def drafts_of(method: str, model: ModelConfig, folder: Path) -> dict[str, Any]:
    """Return the option speculative_config for a draft method.

    N-gram drafts are verified as usual; random prompts yield few of them. Draft models and heads have random weights,
    so their drafts are accepted at random, as often as a typical head's (RATES). The config.json of the draft model or
    head is written to `folder`, for load_format "dummy".
    """
    found: dict[str, Any] = {"method": method, "num_speculative_tokens": NUM_DRAFTS}
    if method == NGRAM:
        return found
    if method == DRAFT_MODEL:
        path = write_shape(folder / "draft", DRAFT_SHAPE)
    else:
        path = folder / f"head-{model.hidden_size}"
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(head_of(model)))
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": list(RATES)}
    return found | synthetic | {"model": str(path)}


def head_of(model: ModelConfig) -> dict[str, Any]:
    """Return the content of config.json of a typical EAGLE-3 head for this model: one layer of the model's shape.

    Values that the model's configuration lacks are replaced by usual ones. It may lack some if transformers' code runs
    the model.
    """
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size or 4 * model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": model.vocab_size,
        "draft_vocab_size": min(model.vocab_size, HEAD_VOCABULARY),
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.rms_norm_eps or 1e-6,
        "rope_theta": model.rope.theta or 10_000.0,
        "hidden_act": "silu",
    }

"""Keys and methods of vLLM's speculative_config that the engine does not have: what to do instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from compiled_engine.schema import unknown_name_message

_AS_THE_MODEL = "leave it out: a draft model is run as the model is"
_IN_A_ROW = "leave it out: drafts are a sequence, made one after the other"
_ACCEPTANCE = "leave it out: a draft is accepted if it is the token that the model samples"

INSTEAD: Mapping[str, str] = {
    "disable_by_batch_size": "give enable_adaptive_verification: True, with which a step has as many drafts as pay",
    "tensor_parallel_size": "give draft_tensor_parallel_size",
    **dict.fromkeys(
        ["enforce_eager", "max_model_len", "quantization", "attention_backend", "moe_backend", "draft_load_config"],
        _AS_THE_MODEL,
    ),
    "code_revision": "leave it out: no code of a checkpoint is run",
    "use_heterogeneous_vocab": "give a draft model of the same vocabulary",
    **dict.fromkeys(("speculative_token_tree", "parallel_drafting"), _IN_A_ROW),
    "disable_padded_drafter_batch": "leave it out: it changes no token",
    **dict.fromkeys(
        ["draft_sample_method", "acceptance_method", "posterior_threshold", "posterior_alpha"],
        _ACCEPTANCE,
    ),
    **dict.fromkeys(
        (
            f"suffix_decoding_{name}"
            for name in ("max_tree_depth", "max_cached_requests", "max_spec_factor", "min_token_prob")
        ),
        "give method: 'ngram', which finds what followed the last tokens before",
    ),
}

_OWN_HEADS = "the draft layers of a checkpoint itself are not run"
_OTHER_HEADS = "draft models of this kind are not run"
METHODS: Mapping[str, str] = {
    "mtp": _OWN_HEADS,
    **dict.fromkeys(("eagle", "medusa", "mlp_speculator", "dflash", "dspark", "draft_tokens"), _OTHER_HEADS),
    "suffix": "texts of other requests are not searched",
}


def other_method_message(method: str) -> str | None:
    """Return the error for another engine's method of drafts; None for a name that none has."""
    reason = METHODS.get("mtp" if method.endswith("_mtp") else method)
    if reason is None:
        return None
    return (
        f"speculative_config['method'] is {method!r}: {reason}; leave speculative_config out, which changes no answer, "
        "or give the method ngram, draft_model or eagle3"
    )


def is_default(name: str, value: Any) -> bool:
    """Return whether a key that the engine does not have asks for nothing."""
    return name in INSTEAD and value is False


def unknown_key_message(name: str, value: Any, known: Iterable[str]) -> str:
    """Return the error for a key that the engine does not have."""
    if name in INSTEAD:
        return f"speculative_config[{name!r}] is {value!r}, but there is no such key; {INSTEAD[name]}"
    keys = tuple(known)
    return f"{unknown_name_message('speculative_config has no key', name, keys)}; allowed: {', '.join(keys)}"

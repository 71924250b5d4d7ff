"""Methods and arguments of vLLM's `LLM` that this engine lacks, with the alternatives that errors name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_QUEUE = "generate() takes any number of prompts, and stream() yields the output of one as it grows"
_WEIGHTS = "update_weights() takes a folder, or tensors"

MISSING = {
    "reward": "classify() gives the scores of a model with one label",
    "beam_search": "SamplingParams(n=...) samples several completions",
    "enqueue": _QUEUE,
    "enqueue_chat": _QUEUE,
    "wait_for_completion": _QUEUE,
    "add_request": _QUEUE,
    "step": _QUEUE,
    "apply_model": "the model's layers are compiled away; `compiled-engine inspect` shows what runs",
    "supported_tasks": "config.model.pooling is None for a model that generates text; else its task is what it does",
    "default_sampling_params": "get_default_sampling_params() returns a copy",
    "request_counter": "metrics() counts requests, and each output has its request_id",
    "set_tokenizer": "give LLM(tokenizer=...)",
    "init_weight_transfer_engine": _WEIGHTS,
}

_AS_PROMPTS = "give token ids as prompts: a list of them, or {'prompt_token_ids': ids}"

# Arguments of generate, chat and the pooling methods. None has no effect.
ARGUMENTS = {
    "prompt_token_ids": _AS_PROMPTS,
    "input_ids": _AS_PROMPTS,
    "prompt_adapter_request": "there are no prompt adapters",
    "guided_options_request": "use SamplingParams(structured_outputs=...)",
    "chat_template_content_format": "a content is a string, or parts {'type': 'text', 'text': str} that are joined",
    "tokenization_kwargs": "tokenise yourself, and give token ids as prompts",
}
# Values other than None that match this engine's behaviour.
HELD = {"chat_template_content_format": ("auto", "string")}
# Further arguments of the pooling methods.
POOLING_ARGUMENTS = {
    "truncate_prompt_tokens": "give PoolingParams(truncate_prompt_tokens=...)",
    "chat_template": "a pair is written in the template of the checkpoint, or as its tokenizer joins two texts",
}


def refuse_arguments(method: str, given: Mapping[str, Any], *, pools: bool = False) -> None:
    """Raise TypeError for unknown arguments, and for arguments of vLLM that this engine lacks.

    An argument that this engine lacks is accepted if it is None, or if its value asks for what this engine does anyway
    (HELD). method: name of the called method, for errors. given: the arguments by name. pools: whether it is a pooling
    method.
    """
    known = ARGUMENTS | POOLING_ARGUMENTS if pools else ARGUMENTS
    for name, value in given.items():
        if name not in known:
            raise TypeError(f"LLM.{method}() got an unexpected keyword argument {name!r}")
        if value is not None and value not in HELD.get(name, ()):
            raise TypeError(f"LLM.{method}() has no {name}, which is {value!r}; {known[name]}")

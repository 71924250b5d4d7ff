"""Requests whose results must not depend on what runs beside them, and their results to the last bit."""

from __future__ import annotations

import struct
from typing import Any

from compiled_engine import LLM, SamplingParams
from compiled_engine.frontend.outputs import RequestOutput

SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0, "logprobs": 0},
    {"temperature": 0.8, "logprobs": 1},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "logprobs": 3},
    {"temperature": 0, "logprobs": 1, "prompt_logprobs": 1},
    {"temperature": 0, "repetition_penalty": 1.1, "logprobs": -1},
)


def requests(text_ids: list[int], count: int, longest: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts of text and their sampling. Some prompts share a prefix, some repeat themselves."""
    prompts, params = [], []
    for number in range(count):
        start = 0 if number % 3 == 0 else number * 97 % (len(text_ids) - longest)
        length = 1 + number * 29 % longest
        times = 3 if number % 4 == 1 else 1
        prompts.append((text_ids[start : start + -(-length // times)] * times)[:longest])
        max_tokens = 36 if number % 5 == 0 else 4 + number % 9
        how = SAMPLING[number % len(SAMPLING)]
        params.append(SamplingParams(seed=number, max_tokens=max_tokens, ignore_eos=True, **how))
    return prompts, params


def bits(output: RequestOutput) -> tuple[Any, ...]:
    """Return the tokens of a result, and all its log-probabilities as the bytes of their float32."""

    def of_rows(rows: Any) -> tuple[Any, ...]:
        return tuple(
            None if row is None else tuple((token, struct.pack("f", each.logprob)) for token, each in row.items())
            for row in rows or ()
        )

    return tuple(
        (tuple(each.token_ids), of_rows(each.logprobs), of_rows(output.prompt_logprobs)) for each in output.outputs
    )


def alone(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[tuple[Any, ...]]:
    """Return the results of requests that run one after the other, without cached prefixes."""
    found = []
    for prompt, each in zip(prompts, params, strict=True):
        llm.reset_prefix_cache()
        found.append(bits(llm.generate({"prompt_token_ids": prompt}, each, use_tqdm=False)[0]))
    return found


def together(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[tuple[Any, ...]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [bits(output) for output in outputs]

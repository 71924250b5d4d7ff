"""Starts engines, one after the other, as a user's script has them: python gpu_start.py FOLDER OPTIONS PROMPTS, all but
the folder as JSON, OPTIONS a list of them. Prints what came out, with the counts of each start, as a line of JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import triton

from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

OUTPUT_LEN = 12
COUNTS = ("traces", "compiles", "captures", "graph_replays", "cache")


def start(folder: str, options: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
    compiled: list[str] = []

    def note(*, src: Any, cache_hit: bool, **about: Any) -> None:
        if not cache_hit:
            compiled.append(src.name)

    triton.knobs.compilation.listener = note
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = SamplingParams(
        temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True, logprobs=0, prompt_logprobs=0, detokenize=False
    )
    with LLM(folder, progress=False, skip_tokenizer_init=True, **options) as llm:
        outputs = llm.generate(given, params, use_tqdm=False)
        metrics = llm.metrics()
    found = []
    for output in outputs:
        completion = output.outputs[0]
        assert output.prompt_logprobs is not None
        assert completion.logprobs is not None
        entries = [*output.prompt_logprobs[1:], *completion.logprobs]
        logprobs = [next(iter(entry.values())).logprob for entry in entries if entry is not None]
        found.append({"token_ids": list(completion.token_ids), "logprobs": logprobs})
    return {"outputs": found, "kernels_compiled_here": compiled} | {name: metrics[name] for name in COUNTS}


if __name__ == "__main__":
    folder, prompts = sys.argv[1], json.loads(sys.argv[3])
    print(json.dumps([start(folder, options, prompts) for options in json.loads(sys.argv[2])]))

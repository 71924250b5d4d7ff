"""Engines of many kinds whose memory is full of NaN when they begin, and random requests for them.

Allocations are poisoned by the session of tests; caches of keys and values and rows of recurrent states, which begin as
zeros, here: what a request finds in them another may have left there.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import poison
import torch
from adapter_folders import make_adapter
from checkpoints import load_checkpoint
from families import family, write_checkpoint

from compiled_engine import LLM, LoRARequest, SamplingParams
from compiled_engine.engine.executor import InProcessExecutor
from compiled_engine.features.recurrence.state_rows import StateRows

VOCABULARY, POSITIONS = 131, 4096
OPTIONS: dict[str, Any] = {"progress": False, "dtype": "float32", "max_model_len": 160, "max_num_seqs": 5}
OPTIONS |= {"max_num_batched_tokens": 40, "num_blocks": 80, "skip_tokenizer_init": True}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@dataclass(frozen=True)
class Kind:
    """A kind of engine: a family of models, with changes of its configuration, and the engine's options."""

    family: str
    options: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    adapters: bool = False  # requests may have some
    drafts: bool = False  # the model drafts for itself
    drawn: bool = False  # one of these kinds runs without --all


EAGER: dict[str, Any] = {"mode": "eager"}
COMPILED: dict[str, Any] = {"compile_ranges": ()}
DRAFTED: dict[str, Any] = EAGER | {"speculative_config": NGRAM}
KINDS = {
    "windows": Kind("mistral", EAGER, {"sliding_window": 21}),
    "windows, int8": Kind("mistral", EAGER | {"kv_cache_dtype": "int8"}, {"sliding_window": 21}),
    "windows, fp8": Kind("mistral", COMPILED | {"mode": "compiled", "kv_cache_dtype": "fp8"}, {"sliding_window": 21}),
    "windows, drafts, recorded": Kind("gemma3_text", COMPILED | {"speculative_config": NGRAM}),
    "sinks, experts": Kind("gpt_oss", EAGER | {"attention_backend": "torch"}),
    "drafts, int8": Kind("qwen3", EAGER | {"speculative_config": NGRAM, "kv_cache_dtype": "int8"}),
    "latent rows, drafts, int8": Kind("youtu", EAGER | {"speculative_config": NGRAM, "kv_cache_dtype": "int8"}),
    "draft model": Kind("qwen3", EAGER, drafts=True),
    "recurrences": Kind("qwen3_5_text", EAGER),
    "convolutions, few snapshots": Kind("lfm2", EAGER | {"num_state_snapshots": 2}),
    "recurrences, drafts": Kind("qwen3_5_text", DRAFTED),
    "convolutions, drafts": Kind("lfm2", EAGER | {"speculative_config": NGRAM, "num_state_snapshots": 2}),
    "state spaces, drafts": Kind("falcon_h1", DRAFTED),
    "wide heads, drafts": Kind("gemma4_text", DRAFTED, {"global_head_dim": 512}, drawn=True),
    "Kimi delta attention, drafts": Kind("kimi_linear", DRAFTED, drawn=True),
    "state spaces, experts, drafts": Kind("granitemoehybrid", DRAFTED, drawn=True),
    "linear biases, drafts": Kind("bloom", DRAFTED, {"seq_length": POSITIONS}, drawn=True),
    "latent rows, drafts": Kind("deepseek_v3", DRAFTED, drawn=True),
    "recurrences, compiled": Kind("qwen3_5_text", COMPILED | {"mode": "compiled"}),
    "adapters": Kind("qwen3", COMPILED | {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}, adapters=True),
    "adapters, int8, recorded": Kind(
        "qwen3",
        COMPILED | {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16, "kv_cache_dtype": "int8"},
        adapters=True,
    ),
}


@dataclass
class Poisoned:
    """An engine, and the adapters that requests may have."""

    llm: LLM
    adapters: list[LoRARequest | None]

    def results(self, requests: Iterable[tuple[list[int], SamplingParams, LoRARequest | None]]) -> list[list[int]]:
        """Return the tokens of requests that run together. Asserts that none ends with an error, as NaN would cause."""
        ids, params, adapters = zip(*requests, strict=True)
        prompts = [{"prompt_token_ids": each} for each in ids]
        given = {"lora_request": list(adapters)} if len(self.adapters) > 1 else {}
        outputs = self.llm.generate(prompts, list(params), use_tqdm=False, **given)
        assert all(completion.finish_reason == "length" for output in outputs for completion in output.outputs)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def random_requests(
        self, seed: int, count: int, longer: int = 1
    ) -> list[tuple[list[int], SamplingParams, LoRARequest | None]]:
        """Return requests with prompts of one token up to several steps, some of which share a prefix.

        longer: factor of lengths.
        """
        draw, most = random.Random(seed), 70 * longer
        shared = [[draw.randrange(VOCABULARY) for _ in range(most)] for _ in range(2)]
        requests = []
        for number in range(count):
            length = draw.choice([1, 2, 15, 16, 17, draw.randint(1, 60 * longer)])
            own = [draw.randrange(VOCABULARY) for _ in range(length)]
            begins = draw.choice([[], [], draw.choice(shared)[: draw.randint(1, most)], draw.choice(shared)])
            how = draw.choice([{}, {}, {"logprobs": 1}, {"prompt_logprobs": 1}, {"frequency_penalty": 0.5}])
            params = SamplingParams(
                temperature=draw.choice([0.0, 0.0, 0.7]),
                seed=number,
                max_tokens=draw.choice([1, 2, 9, 20]),
                ignore_eos=True,
                detokenize=False,
                **how,
            )
            requests.append((begins + own, params, draw.choice(self.adapters)))
        return requests


def start(kind: Kind, folder: Path, device: str, **options: Any) -> Poisoned:
    """Write the model, start the engine, and poison what it will write before it reads."""
    base = family(kind.family)
    changes = {**base.changes, **kind.changes, "max_position_embeddings": POSITIONS}
    write_checkpoint(folder, replace(base, changes=changes))
    adapters: list[LoRARequest | None] = [None]
    if kind.adapters:
        model = load_checkpoint(folder, torch.float32)
        for number in (1, 2, 3):
            path = make_adapter(folder / f"adapter-{number}", model, rank=4 * number, seed=number, size=0.5)
            adapters.append(LoRARequest(path.name, number, path))
    given = OPTIONS | kind.options | {"device": device} | options
    if given["mode"] == "eager":
        given.pop("compile_ranges", None)
    if kind.drafts:
        given["speculative_config"] = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    llm = LLM(folder, **given)
    poison_caches(llm)
    return Poisoned(llm, adapters)


def poison_caches(llm: LLM) -> None:
    """Fill caches of keys and values, also those of a draft model, and rows of states."""
    executor = llm.core.executor
    assert isinstance(executor, InProcessExecutor)
    runner = executor.runner
    tensors = list(runner.model.kv_caches)
    for feature in runner._hooks.features:
        tensors += getattr(feature, "kv_caches", ())  # a draft model's
    rows = [feature for feature in runner._hooks.features if isinstance(feature, StateRows)]
    tensors += [tensor for each in rows for group in each._groups for tensor in group]
    with torch.inference_mode():
        for tensor in tensors:
            poison.fill(tensor)

"""Host memory does not grow with the number of served requests."""

from __future__ import annotations

import gc
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

from small_engines import SMALL

from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

VOCAB_SIZE = 64
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 1,
}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"n": 2, "top_p": 0.9, "logprobs": 0},
    {"presence_penalty": 1.0, "bad_words_token_ids": ((5, 6),)},
)


def serve(llm: LLM, count: int, seed: int) -> None:
    """Requests of every kind, and one that is left."""
    random_ = random.Random(seed)
    prompts = [
        {"prompt_token_ids": [random_.randrange(VOCAB_SIZE) for _ in range(random_.randint(1, 9))]}
        for _ in range(count)
    ]
    params = [
        SamplingParams(max_tokens=random_.randint(1, 4), detokenize=False, **random_.choice(KINDS))
        for _ in range(count)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(output.finished for output in outputs)
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=20, detokenize=False, ignore_eos=True))
    next(stream)
    stream.close()


def test_thousands_of_requests_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = SMALL | {"max_num_seqs": 32, "max_num_batched_tokens": 256, "num_blocks": 256, "block_size": 4}
    with LLM(str(tmp_path), load_format="dummy", **options) as llm:
        serve(llm, 250, 0)  # the prefix cache fills, among others
        tracemalloc.start()
        try:
            kept = []
            # What was there before is not traced, and what takes its place is: it grows less each time.
            for seed in range(1, 6):
                serve(llm, 250, seed)
                gc.collect()
                kept.append((tracemalloc.get_traced_memory()[0], len(gc.get_objects())))
        finally:
            tracemalloc.stop()
    *_, (bytes_before, objects_before), (bytes_after, objects_after) = kept
    assert objects_after - objects_before < 50
    assert bytes_after - bytes_before < 16 << 10

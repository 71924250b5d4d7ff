"""Random requests for engines of many kinds in poisoned memory, in 16 bits: no logits become NaN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from poisoned_engines import KINDS, start

pytestmark = pytest.mark.gpu

# Steps so large, and contexts so long, that every kernel for them runs.
LARGE: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 2400, "max_num_batched_tokens": 700, "num_blocks": 900}
ROUNDS, COUNT, LONGER = 2, 16, 16
# Kinds whose mode alone differs from another's are left out; adapters and scales of FP8 caches need a compiled model.
CASES = [
    (name, mode)
    for name, kind in KINDS.items()
    if name != "recurrences, compiled"
    for mode in ("eager", "graphed")
    if mode == "graphed" or not (kind.adapters or kind.options.get("kv_cache_dtype") == "fp8")
]


@pytest.mark.product(one_in=8, each=("name",))
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_no_request_fails(name: str, mode: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    options = {} if mode == "eager" else {"compile_workers": 0}
    engine = start(kind, tmp_path, "cuda", **LARGE | options, mode=mode, attention_backend="auto")
    with engine.llm:
        for seed in range(ROUNDS):
            engine.results(engine.random_requests(seed, COUNT, LONGER))
        engine.llm.core.check_integrity()

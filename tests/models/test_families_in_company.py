"""Families with wide heads, latents, state spaces or ALiBi: tokens in chunks, with drafts, and after preemptions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from families import Family, family, write_checkpoint
from greedy_engines import PROMPTS, check_in_company, greedy

NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
_GEMMA4 = family("gemma4_text")
FAMILIES: dict[str, Family] = {
    "gemma4_text, wide": replace(_GEMMA4, changes={**_GEMMA4.changes, "global_head_dim": 512}),
    **{name: family(name) for name in ("bloom", "mpt", "granitemoehybrid", "falcon_h1", "bamba", "mimo_v2_flash")},
    **{name: family(name) for name in ("deepseek_v3", "glm4_moe_lite", "minicpm3")},
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("name", FAMILIES)
def test_drafts_in_company_leave_transformers_tokens(name: str, tmp_path: Path) -> None:
    """Without --all one family is drawn."""
    oracle = write_checkpoint(tmp_path, FAMILIES[name])
    expected = [greedy(oracle, prompt) for prompt in PROMPTS]
    check_in_company(tmp_path, expected, speculative_config=NGRAM)

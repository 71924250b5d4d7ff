"""Arguments that other engines' methods of pooling have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pooling_folders import make_embedder

from compiled_engine import LLM

# Arguments of each method, before those of other engines.
METHODS: dict[str, tuple[Any, ...]] = {
    "encode": ("hello",),
    "embed": (["hello", "fox"],),
    "classify": ("hello",),
    "score": ("fox", ["hello", "fox"]),
}


def test_arguments_of_other_engines_are_named_or_have_no_effect(tmp_path: Path) -> None:
    make_embedder(tmp_path, kinds=("lasttoken",))
    with LLM(tmp_path, device="cpu", mode="eager", progress=False, max_num_seqs=4) as llm:
        for name, given in METHODS.items():
            method = getattr(llm, name)
            with pytest.raises(TypeError, match=rf"LLM.{name}\(\) has no truncate_prompt_tokens, which is 5"):
                method(*given, truncate_prompt_tokens=5)
            with pytest.raises(TypeError, match="has no lora_request, which is 'a'; models that pool have no adapters"):
                method(*given, lora_request="a")
            with pytest.raises(TypeError, match=rf"LLM.{name}\(\) got an unexpected keyword argument 'truncate'"):
                method(*given, truncate=5)
        assert len(llm.embed(["hello", "fox"], lora_request=None, truncate_prompt_tokens=None)) == 2

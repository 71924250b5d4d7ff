"""Arguments that other engines' methods of pooling have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pooling_folders import make_embedder

from compiled_engine import LLM, LoRARequest

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
            if name != "classify":  # which this model does not
                with pytest.raises(TypeError, match=r"lora_request must be a LoRARequest, .*got 'a'"):
                    method(*given, lora_request="a")
                with pytest.raises(ValueError, match="lora_request is 'b', but enable_lora is False; allowed: None"):
                    method(*given, lora_request=LoRARequest("b", 1, tmp_path))
            with pytest.raises(TypeError, match=rf"LLM.{name}\(\) got an unexpected keyword argument 'truncate'"):
                method(*given, truncate=5)
        assert len(llm.embed(["hello", "fox"], lora_request=None, truncate_prompt_tokens=None)) == 2

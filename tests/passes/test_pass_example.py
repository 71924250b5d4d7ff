"""The examples of docs/passes.md run as they stand there."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from folders import REPOSITORY

from compiled_engine.llm import LLM
from compiled_engine.passes.registry import unregister_pass
from compiled_engine.sampling.params import SamplingParams

DOCUMENT = REPOSITORY / "docs" / "passes.md"


@pytest.fixture
def run_example(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that an example leaves, run as a file; the test states its number and the name of its pass."""
    number, name = request.param
    examples = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / f"example_of_{name}.py").write_text(examples[number])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, f"example_of_{name}", raising=False)
    try:
        return vars(importlib.import_module(f"example_of_{name}"))
    finally:
        unregister_pass(name)


@pytest.mark.parametrize("run_example", [(0, "spelled_out_silu")], indirect=True)
def test_a_rewrite(run_example: dict[str, Any]) -> None:
    assert len(run_example["output"].outputs[0].token_ids) == 4
    assert run_example["matches"] == 6


@pytest.mark.parametrize("run_example", [(1, "shift_by_position")], indirect=True)
def test_a_step_tensor_a_kept_parameter_and_a_linear(run_example: dict[str, Any]) -> None:
    """Zeros change nothing, and what the pass writes then is seen by the next step."""
    with LLM(device="cpu", mode="eager") as llm:
        expected = llm.generate("def ", SamplingParams(max_tokens=4, temperature=0))[0].outputs[0].token_ids
    assert len(run_example["graph_pass"].shifts) == 6
    assert run_example["unshifted"].outputs[0].token_ids == expected
    assert run_example["shifted_output"].outputs[0].token_ids != expected

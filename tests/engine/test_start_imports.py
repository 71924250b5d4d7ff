"""What a start does not import, as importing it would take longer than what it is for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Of tokenizers, reports and downloads. On a GPU nothing of torch's compilers either.
NEVER = {"transformers", "huggingface_hub", "depyf", "matplotlib", "pandas", "pygments", "rich", "jinja2"}
# Not dill: PyTorch itself imports it where it is installed.
COMPILERS = {"torch._dynamo", "torch._inductor", "sympy", "networkx"}
API = """
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

def main():
    with LLM(progress=False, **options) as llm:
        llm.generate("def f(", SamplingParams(max_tokens=2), use_tqdm=False)
"""
CLI = """
from contextlib import suppress
from compiled_engine.cli.app import app

def main():
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    with suppress(SystemExit):
        app(["generate", "--prompt", "def f(", "--max-tokens", "2", "--quiet", *flags])
"""
# What a start whose model is compiled does with it.
PLACE = """
from compiled_engine.models.checkpoint.build_model import build_tensors
from compiled_engine.models.checkpoint.loader import load_weights
from compiled_engine.models.checkpoint.parameters import materialize, parameters_of
from compiled_engine.options import EngineOptions
from compiled_engine.process.progress import SilentProgress
from compiled_engine.resolve.engine import resolve

def main():
    config = resolve(EngineOptions(**options))
    model = build_tensors(config.model, None)
    weights = materialize(model, parameters_of(model), config.device)
    load_weights(weights, model, config.model, SilentProgress())
"""
SHOW = """
import json, sys
main()
print(json.dumps(sorted(sys.modules)))
"""


def modules_of_a_start(program: str, **options: str | int) -> set[str]:
    code = f"options = {options!r}\n{program}\n{SHOW}"
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_the_api_imports_what_it_runs() -> None:
    modules = modules_of_a_start(API, device="cpu", mode="eager", max_model_len=64, num_blocks=8)
    assert "tokenizers" in modules
    assert sorted(NEVER & modules) == []


def test_the_names_of_the_api_bring_no_torch() -> None:
    """The engine imports it when it is made, beside the processes that it launches."""
    modules = modules_of_a_start("from compiled_engine import LLM, SamplingParams\ndef main(): pass")
    assert "compiled_engine.llm" in modules
    assert "torch" not in modules


def test_the_command_line_imports_what_it_runs() -> None:
    """Its help and its errors are rich text, so that is there."""
    modules = modules_of_a_start(CLI, device="cpu", mode="eager", max_model_len=64, num_blocks=8)
    assert sorted((NEVER - {"rich", "pygments"}) & modules) == []


def test_the_engine_itself_imports_no_compiler() -> None:
    modules = modules_of_a_start("def main():\n    import compiled_engine.core.engine_core")
    assert sorted(COMPILERS & modules) == []


def test_placing_a_model_imports_no_compiler() -> None:
    modules = modules_of_a_start(PLACE, device="cpu", mode="compiled", max_model_len=64)
    assert sorted(COMPILERS & modules) == []


@pytest.mark.gpu
def test_a_warm_start_on_a_gpu_imports_no_compiler(tmp_path: Path) -> None:
    for _ in range(2):
        modules = modules_of_a_start(API, max_model_len=64, cache_dir=str(tmp_path))
    assert sorted((NEVER | COMPILERS) & modules) == []

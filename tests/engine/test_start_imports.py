"""Modules that a start does not import, as importing them would take longer than their work."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from compiled_engine.llm import LLM

# Of tokenizers, reports and downloads. In eager mode, and where the cache has the model, none of torch's compilers.
NEVER = {"transformers", "huggingface_hub", "depyf", "matplotlib", "pandas", "pygments", "rich", "jinja2"}
# Not dill: PyTorch itself imports it where it is installed.
COMPILERS = {"torch._dynamo", "torch._inductor", "sympy", "networkx"}
API = """
def main():
    from compiled_engine.llm import LLM
    from compiled_engine.sampling.params import SamplingParams
    with LLM(progress=False, **options) as llm:
        llm.generate("def f(", SamplingParams(max_tokens=2), use_tqdm=False)
"""
CLI = """
def main():
    from contextlib import suppress
    from compiled_engine.cli.app import app
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    with suppress(SystemExit):
        app(["generate", "--prompt", "def f(", "--max-tokens", "2", "--quiet", *flags])
"""
ENGINE_ITSELF = """
def main():
    import compiled_engine.engine.core
"""
# What a start whose model is compiled does with it.
PLACE = """
def main():
    from compiled_engine.models.checkpoint.build_model import build_tensors
    from compiled_engine.models.checkpoint.loader import load_weights
    from compiled_engine.models.checkpoint.parameters import materialize, parameters_of
    from compiled_engine.options import EngineOptions
    from compiled_engine.process.progress import SilentProgress
    from compiled_engine.resolve.engine import resolve
    config = resolve(EngineOptions(**options))
    model = build_tensors(config.model, None)
    weights = materialize(model, parameters_of(model), config.device)
    load_weights(weights, model, config.model, SilentProgress())
"""
SHOW = """
main()
print(json.dumps(sorted(sys.modules)))
"""


def modules_of(*programs: str, **options: str | int) -> list[set[str]]:
    """The modules of a process after each of the programs, which run in it one after the other."""
    code = f"import json, sys\noptions = {options!r}\n" + "\n".join(each + SHOW for each in programs)
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [set(json.loads(line)) for line in run.stdout.splitlines() if line.startswith("[")]


def test_the_api_and_the_command_line_import_what_they_run() -> None:
    """In one process. Help and errors of the command line are rich text, so that is there."""
    of_api, of_both = modules_of(API, CLI, device="cpu", mode="eager", max_model_len=64, num_blocks=8)
    assert "tokenizers" in of_api
    assert sorted((NEVER | COMPILERS) & of_api) == []
    assert "compiled_engine.cli.app" in of_both - of_api
    assert sorted((NEVER - {"rich", "pygments"}) & of_both) == []


def test_the_names_of_the_api_bring_no_torch() -> None:
    """The engine imports it when it is made, beside the processes that it launches."""
    (modules,) = modules_of("from compiled_engine import LLM, SamplingParams\ndef main(): pass\n")
    assert "compiled_engine.llm" in modules
    assert "torch" not in modules


def test_the_engine_itself_and_placing_a_model_import_no_compiler() -> None:
    found = modules_of(ENGINE_ITSELF, PLACE, device="cpu", mode="compiled", max_model_len=64)
    assert [sorted(COMPILERS & modules) for modules in found] == [[], []]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_warm_start_imports_no_compiler(device: str) -> None:
    options: dict[str, Any] = {"device": device, "mode": "compiled", "max_model_len": 64}
    LLM(progress=False, **options).close()
    (modules,) = modules_of(API, **options)
    assert sorted((NEVER | COMPILERS) & modules) == []

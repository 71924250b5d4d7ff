"""The whole engine on a GPU: every mode and backend against transformers, and nothing compiled after warm-up."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from compiled_engine.bench.shapes import write_shape
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]

MODES = ("eager", "compiled", "graphed")
BACKENDS = ("torch", "triton", "flash_attn")
# Of log-probabilities that bf16 engine and fp32 transformers give the same text: most and mean difference.
BF16_TOLERANCE = (0.35, 0.02)


def engine(**options: Any) -> LLM:
    return LLM(device="cuda", **{"progress": False, "num_blocks": 4096} | options)


def engine_of(mode: str, **options: Any) -> LLM:
    """Start an engine that compiles in this process, since tests side by side have a core each."""
    return engine(mode=mode, **({} if mode == "eager" else {"compile_workers": 0}), **options)


def require_backend(backend: str) -> None:
    if backend == "flash_attn":
        pytest.importorskip("flash_attn", reason="the package flash-attn is not installed")


def prompts(bundled_model_path: Path, count: int, longest: int = 300) -> list[list[int]]:
    """Pieces of Python source, of mixed lengths."""
    from transformers import AutoTokenizer

    text = (bundled_model_path / "held_out.txt").read_text()
    ids = AutoTokenizer.from_pretrained(bundled_model_path)(text)["input_ids"]
    random_ = random.Random(0)
    cut = []
    for _ in range(count):
        start, length = random_.randrange(len(ids) - longest), random_.randrange(1, longest)
        cut.append(ids[start : start + length])
    return cut


@pytest.fixture(scope="module")
def oracle(bundled_model_path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(bundled_model_path, dtype=torch.float32).cuda().eval()


@pytest.fixture(scope="module")
def greedy_by_transformers(oracle: Any) -> Callable[[tuple[int, ...], int], list[int]]:
    """Return what generates so many tokens after a prompt, each once for all modes."""

    @cache
    def generated(prompt: tuple[int, ...], count: int) -> list[int]:
        ids = torch.tensor([prompt], device="cuda")
        out = oracle.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    return generated


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("mode", MODES)
def test_greedy_tokens_in_fp32(
    mode: str,
    backend: str,
    bundled_model_path: Path,
    greedy_by_transformers: Callable[[tuple[int, ...], int], list[int]],
) -> None:
    cut = prompts(bundled_model_path, 24)
    expected = [greedy_by_transformers(tuple(prompt), 24) for prompt in cut]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with engine_of(mode, dtype="float32", attention_backend=backend, max_num_batched_tokens=64, max_num_seqs=16) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in cut], params)
        captures, replays = llm.metrics()["captures"], llm.metrics()["graph_replays"]
        of_decodes, of_others = (1, 2, 4, 8, 16), (1, 2, 4, *range(8, 65, 8))
        assert captures == (len(of_decodes) + len(of_others) if mode == "graphed" else 0)
        assert (replays > 0) == (mode == "graphed")
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


@pytest.mark.product(one_in=4, each=("dtype",))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["eager", "graphed"])
def test_a_prefix_that_is_completed_in_the_step_that_shares_it(mode: str, dtype: str, bundled_model_path: Path) -> None:
    """A decode leaves the first prompt 63 of its 64 tokens; prompts of one token more come while the 64th is computed.
    A kernel that writes and attends in one must not let them read what it writes."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    logprobs = {}
    for cached in (True, False):
        options = {"max_num_batched_tokens": 64, "max_num_seqs": 16, "enable_prefix_caching": cached}
        with engine_of(mode, dtype=dtype, attention_backend="triton", block_size=16, **options) as llm:
            found = logprobs[cached] = []
            for piece in prompts(bundled_model_path, 12, longest=200):
                prompt = (piece * 64)[:64]
                batch = [prompt[:1], prompt, *([*prompt, token] for token in range(100, 112))]
                outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch], params)
                found += [[next(iter(entry.values())).logprob for entry in o.outputs[0].logprobs[:1]] for o in outputs]
    difference = torch.tensor(logprobs[True]) - torch.tensor(logprobs[False])
    assert difference.abs().max() < (1e-3 if dtype == "float32" else 0.1)


@pytest.mark.product(one_in=3, each=("backend",))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", MODES)
def test_bf16_logprobs(mode: str, backend: str, bundled_model_path: Path, oracle: Any) -> None:
    require_backend(backend)
    cut = prompts(bundled_model_path, 32)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    with engine_of(
        mode, dtype="bfloat16", attention_backend=backend, max_num_batched_tokens=256, max_num_seqs=16
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in cut], params)
    differences = []
    for output in outputs:
        completion = output.outputs[0]
        ids = list(output.prompt_token_ids) + list(completion.token_ids)
        with torch.inference_mode():
            expected = oracle(torch.tensor([ids], device="cuda")).logits[0].log_softmax(-1)
        entries = [*output.prompt_logprobs[1:], *completion.logprobs]
        assert len(entries) == len(ids) - 1
        for position, entry in enumerate(entries, start=1):
            got = entry[ids[position]].logprob
            differences.append(abs(got - expected[position - 1, ids[position]].item()))
    assert max(differences) < BF16_TOLERANCE[0]
    assert sum(differences) / len(differences) < BF16_TOLERANCE[1]


WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"logit_bias": {5: 2.0}, "top_p": 0.9},
    {"bad_words_token_ids": ((7, 8), (9,)), "top_k": 5},
    {"logprobs": 5, "prompt_logprobs": 2},
)


class CompileCounter:
    """Counts what must not happen while serving: Dynamo traces, Inductor and Triton compiles."""

    def __init__(self) -> None:
        self.triton: list[str] = []

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.triton.append(str(kwargs.get("repr")))

    def counts(self) -> dict[str, Any]:
        counters = torch._dynamo.utils.counters
        return {
            "triton": list(self.triton),
            "frames": sum(counters["frames"].values()),
            "inductor": sum(n for name, n in counters["inductor"].items() if "cache" in name),
            "aot": sum(counters["aot_autograd"].values()),
        }


@pytest.mark.product(one_in=1000, each=("mode",))
@pytest.mark.parametrize("backend", ["triton", "flash_attn"])
@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_compiled_or_captured_after_warm_up(
    mode: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_backend(backend)
    import triton

    with engine_of(
        mode, dtype="bfloat16", attention_backend=backend, max_num_seqs=48, max_num_batched_tokens=512
    ) as llm:
        counter = CompileCounter()
        monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", counter)
        before, captures = counter.counts(), llm.metrics()["captures"]
        memory = torch.cuda.memory_reserved()
        random_ = random.Random(0)
        while llm.metrics()["steps"] < 400:
            batch, params = [], []
            for _ in range(random_.choice([1, 2, 7, 30, 64])):
                batch.append({"prompt_token_ids": [random_.randrange(4096) for _ in range(random_.randrange(1, 400))]})
                way = random_.choice(WAYS)
                params.append(SamplingParams(max_tokens=random_.randrange(1, 80), ignore_eos=True, **way))
            llm.generate(batch, params)
        assert counter.counts() == before
        assert llm.metrics()["captures"] == captures
        assert torch.cuda.memory_reserved() <= memory + (64 << 20)


def two_layers(folder: Path) -> Path:
    """Qwen3-0.6B's shape with all kernels, but fewer launches to capture."""
    shape = write_shape(folder, "qwen3-0.6b")
    config = json.loads((shape / "config.json").read_text())
    (shape / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    return shape


def test_a_cold_start_compiles_its_kernels_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    compiled_by = []
    monkeypatch.setattr(
        triton.knobs.runtime,
        "jit_cache_hook",
        lambda **about: compiled_by.append((threading.current_thread().name, about["repr"])),
    )
    shape = two_layers(tmp_path)
    with engine(model=shape, load_format="dummy", dtype="bfloat16", cache_dir=tmp_path / "cache", max_num_seqs=100):
        assert not [kernel for thread, kernel in compiled_by if thread == "MainThread"]
    assert len(compiled_by) > 20


def test_further_kernels_of_a_cached_model_are_compiled_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts need kernels that a start without them has not compiled. Known starts compile nothing."""
    import triton

    compiled: list[tuple[str, str]] = []

    def note(*, src: Any, cache_hit: bool, **about: Any) -> None:
        if not cache_hit:
            compiled.append((threading.current_thread().name, src.name))

    shape = two_layers(tmp_path)
    options: dict[str, Any] = {
        "model": shape,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "cache_dir": tmp_path / "cache",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
    }
    # No test has this number, so none has compiled these kernels in this process.
    ngrams = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 6}}
    with engine(**options):
        pass
    kernels = tmp_path / "cache" / "kernels"
    before = {path.name for path in kernels.rglob("*.cubin")}
    assert "ngram_kernel.cubin" not in before
    monkeypatch.setattr(triton.knobs.compilation, "listener", note)
    with engine(**options, **ngrams) as llm:
        assert llm.metrics()["cache"] == "hit"
        assert "compile kernels" in {span["name"] for span in llm.metrics()["start_up"]}
    assert compiled == []  # workers have compiled them
    assert {path.name for path in kernels.rglob("*.cubin")} >= {"ngram_kernel.cubin", "verify_kernel.cubin"}
    with engine(**options, **ngrams) as llm:
        assert "compile kernels" not in {span["name"] for span in llm.metrics()["start_up"]}
    assert compiled == []


def test_long_prompts_in_many_chunks_that_sample_nothing(
    bundled_model_path: Path, greedy_by_transformers: Callable[[tuple[int, ...], int], list[int]]
) -> None:
    """Such steps end without waiting for the device, so the next one must not overwrite what it still has to read."""
    cut = prompts(bundled_model_path, 4, longest=1500)
    expected = [greedy_by_transformers(tuple(prompt), 4) for prompt in cut]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with engine_of("compiled", dtype="float32", max_num_batched_tokens=16, max_num_seqs=2) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in cut], params)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


def test_closing_frees_the_device() -> None:
    square = torch.ones(64, 64, device="cuda")
    square @ square  # cuBLAS keeps memory for the usual stream, which an earlier test may have used
    del square
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    llm = engine(mode="graphed", max_num_seqs=8, max_num_batched_tokens=64)
    llm.generate("def f(", SamplingParams(max_tokens=4, temperature=0))
    assert torch.cuda.memory_allocated() > before
    llm.close()
    # cuBLAS keeps 32 MiB for the stream that graphs were captured on.
    assert torch.cuda.memory_allocated() <= before + (33 << 20)

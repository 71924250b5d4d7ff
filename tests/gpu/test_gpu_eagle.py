"""Drafts of an EAGLE-3 head on a GPU change no token, in every mode, and its passes are graphs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from eagle_heads import make_bigram_model, write_exact_head, write_fitted_head
from scripted_drafts import AnyLength, AtRest
from test_gpu_speculation import ACTIVITIES, ENGINE, FEW_BLOCKS, HERE, MODES, results, workload

from compiled_engine import LLM, SamplingParams
from compiled_engine.bench.engine_steps import decodes
from compiled_engine.engine.core import EngineCore
from compiled_engine.features import registry
from compiled_engine.frontend.tokenizer import load_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]


def eagle(head: Path, num_drafts: int, **more: Any) -> dict[str, Any]:
    drafts = {"method": "eagle3", "model": str(head), "num_speculative_tokens": num_drafts}
    return {"speculative_config": drafts | more}


def fitted_head(folder: Path, bundled: Path) -> Path:
    """A head of the bundled model that is often right, and often wrong."""
    ids = load_tokenizer(bundled).encode((bundled / "held_out.txt").read_text()[:6000])
    return write_fitted_head(folder, bundled, torch.tensor([ids[100 * i : 100 * i + 100] for i in range(12)]))


def exact_pair(folder: Path) -> tuple[Path, Path]:
    """A small model, and a head of it that is always right at a sharpness of 2."""
    target = folder / "target"
    target.mkdir()
    make_checkpoint(target, "qwen3", hidden_size=64, vocab_size=131, num_attention_heads=4, num_key_value_heads=2)
    make_bigram_model(target)
    return target, write_exact_head(folder / "head", target, factor=0.5)


@pytest.fixture(scope="module")
def text(bundled_model_path: Path) -> str:
    return (bundled_model_path / "held_out.txt").read_text()


@pytest.fixture(scope="module")
def head(bundled_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fitted_head(tmp_path_factory.mktemp("head"), bundled_model_path)


@pytest.fixture(scope="module")
def expected(text: str) -> Iterator[list[tuple[Any, ...]]]:
    prompts, params = workload(text)
    with LLM(**ENGINE | MODES["eager"]) as llm:
        yield results(llm.generate(prompts, params, use_tqdm=False))


@pytest.mark.parametrize(
    ("mode", "num_drafts", "more"),
    [
        ("eager", 3, {}),
        ("graphed", 3, {}),
        ("graphed", 1, {}),
        ("piecewise", 3, {}),
        ("graphed", 3, {"enable_adaptive_verification": True}),
        ("graphed, one step in flight", 4, {"enable_adaptive_verification": True}),
        ("full and piecewise", 3, {"enable_adaptive_verification": True}),
        ("compiled", 3, {"enable_adaptive_verification": True}),
    ],
)
def test_drafts_of_a_head_change_no_token(
    mode: str,
    num_drafts: int,
    more: dict[str, Any],
    head: Path,
    text: str,
    expected: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where their number changes, the head rests at times, and requests at rest run beside others."""
    monkeypatch.setattr(registry, "DraftLength", AnyLength)
    prompts, params = workload(text)
    with LLM(**ENGINE | FEW_BLOCKS | MODES[mode], **eagle(head, num_drafts, **more)) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
        llm.core.check_integrity()
        metrics = llm.metrics()
    assert results(found) == expected
    assert 0 < metrics["accepted_tokens"] < metrics["draft_tokens"]
    assert metrics["preemptions"] > 0
    assert not more or metrics["rested"] > 0


@pytest.mark.parametrize("mode", ["graphed", "eager"])
def test_an_exact_head_is_always_right(mode: str, tmp_path: Path) -> None:
    target, head = exact_pair(tmp_path)
    prompts = [{"prompt_token_ids": [(7 * i + 3 * j * j) % 131 for j in range(5 + 11 * i)]} for i in range(8)] * 2
    model = {"model": str(target), "skip_tokenizer_init": True, "num_blocks": 200}
    with LLM(**ENGINE | model | MODES[mode], **eagle(head, 4, draft_sharpness=2)) as llm:
        for temperature in (0.0, 0.9):
            params = [
                SamplingParams(seed=i, max_tokens=15 + i, temperature=temperature, ignore_eos=True, detokenize=False)
                for i in range(16)
            ]
            llm.generate(prompts, params, use_tqdm=False)
        metrics = llm.metrics()
    assert metrics["accepted_tokens"] == metrics["draft_tokens"] > 200


def test_the_passes_of_a_head_are_two_launches(head: Path) -> None:
    """A step of decodes is three: the drafts, their verification, and the head's pass over what was verified."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM(**ENGINE | HERE, **eagle(head, 3)) as llm:
        llm.generate(["def f(x):"] * 3, params, use_tqdm=False)
        before = llm.metrics()
        with torch.profiler.profile(activities=ACTIVITIES) as profile:
            llm.generate(["def g(x):"] * 3, params, use_tqdm=False)
        after = llm.metrics()
    launches = sum(event.name == "cudaGraphLaunch" for event in profile.events())
    replays = {
        name: count - before["graph_replays_by_key"].get(name, 0)
        for name, count in after["graph_replays_by_key"].items()
    }
    by_kind = {
        kind: sum(count for name, count in replays.items() if name.startswith(kind))
        for kind in ("draft-", "verify-", "follow-")
    }
    assert launches == sum(replays.values())
    assert by_kind["draft-"] == by_kind["verify-"] <= by_kind["follow-"]
    assert by_kind["verify-"] >= after["steps"] - before["steps"] - 3


def launches(core: EngineCore, num_steps: int) -> tuple[dict[str, int], Counter[str]]:
    """Return the CUDA graphs that the host launches in so many steps, and the kernels that run in them, by name."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=ACTIVITIES) as profile:
        for _ in range(num_steps):
            core.step()
        torch.cuda.synchronize()
    events = profile.events()
    kernels = [event.name for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    calls = Counter(event.name for event in events if event.name in ("cudaGraphLaunch", "cuLaunchKernel"))
    return dict(calls), Counter(name for name in kernels if not name.startswith(("Memcpy", "Memset")))


def test_a_step_at_which_the_head_rests_is_that_of_an_engine_without_a_head(
    head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same launches of the host, and the same kernels on the device."""
    monkeypatch.setattr(registry, "DraftLength", AtRest)
    found = []
    for drafts in (eagle(head, 3, enable_adaptive_verification=True), {}):
        with LLM(**ENGINE | HERE, **drafts) as llm:
            of_engine = []
            for num_requests in (1, 3, 8):
                with decodes(llm, random.Random(0), num_requests, 20, 60) as core:
                    of_engine.append(launches(core, 20))
        found.append(of_engine)
    assert found[0] == found[1]
    assert all(calls["cudaGraphLaunch"] == 20 for calls, _ in found[0])


def test_a_head_that_is_never_right_comes_to_rest(head: Path) -> None:
    """By itself; from then on a step is one launch, until a new request has drafts."""
    never = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.0, 0.0, 0.0]}
    with (
        LLM(**ENGINE | HERE, **eagle(head, 3, enable_adaptive_verification=True, **never)) as llm,
        decodes(llm, random.Random(0), 3, 20, 200) as core,
    ):
        for _ in range(100):
            core.step()
        assert llm.metrics()["resting"] == 3
        before = llm.metrics()["graph_replays_by_key"]
        calls, _ = launches(core, 20)
        after = llm.metrics()["graph_replays_by_key"]
        captures = llm.metrics()["captures"]
    # Of 4 numbers of decodes and 11 of tokens: at rest, read without drafts, with 1 and 3 drafts; the head's passes.
    assert captures == 11 + 4 + 4 + 2 * 4 + 2 * 4 + 3 * 4
    replayed = {name.split()[0] for name, count in after.items() if count > before.get(name, 0)}
    assert calls["cudaGraphLaunch"] == 20
    assert replayed <= {"plain-decode", "plain-short-256"}


def test_warm_up_leaves_nothing_to_compile(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    compiled: list[str] = []
    monkeypatch.setattr(registry, "DraftLength", AnyLength)
    with LLM(**ENGINE | HERE, **eagle(head, 3, enable_adaptive_verification=True)) as llm:
        triton.knobs.runtime.jit_post_compile_hook = lambda *, repr, **_: compiled.append(repr)
        try:
            params = [SamplingParams(temperature=0.5, seed=seed, max_tokens=30) for seed in range(8)]
            llm.generate(["def f(x):\n    return"] * 8, params, use_tqdm=False)
        finally:
            triton.knobs.runtime.jit_post_compile_hook = None
        torch.cuda.synchronize()
    assert compiled == []

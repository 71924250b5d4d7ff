"""Graphs on a CPU: calls are recorded once and replayed; nothing else of a batch changes."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from small_batch_linear_cases import Case, arguments_of

from compiled_engine.config import GraphMode
from compiled_engine.graphs.cpu_graphs.recorder import Arena, CannotRecord, recording
from compiled_engine.llm import LLM
from compiled_engine.options import EngineOptions
from compiled_engine.passes.linear.small_batch_linear_op import on_cpu
from compiled_engine.resolve.engine import resolve
from compiled_engine.sampling.params import SamplingParams

OPTIONS: dict[str, Any] = {"device": "cpu", "progress": False, "max_num_seqs": 8, "max_num_batched_tokens": 32}
# Requests end one after the other, so there are batches of eight sizes, and prompts among decodes.
PROMPTS = [{"prompt_token_ids": [7 * i + j for j in range(1, 4 + 9 * i)]} for i in range(10)]
PARAMS = [SamplingParams(max_tokens=4 + 5 * i, temperature=0.8, seed=i, ignore_eos=True, logprobs=3) for i in range(10)]


def outputs_and_metrics(**options: Any) -> tuple[list[Any], dict[str, Any]]:
    with LLM(**OPTIONS, **options) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs], llm.metrics()


def test_replays_give_the_bits_of_calls() -> None:
    expected, compiled = outputs_and_metrics(mode="compiled")
    found, graphed = outputs_and_metrics()
    assert found == expected
    assert (compiled["recordings"], compiled["recorded_replays"]) == (0, 0)
    # Of six layers four linears, the rotation with the write, and attention; then the logits.
    assert graphed["recorded_kernels"] == 6 * 6 + 1
    # Each size is called once, recorded once, and replayed from then on.
    decodes = graphed["batch_histogram"]["decodes"]
    assert graphed["recordings"] == sum(count > 1 for count in decodes.values())
    assert 0 <= graphed["recorded_replays"] - sum(count - 2 for count in decodes.values() if count > 1) <= 1


def test_another_number_of_threads_is_recorded_again(one_thread: None) -> None:
    """Each of the calls divides its work among them."""
    with LLM(**OPTIONS) as llm:

        def answer() -> list[int]:
            return list(llm.generate(PROMPTS[0], PARAMS[2], use_tqdm=False)[0].outputs[0].token_ids)

        expected = answer()
        before = llm.metrics()["recordings"]
        assert answer() == expected
        assert llm.metrics()["recordings"] == before
        torch.set_num_threads(2)
        assert answer() == expected
        assert llm.metrics()["recordings"] > before


def test_what_inductor_compiled_is_not_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a layer one piece in each range."""
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1, vocab_size=160)
    options = {"model": tmp_path, "skip_tokenizer_init": True, "disable_passes": ["silu_mul"]}
    expected, _ = outputs_and_metrics(mode="compiled", **options)
    with caplog.at_level(logging.WARNING, "compiled_engine"):
        found, metrics = outputs_and_metrics(**options)
    assert found == expected
    assert metrics["recordings"] == 0
    assert "are not recorded: Inductor compiled pieces" in caplog.text


@pytest.mark.parametrize(
    ("options", "mode", "reason"),
    [
        ({}, GraphMode.RECORDED, "default on a CPU: calls of C++ kernels can be recorded"),
        ({"graph_mode": "recorded"}, GraphMode.RECORDED, None),
        ({"graph_mode": "none"}, GraphMode.NONE, None),
        ({"mode": "compiled"}, GraphMode.NONE, "graphs come with mode graphed"),
        ({"dtype": "bfloat16"}, GraphMode.NONE, "no compile range is for small batches"),
        ({"attention_backend": "torch"}, GraphMode.NONE, "attention backend torch cannot be recorded"),
        ({"compile_ranges": (512,)}, GraphMode.NONE, "they serve up to 64 tokens, not 512"),
    ],
)
def test_the_mode_and_its_reason(options: dict[str, Any], mode: GraphMode, reason: str | None) -> None:
    config = resolve(EngineOptions(device="cpu", **options))
    assert config.graph.mode is mode
    assert (reason or "") in config.reasons.get("graph.mode", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "graphed", "compile_ranges": ()}, "mode is 'graphed', but no compile range is for small batches"),
        (
            {"graph_mode": "recorded", "mode": "eager"},
            "graph_mode is 'recorded', but nothing is compiled; allowed: none",
        ),
        ({"capture_sizes": (1,)}, r"capture_sizes is \(1,\), but the mode captures no CUDA graphs"),
    ],
)
def test_what_cannot_be_recorded_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(EngineOptions(device="cpu", **options))


def test_recorded_calls_read_and_write_where_they_did() -> None:
    """A kernel, ops with and without a result of their own, and views between them."""
    arguments = arguments_of(Case(3, 64, 48, silu_mul=True, norm=True), torch.float32)
    x_TK, total_TM = arguments.x_TK, torch.zeros(3, 32)

    def work() -> torch.Tensor:
        doubled_TK = (x_TK * 2).view(3, 48)
        halves = on_cpu(*replace(arguments, x_TK=doubled_TK).values()).view(3, 2, 16)  # type: ignore[arg-type]
        total_TM.add_(halves.flatten(1))
        return halves[:, 1]

    first = work().clone()
    with recording(Arena(), []) as calls:
        result = work()
    assert torch.equal(result, first)
    assert calls.num_kernels == 1
    x_TK.copy_(torch.randn_like(x_TK))
    expected = work()
    total_TM.zero_()
    calls.replay()
    assert torch.equal(result, expected)
    assert torch.equal(total_TM[:, 16:], expected)


def test_a_value_that_the_host_reads_cannot_be_recorded_unless_it_is_constant() -> None:
    host = torch.tensor([5, 6])
    with recording(Arena(), [host[0]]):
        assert int(host[0]) == 5
        with pytest.raises(CannotRecord, match=r"the host reads a tensor of shape \(\)"):
            int(host[1])


@given(st.lists(st.tuples(st.integers(1, 300), st.booleans()), max_size=40))
def test_tensors_of_an_arena_never_share_memory_while_they_live(steps: list[tuple[int, bool]]) -> None:
    arena, living = Arena(), dict[int, torch.Tensor]()
    for number, (size, drops) in enumerate(steps):
        if drops and living:
            del living[min(living)]
        living[number] = arena.empty_like(torch.empty(size)).fill_(number)
    for number, tensor in living.items():
        assert bool((tensor == number).all())


def test_an_arena_takes_memory_again_and_an_alias_does_not_hold_it() -> None:
    arena = Arena()
    first = arena.empty_like(torch.empty(4, 8))
    address, alias = first.data_ptr(), arena.alias(first)
    assert (alias.data_ptr(), alias.shape) == (address, first.shape)
    del first
    assert arena.empty_like(torch.empty(16)).data_ptr() == address
    outside = torch.empty(3)
    assert arena.alias(outside) is outside

"""EAGLE-3 heads: their drafts are those that the whole sequence gives, and change no token; bad ones are errors."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from eagle_heads import (
    Reference,
    head_config,
    make_bigram_model,
    random_tensors,
    speculators_config,
    write_exact_head,
    write_head,
)
from head_engines import ENGINE, PENALISED, SAMPLING, VOCAB, generate, record_drafts
from scripted_drafts import AnyLength, AtRest

from compiled_engine.features import registry
from compiled_engine.features.speculation.draft_head import DraftHead
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.structured_outputs import StructuredOutputs

NUM_DRAFTS = 3
pytestmark = pytest.mark.usefixtures("one_thread")


def eagle(folder: Path, num_drafts: int = NUM_DRAFTS) -> dict[str, Any]:
    drafts = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": num_drafts}
    return {"speculative_config": drafts}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    make_checkpoint(folder, "qwen3", hidden_size=64, vocab_size=VOCAB, num_attention_heads=4, num_key_value_heads=2)
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"draft_vocab_size": 50},
        {"norm_before_residual": True, "norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [2, 0]},
    ],
    ids=str,
)
def test_drafts_are_those_of_the_whole_sequence(
    changes: dict[str, Any], target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With chunks of prompts, cached prefixes, preempted requests, and drafts that were right before."""
    config = head_config(target, **changes)
    num_aux_layers, before_fc = len(config["eagle_aux_hidden_state_layer_ids"]), config.get("norm_before_fc", False)
    tensors = random_tensors(config, num_aux_layers=num_aux_layers, norm_before_fc=before_fc)
    seen = record_drafts(monkeypatch)
    with LLM(model=str(target), mode="eager", **ENGINE, **eagle(write_head(tmp_path, config, tensors))) as llm:
        generate(llm, temperature=0)
        metrics = llm.metrics()
    assert metrics["preemptions"] > 0
    assert metrics["prefix_hits"] > 0
    reference = Reference(target, config, tensors)
    assert len(seen) > 50
    for known, drafts in list(seen.items())[::2]:
        assert reference.drafts(list(known), len(drafts)) == drafts


@pytest.fixture(scope="module")
def bigram(bundled_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bigram model of the bundled model's shape, for which test_speculation.py compiles a head too."""
    folder = shutil.copytree(bundled_model_path, tmp_path_factory.mktemp("bigram"), dirs_exist_ok=True)
    make_bigram_model(folder)
    return folder


@pytest.fixture(scope="module", params=["eager", "auto"])
def exact(request: pytest.FixtureRequest, bigram: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    head = write_exact_head(tmp_path_factory.mktemp("exact"), bigram)
    options = eagle(head, 5)
    options["speculative_config"]["draft_sharpness"] = 1  # with another one the noise decides otherwise
    with LLM(model=str(bigram), mode=request.param, **ENGINE, **options) as llm:
        yield llm


@pytest.mark.parametrize("sampling", SAMPLING[:3], ids=", ".join)  # the head does not know of biases
def test_an_exact_head_is_always_right(sampling: dict[str, Any], exact: LLM) -> None:
    before = exact.metrics()
    num_tokens = sum(map(len, generate(exact, **sampling)))
    after = exact.metrics()
    drafted, accepted = (after[name] - before[name] for name in ("draft_tokens", "accepted_tokens"))
    assert drafted == accepted > 0.6 * num_tokens


@pytest.fixture(scope="module")
def plain(target: Path) -> Iterator[LLM]:
    with LLM(model=str(target), mode="eager", **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(plain: LLM) -> Callable[..., list[list[int]]]:
    """The tokens without drafts, which tests ask for again."""
    found: dict[str, list[list[int]]] = {}

    def tokens(**sampling: Any) -> list[list[int]]:
        if (key := str(sampling)) not in found:
            found[key] = generate(plain, **sampling)
        return found[key]

    return tokens


def test_a_head_of_noise_only_costs_steps(target: Path, tmp_path: Path, expected: Callable[..., Any]) -> None:
    """On two ranks, with two steps in flight."""
    config = head_config(target)
    head = write_head(tmp_path, config, random_tensors(config, seed=3))
    ranks: dict[str, Any] = {"tensor_parallel_size": 2, "async_scheduling": True}
    with LLM(model=str(target), mode="eager", **ENGINE, **ranks, **eagle(head)) as llm:
        for sampling in (SAMPLING[1], PENALISED):
            assert generate(llm, **sampling) == expected(**sampling)
        metrics = llm.metrics()
    assert metrics["accepted_tokens"] < 0.2 * metrics["draft_tokens"]
    assert metrics["kv_usage"] == 0


def test_steps_with_as_many_drafts_as_pay_have_the_same_tokens(
    target: Path, tmp_path: Path, expected: Callable[..., Any]
) -> None:
    config = head_config(target)
    options = eagle(write_head(tmp_path, config, random_tensors(config, seed=3)))
    options["speculative_config"]["enable_adaptive_verification"] = True
    with LLM(model=str(target), mode="eager", async_scheduling=True, **ENGINE, **options) as llm:
        for sampling in (*SAMPLING, {"temperature": 0.8, "repetition_penalty": 1.2}):
            assert generate(llm, **sampling) == expected(**sampling)
        metrics = llm.metrics()
    assert metrics["draft_lengths"].keys() == {"0", "1", "3"}
    assert all(metrics["draft_lengths"].values())
    assert metrics["draft_tokens"] > 0
    assert len(metrics["draft_shares"]) == 3


@pytest.mark.parametrize(
    ("given", "samplings"),
    [
        ({}, (SAMPLING[0], SAMPLING[2], PENALISED, {"temperature": 0.8, "n": 2})),
        (
            {"async_scheduling": True, "num_blocks": 120},
            (SAMPLING[1], SAMPLING[3], {"temperature": 0, "prompt_logprobs": 1}),
        ),
    ],
    ids=["preempted", "two steps in flight"],
)
def test_requests_at_rest_have_the_same_tokens(
    given: dict[str, Any],
    samplings: tuple[dict[str, Any], ...],
    target: Path,
    tmp_path: Path,
    expected: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside others with drafts, behind a cached prefix that the head has not read, and computed again. No key or value
    of the head's cache is a number until it is written, and the head's weights are such that drafts may be none."""
    monkeypatch.setattr(registry, "DraftLength", AnyLength)
    allocate = DraftHead.allocate

    def allocate_poisoned(self: DraftHead, num_blocks: int) -> None:
        allocate(self, num_blocks)
        for cache in self.model.kv_caches:
            cache.fill_(torch.nan)

    monkeypatch.setattr(DraftHead, "allocate", allocate_poisoned)
    config = head_config(target)
    options = eagle(write_head(tmp_path, config, random_tensors(config, seed=3)))
    options["speculative_config"]["enable_adaptive_verification"] = True
    with LLM(model=str(target), mode="eager", **ENGINE | given, **options) as llm:
        for sampling in samplings:
            assert generate(llm, **sampling) == expected(**sampling)
        metrics = llm.metrics()
    assert metrics["rested"] > 10
    assert metrics["resting"] == 0
    assert metrics["draft_tokens"] > 0
    assert metrics["prefix_hits"] > 0
    assert metrics["draft_sharpness"] in ("1", "1.5", "3", "greedy")
    assert "num_blocks" in given or metrics["preemptions"] > 0


def test_logits_that_are_no_numbers_are_wrong_drafts(
    target: Path, tmp_path: Path, expected: Callable[..., Any]
) -> None:
    config = head_config(target)
    tensors = {name: each.fill_(torch.nan) for name, each in random_tensors(config).items() if name == "lm_head.weight"}
    options = eagle(write_head(tmp_path, config, random_tensors(config) | tensors))
    with LLM(model=str(target), mode="eager", **ENGINE, **options) as llm:
        for sampling in ({"temperature": 0}, {"temperature": 0.9, "top_p": 0.9}):
            assert generate(llm, **sampling) == expected(**sampling)
        metrics = llm.metrics()
    assert metrics["draft_tokens"] > 0
    assert all(0 <= share < 0.1 for share in metrics["draft_sharpness_shares"].values())


def test_a_head_at_rest_computes_nothing(
    target: Path, tmp_path: Path, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine takes as many steps as without a head."""
    monkeypatch.setattr(registry, "DraftLength", AtRest)
    passes: list[int] = []
    one_pass = DraftHead._forward

    def counted(self: DraftHead, *given: Any, distinct: bool) -> torch.Tensor:
        passes.append(1)
        return one_pass(self, *given, distinct=distinct)

    config = head_config(target)
    options = eagle(write_head(tmp_path, config, random_tensors(config, seed=3)))
    options["speculative_config"]["enable_adaptive_verification"] = True
    with LLM(model=str(target), mode="eager", **ENGINE, **options) as llm:
        monkeypatch.setattr(DraftHead, "_forward", counted)
        before, tokens = plain.metrics()["steps"], generate(plain, temperature=0)
        assert generate(llm, temperature=0) == tokens
        metrics = llm.metrics()
    assert metrics["steps"] == plain.metrics()["steps"] - before
    assert metrics["drafted_requests"] == 0
    assert passes == []


def test_a_request_with_a_grammar_is_followed(bundled_model_path: Path, tmp_path: Path) -> None:
    """Its tokens come after those of the step; the next requests find its blocks."""
    config = head_config(bundled_model_path)
    head = write_head(tmp_path, config, random_tensors(config))
    constrained = SamplingParams(temperature=0, max_tokens=12, structured_outputs=StructuredOutputs(regex="([ab]c){9}"))
    free = SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True)
    found = []
    for more in ({}, eagle(head)):
        with LLM(mode="eager", **ENGINE, **more) as llm:
            outputs = llm.generate(["x = ", "def "] * 2, [constrained, free] * 2, use_tqdm=False)
            llm.core.check_integrity()
            found.append([list(output.outputs[0].token_ids) for output in outputs])
    assert found[0] == found[1]


# Fields of config.json that are wrong, or a tensor that is missing, and the error.
BAD_HEADS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"vocab_size": 132}, None, "vocab_size must be that of the model it drafts for, 131, got 132"),
    ({"hidden_size": 60}, None, "hidden_size must be the hidden_size of the model it drafts for, 64, got 60"),
    ({"target_hidden_size": 60}, None, "target_hidden_size must be the hidden_size .* 64, got 60"),
    ({"draft_vocab_size": 500}, None, "draft_vocab_size must be at most vocab_size = 131, got 500"),
    ({"eagle_aux_hidden_state_layer_ids": [0, 3]}, None, r"numbers from 0 to 2, layers of the model, got \[0, 3\]"),
    ({"eagle_aux_hidden_state_layer_ids": [0, 1]}, None, r"fc.weight \(\[64, 192\] instead of \[64, 128\]\)"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, None, "use_aux_hidden_state must be true, got False"),
    ({"num_hidden_layers": 2}, None, "num_hidden_layers must be 1, got 2"),
    ({"architectures": ["LlamaForCausalLM"]}, None, r"architectures must be that of a head \(LlamaForCausalLMEagle3"),
    ({"draft_vocab_size": 50}, "d2t", "has no tensor d2t, but draft_vocab_size is 50; allowed without: 131"),
    ({}, "fc.weight", "1 missing: fc.weight"),
]


@pytest.mark.parametrize(("changes", "left_out", "message"), BAD_HEADS, ids=str)
def test_a_bad_head_is_an_error_in_one_line(
    changes: dict[str, Any], left_out: str | None, message: str, target: Path, tmp_path: Path
) -> None:
    config = head_config(target, **changes)
    known = {"draft_vocab_size": 50} if left_out == "d2t" else {}
    tensors = random_tensors(head_config(target, **known))
    head = write_head(tmp_path, config, {name: each for name, each in tensors.items() if name != left_out})
    with pytest.raises(ValueError, match=message) as error:
        LLM(model=str(target), mode="eager", **ENGINE, **eagle(head))
    assert str(error.value).startswith(f"speculative_config['model'] is {str(head)!r}: ")
    assert "\n" not in str(error.value)


def test_wrong_tokens_and_embeddings_are_errors(target: Path, tmp_path: Path) -> None:
    config = head_config(target, draft_vocab_size=50)
    tensors, dflash = random_tensors(config), speculators_config(config) | {"speculators_model_type": "dflash"}
    wide = head_config(target, hidden_size=48, target_hidden_size=64)
    several = [
        (config, tensors | {"d2t": tensors["d2t"] + 100}, "d2t must give 50 different tokens from 0 to 130"),
        (config, tensors | {"d2t": torch.zeros(50)}, r"d2t is \[50\] of float32; allowed: \[50\] of int64"),
        (dflash, tensors, "speculators_model_type must be eagle3, got 'dflash'"),
        (wide, random_tensors(wide), "has no embed_tokens.weight, and the model's, of 64 columns, does not fit"),
    ]
    for number, (written, its_tensors, message) in enumerate(several):
        head = write_head(tmp_path / str(number), written, its_tensors)
        with pytest.raises(ValueError, match=message):
            LLM(model=str(target), mode="eager", **ENGINE, **eagle(head))

"""A draft model: a model that drafts for itself is always right, and drafts may be accepted at random."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint
from small_engines import CHUNKED

from compiled_engine.features.speculation.draft_model import DraftModel
from compiled_engine.features.speculation.drafter import Drafting
from compiled_engine.features.speculation.verification import accepted_at_random
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

ENGINE = CHUNKED | {"num_blocks": 200}
pytestmark = pytest.mark.usefixtures("one_thread")


def drafts_of(path: Path, num_drafts: int, **more: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(path), "num_speculative_tokens": num_drafts, **more}


@pytest.fixture(scope="module", params=["eager", "auto"])
def own_draft(request: pytest.FixtureRequest, bundled_model_path: Path) -> Iterator[LLM]:
    """The model as its own draft."""
    with LLM(mode=request.param, speculative_config=drafts_of(bundled_model_path, 5), **ENGINE) as llm:
        yield llm


@pytest.mark.product(one_in=4)
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 1.2, "n": 3},
        {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "min_p": 0.02},
        {"temperature": 0.7, "logit_bias": {100: 3.0}, "allowed_token_ids": list(range(0, 4000, 2)), "min_tokens": 9},
    ],
    ids=", ".join,
)
def test_a_model_that_drafts_for_itself_is_always_right(
    sampling: dict[str, Any], own_draft: LLM, bundled_model_path: Path
) -> None:
    """With chunks of prompts, cached prefixes, and requests that end among the drafts."""
    gained = generated(own_draft, bundled_model_path, sampling)
    assert gained["accepted_tokens"] == gained["draft_tokens"] > 0.6 * gained["tokens"]
    assert gained["prefix_hits"] > 0


def generated(llm: LLM, path: Path, sampling: dict[str, Any]) -> dict[str, int]:
    """Generate with chunks of prompts, cached prefixes, and stop strings among the drafts; return the metrics' gains,
    and the number of tokens."""
    text = (path / "held_out.txt").read_text()
    prompts = [text[40 * i : 40 * i + 30 + 12 * i] for i in range(8) for _ in range(2)]
    params = [
        SamplingParams(seed=i, max_tokens=15 + i, stop=["\n\n"] if i % 3 == 0 else None, **sampling)
        for i in range(len(prompts))
    ]
    before = llm.metrics()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.core.check_integrity()
    after = llm.metrics()
    names = "draft_tokens", "accepted_tokens", "prefix_hits", "preemptions"
    num_tokens = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    return {name: after[name] - before[name] for name in names} | {"tokens": num_tokens}


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("caches_prefixes", [False, True])
def test_a_preempted_request_is_drafted_for_again(caches_prefixes: bool, bundled_model_path: Path) -> None:
    """If it finds its own blocks, they may lack K and V of a draft that was right."""
    options = ENGINE | {"num_blocks": 48, "enable_prefix_caching": caches_prefixes, "mode": "eager"}
    with LLM(speculative_config=drafts_of(bundled_model_path, 5), **options) as llm:
        gained = generated(llm, bundled_model_path, {"temperature": 1.2, "n": 3})
    assert gained["preemptions"] > 0
    assert (0.9 if caches_prefixes else 1.0) * gained["draft_tokens"] <= gained["accepted_tokens"]


def test_a_draft_model_is_compiled_like_any_other(own_draft: LLM, bundled_model_path: Path) -> None:
    """The draft model shares the cache entry of models of its shape, and its decodes are recorded too."""
    metrics = own_draft.metrics()
    assert metrics["draft_cache_entry"] == metrics["cache_entry"]
    compiled = {name for name in metrics["passes"] if not name.startswith("draft ")}
    assert {name.removeprefix("draft ") for name in metrics["passes"]} == compiled
    assert len(metrics["passes"]) == 2 * len(compiled)
    assert "draft model" in metrics["start_up_seconds"]


def test_a_request_may_do_without_drafts(own_draft: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    alone = params.clone()
    alone.disable_spec_decode = True
    (with_drafts,) = own_draft.generate(["def "], params, use_tqdm=False)
    before = own_draft.metrics()
    (without,) = own_draft.generate(["def "], alone, use_tqdm=False)
    after = own_draft.metrics()
    assert list(without.outputs[0].token_ids) == list(with_drafts.outputs[0].token_ids)
    assert after["draft_tokens"] == before["draft_tokens"]
    assert after["steps"] == before["steps"] + 12


def test_an_aborted_request_leaves_nothing_to_the_next_in_its_row(own_draft: LLM) -> None:
    """Neither tokens nor drafts: what is drafted for the others stays right."""
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
    prompts = ["def ", "import os\n\n\nclass ", "x = "]
    expected = own_draft.generate(prompts, params, use_tqdm=False)
    streams = [own_draft.stream(text, params) for text in ("for i in range(", "    return self.")]
    for stream in streams:
        next(stream)
    before = own_draft.metrics()
    for stream in streams:
        stream.close()
    found = own_draft.generate(prompts, params, use_tqdm=False)
    own_draft.core.check_integrity()
    after = own_draft.metrics()
    assert [list(each.outputs[0].token_ids) for each in found] == [list(each.outputs[0].token_ids) for each in expected]
    assert after["accepted_tokens"] - before["accepted_tokens"] == after["draft_tokens"] - before["draft_tokens"] > 0


def test_nothing_is_read_behind_the_last_token_of_a_prompt(own_draft: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a chunk leaves a single token of the prompt, the next step has room for drafts after that token."""
    read: list[int] = []
    read_prompts = DraftModel.read_prompts

    def counted(proposer: DraftModel, drafting: Drafting) -> None:
        read.append(drafting.prompts.num_tokens if drafting.prompts else 0)
        read_prompts(proposer, drafting)

    monkeypatch.setattr(DraftModel, "read_prompts", counted)
    prompt = {"prompt_token_ids": list(range(200, 233))}  # a token more than a step computes
    own_draft.generate([prompt], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), use_tqdm=False)
    assert [number for number in read if number] == [32, 1]


def test_the_cache_of_a_draft_model_counts(bundled_model_path: Path) -> None:
    """A block holds keys and values of both."""
    sizes = []
    for config in (None, drafts_of(bundled_model_path, 2)):
        with LLM(mode="eager", speculative_config=config, **ENGINE) as llm:
            sizes.append(llm.metrics()["kv_cache_bytes"])
    assert sizes[1] == 2 * sizes[0]


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(
    ("acceptance", "shares"),
    [
        ({"synthetic_acceptance_length": 2.6}, [1.0, 0.6, 0.0]),
        ({"synthetic_acceptance_rates": [0.8, 0.5, 0.2]}, [0.8, 0.5, 0.2]),
        ({"synthetic_acceptance_length": 1}, [0.0, 0.0, 0.0]),
    ],
)
def test_synthetic_acceptance(
    acceptance: dict[str, Any], shares: list[float], tmp_path: Path, bundled_model_path: Path
) -> None:
    """Acceptance does not depend on the drafts: a random model's drafts are never right."""
    make_checkpoint(tmp_path, "qwen3", vocab_size=4096)
    config = drafts_of(tmp_path, 3, rejection_sample_method="synthetic", **acceptance)
    params = [SamplingParams(temperature=0.7, seed=seed, max_tokens=60, ignore_eos=True) for seed in range(12)]
    with LLM(mode="eager", speculative_config=config, **ENGINE) as llm:
        llm.generate(["def "] * len(params), params, use_tqdm=False)
        llm.core.check_integrity()
        metrics = llm.metrics()
    steps, accepted = metrics["drafted_requests"], metrics["accepted_by_position"]
    assert steps > 200
    for position, share in enumerate(shares):
        # The last steps of a request draft fewer tokens.
        assert accepted[str(position)] / steps == pytest.approx(share, abs=0.12)


def test_accepted_at_random() -> None:
    """The draw depends on seed and position alone, and has the rates."""
    seeds, positions = np.repeat(np.arange(-20, 20), 500), np.tile(np.arange(500), 40)
    drawn = accepted_at_random(seeds, positions, (0.9, 0.5, 0.5, 0.1))
    assert (drawn == accepted_at_random(seeds, positions, (0.9, 0.5, 0.5, 0.1))).all()
    shares = [(drawn > position).mean() for position in range(4)]
    assert shares == pytest.approx([0.9, 0.5, 0.5, 0.1], abs=0.015)
    assert not (drawn == 2).any()
    assert drawn.reshape(40, 500).mean(0).std() < 0.4

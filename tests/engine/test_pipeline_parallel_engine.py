"""Engines whose layers are divided into stages give the tokens of one, whatever scheduler and sampler do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from faulty_rank import NAME
from test_tensor_parallel_engine import ENGINE as OF_RANKS
from test_tensor_parallel_engine import KINDS, TEXTS, same

from compiled_engine.llm import LLM
from compiled_engine.processes.monitor import WorkerError
from compiled_engine.sampling.params import SamplingParams

# As many tokens as other tests have, with which stages share what is compiled.
ENGINE = OF_RANKS | {"max_num_batched_tokens": 32}
GRAMMARS: list[dict[str, Any]] = [{"regex": "[a-z]{3}(, [a-z]{2}){2}"}, {"choice": ["yes", "no"]}]


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with LLM(mode="eager", **ENGINE) as llm:
        yield llm


# With and without a residual of which a rank has its own rows alone, and hands them on; steps are scheduled before the
# tokens of the one before are known, and without ranks also after that.
LAYOUTS: dict[str, dict[str, Any]] = {
    "PP 2": {"pipeline_parallel_size": 2, "async_scheduling": False},
    "TP 2 x PP 2": {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "async_scheduling": True,
        "sequence_parallel": True,
        "compile_ranges": (),
        "strict_passes": True,
    },
}


ALONE = pytest.mark.shown_by("engine/test_pipeline_parallel_engine.py::test_the_tokens_are_those_of_one")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=ALONE) if name == "PP 2" else name for name in LAYOUTS]
)
def staged(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Fewer blocks than six requests for each stage need."""
    with LLM(mode="compiled", logits_processors=[NAME], **ENGINE, **LAYOUTS[request.param]) as llm:
        yield llm


def test_the_tokens_are_those_of_one(one: LLM, staged: LLM) -> None:
    """All kinds of sampling side by side; twice, as the second time the prompts are in the prefix cache."""
    params = [SamplingParams(max_tokens=16, ignore_eos=True, **kind) for kind in KINDS.values()]
    for _ in range(2):
        same(*(engine.generate(TEXTS, params, use_tqdm=False) for engine in (staged, one)))
    assert staged.metrics()["preemptions"] > 0
    greedy = SamplingParams(max_tokens=4, temperature=0)
    for _ in range(2):
        (again,) = staged.generate(TEXTS[0], greedy, use_tqdm=False)
    assert again.num_cached_tokens
    same([again], one.generate(TEXTS[0], greedy, use_tqdm=False))


def test_grammars_hold(one: LLM, staged: LLM) -> None:
    """Masks are made for a step while the steps of other requests are in flight."""
    params = [
        SamplingParams(max_tokens=12, temperature=0, structured_outputs=GRAMMARS[i % 2] if i % 3 else None)
        for i in range(len(TEXTS))
    ]
    same(*(engine.generate(TEXTS, params, use_tqdm=False) for engine in (staged, one)))


def test_a_stage_that_fails_ends_all_of_them(staged: LLM) -> None:
    """The processors are the last stage's; the message says which rank it was. No test of this engine may follow."""
    short = SamplingParams(max_tokens=4, temperature=0)
    with pytest.raises(WorkerError, match=r"rank (1 of 2|[23] of 4) \(stage 1 of 2\): .*injected in all"):
        staged.generate(TEXTS, SamplingParams(max_tokens=4, extra_args={"fault": "all"}), use_tqdm=False)
    with pytest.raises(WorkerError, match="injected in all"):
        staged.generate(TEXTS, short, use_tqdm=False)

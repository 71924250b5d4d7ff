"""The progress that an LLM shows, its results, and its refusals, without a model."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from plain_config import BASE
from unstarted_engines import made, prepared

from compiled_engine.config import ParallelConfig, SpeculationConfig
from compiled_engine.llm import LLM

__all__ = ["made"]  # a fixture


class Shown:
    """A progress that keeps what it is told."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int, float]] = []
        self.advanced: list[tuple[int, str]] = []

    @contextmanager
    def stage(
        self, name: str, total: int = 0, note: Callable[[], str] | None = None, patience_s: float = 0.0
    ) -> Iterator[Callable[[int], None]]:
        self.stages.append((name, total, patience_s))
        yield lambda count: self.advanced.append((count, "no note" if note is None else note()))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    progress = Shown()
    monkeypatch.setattr("compiled_engine.llm.RichProgress", lambda: progress)
    return progress


def running(*requests: Any, drafts: tuple[int, int] | None = None, **rest: Any) -> dict[str, Any]:
    """Parts whose loop gives an output for each request, the last first."""
    metrics = None if drafts is None else SimpleNamespace(num_drafts=drafts[0], num_accepted_tokens=drafts[1])

    def run(given: Any, **named: Any) -> Iterator[Any]:
        yield from (SimpleNamespace(request_id=each.request_id, metrics=metrics) for each in reversed(given))

    preparing = SimpleNamespace(process=lambda *arguments, **named: list(requests))
    return {"inputs": preparing, "loop": SimpleNamespace(run=run, close=lambda: None)} | rest


def test_each_request_that_ends_is_a_step_forward(made: Callable[..., LLM], shown: Shown) -> None:
    parts = running(prepared("a"), prepared("b"))
    assert [output.request_id for output in made(options={}, **parts).generate([[1], [2]])] == ["a", "b"]
    assert shown.stages == [("generate", 2, 0.0)]
    assert shown.advanced == [(1, "no note")] * 2
    made(options={}, **parts).generate([[1], [2]], use_tqdm=False)
    made(**parts).generate([[1], [2]])  # progress=False
    assert len(shown.stages) == 1


@pytest.mark.parametrize(
    ("drafts", "notes"),
    [
        (None, ["", ""]),
        ((0, 0), ["", ""]),
        ((4, 5), ["mean acceptance length 2.25"] * 2),
    ],
)
def test_how_many_drafts_are_right_is_shown(
    made: Callable[..., LLM], shown: Shown, drafts: tuple[int, int] | None, notes: list[str]
) -> None:
    config = replace(BASE, speculation=SpeculationConfig("ngram", 1))
    made(options={}, **running(prepared("a"), prepared("b"), drafts=drafts, config=config)).generate([[1], [2]])
    assert shown.advanced == [(1, note) for note in notes]


def test_results_of_pooling_are_made_of_the_requests_that_ran(
    made: Callable[..., LLM], shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their order; a bar comes only where it takes long."""
    for name in ("results", "embeddings", "classifications"):
        monkeypatch.setattr(f"compiled_engine.llm.{name}", lambda ran, name=name: (name, ran))
    requests = [prepared("a"), prepared("b")]
    scoring = SimpleNamespace(requests=requests, scores=lambda ran: ("scores", ran))
    pooling = SimpleNamespace(process=lambda *arguments, **named: requests, score=lambda *arguments, **named: scoring)
    llm = made(options={}, **running(pooling=pooling))
    for call, name in (
        (llm.encode, "results"),
        (llm.embed, "embeddings"),
        (llm.classify, "classifications"),
        (lambda prompts, **named: llm.score("q", prompts, **named), "scores"),
    ):
        found, ran = call(["a", "b"])  # type: ignore[operator]
        assert (found, [each.request_id for each in ran]) == (name, ["a", "b"])
        call(["a", "b"], use_tqdm=False)  # type: ignore[operator]
    assert shown.stages == [("pool", 2, 0.5)] * 4


REPLICAS = replace(BASE, parallel=ParallelConfig(1, "multiprocess", data_parallel_size=2))


def test_replicas_have_no_core(made: Callable[..., LLM]) -> None:
    llm = made(**running(prepared("a"), config=REPLICAS))
    with pytest.raises(ValueError, match="data_parallel_size is 2; allowed: 1"):
        _ = llm.core
    assert len(llm.generate([[1]])) == 1


def test_figures_are_those_of_the_core(made: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compiled_engine.llm.metric_list", lambda metrics: ["listed", metrics])
    llm = made(core=SimpleNamespace(call=lambda call: {"running": 3}, close=lambda: None))
    assert llm.metrics() == {"running": 3}
    assert llm.get_metrics() == ["listed", {"running": 3}]


@pytest.mark.parametrize("pools", [False, True])
def test_arguments_that_there_are_not(made: Callable[..., LLM], pools: bool) -> None:
    llm = made(pools=pools)
    calls = {"encode": ("a",), "embed": ("a",), "classify": ("a",), "score": ("a", "b")}
    for name, given in calls.items() if pools else {"generate": ("a",), "chat": ([],)}.items():
        with pytest.raises(TypeError, match=rf"LLM.{name}\(\) got an unexpected keyword argument 'truncate'"):
            getattr(llm, name)(*given, truncate=5)


def test_what_an_llm_is_not(made: Callable[..., LLM]) -> None:
    llm = made()
    with pytest.raises(AttributeError, match=r"^'LLM' object has no attribute 'sing'$"):
        llm.sing()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"^'LLM' object has no attribute 'beam_search'; "):
        llm.beam_search()  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="an LLM cannot be pickled: it holds a device; make one in each process"):
        pickle.dumps(llm)


def test_a_profile_is_written_only_if_one_runs(made: Callable[..., LLM]) -> None:
    def stop() -> None:
        raise AssertionError

    made(profiler=SimpleNamespace(running=False, stop=stop)).close()


@pytest.mark.parametrize("name", ["generate", "chat", "encode", "embed", "classify", "score"])
def test_progress_is_shown_unless_it_is_turned_off(name: str) -> None:
    assert inspect.signature(getattr(LLM, name)).parameters["use_tqdm"].default is True


def test_a_closed_llm_pools_nothing(made: Callable[..., LLM]) -> None:
    llm = made(pools=True)
    llm.close()
    for call in (
        lambda: llm.embed("a"),
        lambda: llm.encode("a"),
        lambda: llm.classify("a"),
        lambda: llm.score("a", "b"),
    ):
        with pytest.raises(RuntimeError, match="this LLM is closed; make a new one"):
            call()

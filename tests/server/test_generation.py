"""Requests to the engine for a request of the API, their outputs and errors, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from compiled_engine.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput
from compiled_engine.processes.core_client import EngineDeadError
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.sampled_tokens import NOTHING_ALLOWED, WHY_NO_TOKEN
from compiled_engine.server import generation
from compiled_engine.server.errors import ApiError
from compiled_engine.server.generation import begun, generate
from compiled_engine.server.metrics import ServerMetrics
from compiled_engine.server.options import Limits
from compiled_engine.server.serving import Admission, Serving
from compiled_engine.server.shared_figures import SharedFigures


def output(text: str, finish_reason: str | None = None, stop_reason: Any = None, prompt: int = 2) -> RequestOutput:
    completion = CompletionOutput(0, text, [5], None, None, finish_reason, stop_reason)
    return RequestOutput("0", None, [1] * prompt, None, [completion], finish_reason is not None, 0, RequestMetrics(0.0))


class Engine:
    """Says what a script has for each prompt. calls: what it was asked; closed: the prompts whose stream was closed."""

    limits = SimpleNamespace(vocab_size=100, max_model_len=50)

    def __init__(self, script: dict[Any, list[Any]]) -> None:
        self.script = script
        self.calls: list[tuple[Any, dict[str, Any]]] = []
        self.closed: list[Any] = []

    async def generate(self, prompt: Any, params: SamplingParams, **more: Any) -> AsyncGenerator[RequestOutput, None]:
        self.calls.append((prompt, more))
        name = prompt["prompt"] if isinstance(prompt, dict) else str(prompt)
        try:
            for each in self.script.get(name, [output("a", "stop")]):
                if isinstance(each, Exception):
                    raise each
                if isinstance(each, asyncio.Event):
                    await each.wait()
                    continue
                await asyncio.sleep(0)
                yield each
        finally:
            self.closed.append(name)


def serving_of(engine: Engine, **limits: int) -> Any:
    figures = SharedFigures()
    bounds = Limits(**limits)
    given: dict[str, Any] = {"engine": engine, "options": SimpleNamespace(limits=bounds)}
    given |= dict.fromkeys(("chat", "forms", "texts", "max_new_tokens", "pulse"))
    return Serving(
        names=("small",),
        metrics=ServerMetrics(figures, ["/"]),
        admission=Admission(bounds.max_in_flight, figures),
        created=0,
        adapters={"adapter": "the adapter"},  # type: ignore[arg-type]
        **given,
    )


def asked(serving: Any, prompts: list[Any], params: SamplingParams | None = None, **more: Any) -> list[Any]:
    """The outputs with the indices of their prompts."""

    async def run() -> list[Any]:
        async with aclosing(generate(serving, prompts, params or SamplingParams(), "delta", **more)) as outputs:
            return [each async for each in outputs]

    found = asyncio.run(run())
    assert serving.admission.in_flight == 0
    return found


def test_an_adapter_that_is_unloaded_while_its_request_is_prepared_is_not_found() -> None:
    """The model does not answer in its place."""
    engine = Engine({})
    serving = serving_of(engine)
    name = serving.model("adapter")
    del serving.adapters["adapter"]
    with pytest.raises(ApiError, match="the model 'adapter' does not exist; this server has small") as error:
        asked(serving, ["x"], model=name)
    assert (error.value.status, engine.calls) == (404, [])


def test_the_engine_gets_what_a_request_gives() -> None:
    engine = Engine({})
    asked(serving_of(engine), ["x"], priority=-3, salt="s", model="adapter")
    asked(serving_of(engine), [[1, 2]], model="small")
    assert engine.calls == [
        ({"prompt": "x", "cache_salt": "s"}, {"output": "delta", "priority": -3, "lora_request": "the adapter"}),
        ([1, 2], {"output": "delta", "priority": 0, "lora_request": None}),
    ]


def test_outputs_come_as_they_are_made_with_their_prompts() -> None:
    """In order for each; all are closed at the end."""
    script = {name: [output(name + str(number)) for number in range(3)] for name in "xyz"}
    engine = Engine(script)
    found = asked(serving_of(engine), ["x", "y", "z"])
    assert sorted((index, each.outputs[0].text) for index, each in found) == [
        (index, name + str(number)) for index, name in enumerate("xyz") for number in range(3)
    ]
    for index in range(3):
        assert [each.outputs[0].text[1] for place, each in found if place == index] == ["0", "1", "2"]
    assert sorted(engine.closed) == ["x", "y", "z"]


def test_a_slow_prompt_holds_up_no_other() -> None:
    slow = asyncio.Event()
    serving = serving_of(Engine({"x": [slow, output("x", "stop")], "y": [output("y")] * 4}))

    async def run() -> list[int]:
        places = []
        async for index, _ in generate(serving, ["x", "y"], SamplingParams(), "delta"):
            places.append(index)
            if len(places) == 3:
                slow.set()
        return places

    places = asyncio.run(run())
    assert places[:3] == [1, 1, 1]
    assert sorted(places) == [0, 1, 1, 1, 1]


def test_closing_the_stream_ends_all_prompts() -> None:
    engine = Engine({name: [output("a"), asyncio.Event()] for name in "xy"})
    serving = serving_of(engine)

    async def run() -> None:
        outputs = generate(serving, ["x", "y"], SamplingParams(n=3), "delta")
        await anext(outputs)
        assert serving.admission.in_flight == 6
        await outputs.aclose()

    asyncio.run(run())
    assert sorted(engine.closed) == ["x", "y"]
    assert serving.admission.in_flight == 0
    assert serving.metrics.finish_reasons.totals()["abort"] == 6


@pytest.mark.parametrize(
    ("event", "status", "code", "param", "text"),
    [
        (EngineDeadError("gone: /a/path"), 500, "engine_error", None, "the engine failed: gone: ..."),
        (ValueError("prompts[0] must have at most 63 tokens (max_model_len)"), 400, "context_length_exceeded", "input",
         "input must have at most 63 tokens (max_model_len)"),
        (TypeError("sampling_params: seed must be an integer"), 400, None, "seed", "seed must be an integer"),
        (output("", "abort"), 503, "shutting_down", None, "the server is shutting down"),
        (output("", "error", "out of 0x7f001234"), 500, "engine_error", None, "the engine failed: out of ..."),
        (output("", "error", WHY_NO_TOKEN[NOTHING_ALLOWED]), 400, "no_token_allowed", None,
         WHY_NO_TOKEN[NOTHING_ALLOWED]),
        (output("", "error", "structured_outputs: too many"), 400, "grammar_failed", "structured_outputs",
         "structured_outputs: too many"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("prompts", [["x"], ["y", "x"]])
def test_what_fails_is_an_error_of_the_api(
    event: Any, status: int, code: str | None, param: str | None, text: str, prompts: list[str]
) -> None:
    """Other prompts of the request end with it."""
    engine = Engine({"x": [event], "y": [output("a"), asyncio.Event()]})
    serving = serving_of(engine)
    with pytest.raises(ApiError) as caught:
        asked(serving, prompts, field="input")
    error = caught.value
    assert (error.status, error.code, error.param, str(error)) == (status, code, param, text)
    assert sorted(engine.closed) == sorted(prompts)
    refused = isinstance(event, TypeError | ValueError)
    counts = serving.metrics.finish_reasons.totals()
    failed = event.outputs[0].finish_reason if isinstance(event, RequestOutput) else None
    assert counts["error"] == (failed == "error")
    assert counts["abort"] == (len(prompts) - 1) + (failed == "abort") + isinstance(event, EngineDeadError)
    assert not (refused and counts["error"])


def test_an_error_behind_an_output_is_the_servers() -> None:
    """The request was taken, so it is not to blame."""
    serving = serving_of(Engine({"x": [output("a"), ValueError("a bug")]}))
    with pytest.raises(ValueError, match="a bug"):
        asked(serving, ["x"])
    assert serving.metrics.finish_reasons.totals()["abort"] == 1


@pytest.mark.parametrize(
    ("limits", "prompts", "params", "param"),
    [
        ({"max_completions": 4}, ["a", "b"], {"n": 2}, None),
        ({"max_completions": 4}, ["a", "b"], {"n": 3}, "n"),
        ({"max_completions": 4}, ["a"] * 5, {}, "n"),
        # Prompts: a text counts a token a character.
        ({"max_logprob_entries": 30}, ["x" * 10], {"prompt_logprobs": 2}, None),
        ({"max_logprob_entries": 29}, ["x" * 10], {"prompt_logprobs": 2}, "prompt_logprobs"),
        ({"max_logprob_entries": 30}, [[1] * 4, [1] * 6], {"prompt_logprobs": 2}, None),
        ({"max_logprob_entries": 30}, [[1] * 4, [1] * 7], {"prompt_logprobs": 2}, "prompt_logprobs"),
        ({"max_logprob_entries": 30}, [[1] * 5], {"prompt_logprobs": 2, "n": 2}, None),
        ({"max_logprob_entries": 30}, [[1] * 5], {"prompt_logprobs": 2, "n": 3}, "prompt_logprobs"),
        ({"max_logprob_entries": 500}, [[1] * 5], {"prompt_logprobs": -1}, None),  # all of the vocabulary
        ({"max_logprob_entries": 499}, [[1] * 5], {"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"max_logprob_entries": 9}, [{"prompt": "x" * 99, "prompt_token_ids": [1] * 3}], {"prompt_logprobs": 2}, None),
        ({"max_logprob_entries": 9}, [{"prompt": "x" * 4}], {"prompt_logprobs": 2}, "prompt_logprobs"),
        # Completions: of a single one they come one by one.
        ({"max_logprob_entries": 1}, ["a"], {"logprobs": 5, "max_tokens": 40}, None),
        ({"max_logprob_entries": 60}, ["a"], {"logprobs": 2, "max_tokens": 10, "n": 2}, None),
        ({"max_logprob_entries": 59}, ["a"], {"logprobs": 2, "max_tokens": 10, "n": 2}, "logprobs"),
        ({"max_logprob_entries": 59}, ["a", "b"], {"logprobs": 2, "max_tokens": 10}, "logprobs"),
        ({"max_logprob_entries": 100}, ["a", "b"], {"logprobs": 0, "max_tokens": None}, None),
        ({"max_logprob_entries": 99}, ["a", "b"], {"logprobs": 0, "max_tokens": None}, "logprobs"),
        ({"max_logprob_entries": 99}, ["a", "b"], {"logprobs": 0, "max_tokens": 1000}, "logprobs"),
        ({"max_logprob_entries": 1}, ["a", "b"], {"max_tokens": 40}, None),
    ],
)  # fmt: skip
def test_completions_and_log_probabilities_have_bounds(
    limits: dict[str, int], prompts: list[Any], params: dict[str, Any], param: str | None
) -> None:
    engine = Engine({})
    serving = serving_of(engine, **limits)
    given = SamplingParams(**params)
    if param is None:
        assert len(asked(serving, prompts, given)) == len(prompts)
        return
    with pytest.raises(ApiError) as caught:
        asked(serving, prompts, given)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert engine.calls == []


def test_a_server_takes_so_many_completions_at_a_time() -> None:
    serving = serving_of(Engine({"x": [asyncio.Event()]}), max_in_flight=3)

    async def run() -> None:
        first = generate(serving, ["x"], SamplingParams(n=2), "delta")
        waiting = asyncio.ensure_future(anext(first))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="2 completions are under way, and it takes 3") as caught:
            await anext(generate(serving, ["y"], SamplingParams(n=2), "delta"))
        assert (caught.value.status, caught.value.code) == (503, "server_busy")
        assert caught.value.headers == {"retry-after": "1"}
        assert (serving.admission.in_flight, serving.admission.refused) == (2, 1)
        assert await anext(generate(serving, ["y"], SamplingParams(n=1), "delta"))
        waiting.cancel()

    asyncio.run(run())


def test_a_stream_begins_once_its_first_item_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or takes its time; what fails at once is raised at once, what fails later when it is read."""
    monkeypatch.setattr(generation, "PATIENCE_S", 0.05)
    ended: list[str] = []

    async def items(name: str, wait_s: float, *given: Any) -> AsyncGenerator[int, None]:
        try:
            await asyncio.sleep(wait_s)
            for each in given:
                if isinstance(each, Exception):
                    raise each
                yield each
        finally:
            ended.append(name)

    async def run() -> None:
        assert [item async for item in await begun(items("quick", 0.0, 1, 2, 3))] == [1, 2, 3]
        slow = await begun(items("slow", 0.15, 1, 2))
        assert ended == ["quick"]
        assert [item async for item in slow] == [1, 2]
        with pytest.raises(KeyError):
            await begun(items("fails", 0.0, KeyError("x")))
        late = await begun(items("fails late", 0.15, KeyError("x")))
        with pytest.raises(KeyError):
            await anext(late)
        left = await begun(items("left", 60.0, 1))
        waiting = asyncio.ensure_future(anext(left))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await left.aclose()
        assert ended == ["quick", "slow", "fails", "fails late", "left"]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await begun(items("cancelled", 60.0, 1))
        assert ended[-1] == "cancelled"

    asyncio.run(run())

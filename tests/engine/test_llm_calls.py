"""The arguments that LLM and AsyncLLM pass to the preparation of requests and to the core, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from plain_config import BASE
from unstarted_engines import DEFAULT, LORA, PARAMS, POOLING, Passed, Tokenizer, features, made, made_async, prepared

from compiled_engine.engine.control import ControlError
from compiled_engine.engine.messages import ControlCall
from compiled_engine.features.adapters.extras import AdapterRef
from compiled_engine.features.pooling.frontend.processor import UNBOUNDED
from compiled_engine.features.structured.grammars.vocabulary import GrammarVocabulary
from compiled_engine.llm import LLM

__all__ = ["made", "made_async"]  # fixtures


def passed(call: Callable[[], Any]) -> tuple[Any, ...]:
    with pytest.raises(Passed) as found:
        call()
    return found.value.args


def test_generating_passes_on_what_it_is_given(made: Callable[..., LLM]) -> None:
    llm = made()
    prompts, params, priority, lora = passed(
        lambda: llm.generate([[1, 2], [3]], [PARAMS, PARAMS], priority=[4, 5], lora_request=[LORA, None])
    )
    assert [prompt.token_ids for prompt in prompts] == [(1, 2), (3,)]
    assert (params, priority, lora) == ([PARAMS, PARAMS], [4, 5], [LORA, None])
    assert passed(lambda: llm.generate([1]))[1:] == (DEFAULT, None)
    prompts, params, priority, lora = passed(lambda: llm.stream([1, 2], PARAMS, lora_request=LORA))
    assert ([prompt.token_ids for prompt in prompts], params, priority, lora) == ([(1, 2)], PARAMS, None, LORA)
    assert passed(lambda: llm.stream([1]))[1] is DEFAULT
    with pytest.raises(ValueError, match="prompt must be a single prompt, got 2"):
        llm.stream([[1], [2]])  # type: ignore[arg-type]


CHAT: dict[str, Any] = {
    "chat_template": "a template",
    "add_generation_prompt": False,
    "continue_final_message": True,
    "tools": [{"a": 1}],
    "chat_template_kwargs": {"b": 2},
}
MESSAGES = [{"role": "user", "content": "a"}]


def rendered_chat(*given: Any, **named: Any) -> Any:
    return SimpleNamespace(given=given, named=named, data={})


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates are read as they are given, and what is to be rendered is the prompt."""
    for module in ("llm", "async_llm"):
        monkeypatch.setattr(f"compiled_engine.{module}.read_chat_template", lambda given, tokenizer: (given, tokenizer))
        monkeypatch.setattr(f"compiled_engine.{module}.render_chat", rendered_chat)


@pytest.mark.usefixtures("rendered")
@pytest.mark.parametrize("given", [CHAT, {}])
def test_a_chat_is_rendered_as_it_is_given(given: dict[str, Any], made: Callable[..., LLM], made_async: Any) -> None:
    tokenizer = Tokenizer()
    plain = {"chat_template": None, "add_generation_prompt": True, "continue_final_message": False}
    no_images = {"placeholder": None, "mm_processor_kwargs": None}
    whole = plain | no_images | {"tools": None, "chat_template_kwargs": None} | given
    expected = whole | {"chat_template": (whole["chat_template"], tokenizer)}
    llm = made(tokenizer=tokenizer)
    (one, other), params, priority, lora = passed(
        lambda: llm.chat([MESSAGES, MESSAGES * 2], PARAMS, priority=4, lora_request=LORA, **given)
    )
    assert (one.given, one.named) == ((tokenizer, MESSAGES), {"name": "messages[0]"} | expected)
    assert other.given == (tokenizer, MESSAGES * 2)
    assert (params, priority, lora) == (PARAMS, 4, LORA)
    engine, _ = made_async(tokenizer=tokenizer)

    async def chat() -> None:
        await anext(engine.chat(MESSAGES, PARAMS, priority=4, lora_request=LORA, **given))

    ((prompt,), params, priority, lora) = passed(lambda: asyncio.run(chat()))
    assert callable(prompt.named.pop("is_stopped"))
    assert (prompt.given, prompt.named) == ((tokenizer, MESSAGES), expected)
    assert (params, priority, lora) == (PARAMS, 4, LORA)


def test_without_a_tokenizer_there_is_no_chat(made: Callable[..., LLM], made_async: Any) -> None:
    with pytest.raises(ValueError, match="tokenizer must be given: 'model' has none"):
        made().chat(MESSAGES)
    with pytest.raises(ValueError, match="tokenizer must be given: 'model' has none"):
        made().get_tokenizer()
    assert made(tokenizer=Tokenizer()).get_tokenizer() == "the tokenizer of transformers"
    engine, _ = made_async()
    with pytest.raises(ValueError, match="tokenizer must be given: 'model' has none"):
        asyncio.run(anext(engine.chat(MESSAGES)))


def test_pooling_passes_on_what_it_is_given(made: Callable[..., LLM], made_async: Any) -> None:
    llm = made(pools=True)
    engine, _ = made_async(pools=True)

    def both(name: str, *given: Any, **named: Any) -> tuple[Any, ...]:
        def call(engine: Any) -> Any:
            return getattr(engine, name)(*given, lora_request=LORA, **named)

        *of_async, bounds, is_stopped, lora = passed(lambda: asyncio.run(call(engine)))
        assert bounds == UNBOUNDED
        assert callable(is_stopped)
        *of_llm, same = passed(lambda: call(llm))
        assert lora is same is LORA
        return tuple(of_llm), tuple(of_async)

    of_llm, of_async = both("encode", "a", POOLING, pooling_task="token_embed", prompt_name="query")
    assert of_llm == ("a", POOLING, "token_embed", "query")
    assert of_async == (*of_llm, 0)
    of_llm, of_async = both("embed", "a", POOLING, prompt_name="query")
    assert of_llm == ("a", POOLING, "embed", "query")
    assert of_async == (*of_llm, 0)
    of_llm, of_async = both("classify", "a", POOLING)
    assert of_llm == ("a", POOLING, "classify")
    assert of_async == (*of_llm, None, 0)
    of_llm, of_async = both("score", "a", ["b"], POOLING, instruction="judge")
    assert of_llm == ("a", ["b"], POOLING, "judge")
    assert of_async == (*of_llm, 0, None)
    for name in ("encode", "embed", "classify"):
        assert passed(lambda name=name: asyncio.run(getattr(engine, name)("a", priority=7)))[-3] == 7
    found = passed(lambda: asyncio.run(engine.score("a", "b", priority=7, cache_salt="salt")))
    assert found[-4:-2] == (7, "salt")


def test_a_model_generates_or_pools(made: Callable[..., LLM], made_async: Any) -> None:
    pooling, generating = made(pools=True), made()
    for call in (lambda: pooling.generate([1]), lambda: pooling.stream([1]), lambda: pooling.chat(MESSAGES)):
        with pytest.raises(ValueError, match="the model pools, and generates no text"):
            call()
    for name in ("encode", "embed", "classify"):
        with pytest.raises(ValueError, match="the model generates text, and does not pool"):
            getattr(generating, name)("a")
    with pytest.raises(ValueError, match="the model generates text, and does not pool"):
        generating.score("a", "b")
    engine, _ = made_async(pools=True)
    with pytest.raises(ValueError, match="the model pools, and generates no text"):
        asyncio.run(anext(engine.generate([1])))


def test_calls_of_the_core(made: Callable[..., LLM]) -> None:
    calls: list[ControlCall] = []
    closed: list[str] = []
    core = SimpleNamespace(call=lambda call: calls.append(call) or {}, close=lambda: closed.append("core"))
    loop = SimpleNamespace(close=lambda: closed.append("loop"))
    profiler = SimpleNamespace(running=True, stop=lambda: closed.append("profile"), start=closed.append)
    with made(core=core, loop=loop, profiler=profiler) as llm:
        llm.metrics()
        assert llm.reset_prefix_cache() is True
        assert calls == [ControlCall("metrics"), ControlCall("reset_prefix_cache", {"of_running": False})]
        assert llm.core is core
        assert llm.config is BASE
        copied = llm.get_default_sampling_params()
        assert copied == DEFAULT
        assert copied is not DEFAULT
        llm.start_profile("begin")
        llm.stop_profile()
    assert closed == ["begin", "profile", "loop", "profile", "core"]
    llm.close()
    assert closed[-1] == "core"
    assert len(closed) == 5
    for call in (llm.metrics, llm.reset_prefix_cache, llm.start_profile, llm.stop_profile, lambda: llm.generate([1])):
        with pytest.raises(RuntimeError, match="this LLM is closed; make a new one"):
            call()


X, Y = AdapterRef("x", "/x", "one"), AdapterRef("y", "/y", "two")


def test_adapters_are_loaded_once_before_requests_run(made: Callable[..., LLM]) -> None:
    given = [prepared("a", adapter=X, completions=2), prepared("b"), prepared("c", adapter=Y), prepared("d", adapter=X)]
    calls: list[ControlCall] = []
    ran: list[Any] = []

    def run(requests: Any, *, partial: bool = False, arrivals: None = None) -> Iterator[Any]:
        ran.append((requests, partial))
        yield from (SimpleNamespace(request_id=each.request_id, metrics=None) for each in reversed(requests))

    llm = made(
        inputs=SimpleNamespace(process=lambda *arguments, **named: given),
        core=SimpleNamespace(call=calls.append, close=lambda: None),
        loop=SimpleNamespace(run=run, close=lambda: None),
    )
    assert [output.request_id for output in llm.generate([[1]] * 4)] == ["a", "b", "c", "d"]
    assert calls == [
        ControlCall("load_adapter", {"path": "/x", "digest": "x"}),
        ControlCall("load_adapter", {"path": "/y", "digest": "y"}),
    ]
    list(llm.stream([1]))
    assert ran == [(given, False), (given, True)]


def test_an_adapter_that_does_not_fit_is_named(made: Callable[..., LLM], made_async: Any) -> None:
    def refuse(call: ControlCall) -> None:
        raise ControlError("rank 9; allowed: 4")

    inputs = SimpleNamespace(process=lambda *arguments, **named: [prepared("a", adapter=X)])
    llm = made(inputs=inputs, core=SimpleNamespace(call=refuse, close=lambda: None))
    with pytest.raises(ValueError, match="lora_request 'one': rank 9; allowed: 4"):
        llm.generate([1])
    engine, client = made_async(inputs=inputs)
    client.refuses = True
    with pytest.raises(ValueError, match="lora_request 'one': rank 9; allowed: 4"):
        asyncio.run(anext(engine.generate([1])))
    assert client.added == []


def test_an_adapter_of_texts_that_are_pooled_is_there_before_they_are_sent(
    made: Callable[..., LLM], made_async: Any
) -> None:
    def refuse(call: ControlCall) -> None:
        raise ControlError("rank 9; allowed: 4")

    requests = [prepared("a"), prepared("b", adapter=X)]
    pooling = SimpleNamespace(
        process=lambda *arguments, **named: requests,
        score=lambda *arguments, **named: SimpleNamespace(requests=requests, scores=list),
        num_characters_of_pairs=lambda *texts: 0,
    )
    engine, client = made_async(pooling=pooling)
    client.refuses = True
    llm = made(pooling=pooling, core=SimpleNamespace(call=refuse, close=lambda: None))
    for name, given in {"encode": ("a",), "embed": ("a",), "classify": ("a",), "score": ("a", "b")}.items():
        with pytest.raises(ValueError, match="lora_request 'one': rank 9; allowed: 4"):
            getattr(llm, name)(*given)
        with pytest.raises(ValueError, match="lora_request 'one': rank 9; allowed: 4"):
            asyncio.run(getattr(engine, name)(*given))
    assert client.added == []


def test_an_adapter_is_awaited_while_it_is_read(made_async: Any) -> None:
    engine, client = made_async(features=features(find=lambda lora_request: X))

    async def run() -> None:
        assert await engine.load_adapter(LORA) == "x"
        await engine.load_adapter(LORA)
        await engine.unload_adapter("x")
        client.unread = 0
        await engine.load_adapter(LORA)

    asyncio.run(run())
    x = {"digest": "x"}
    begin, has_read = ("begin_load_adapter", {"path": "/x"} | x), ("has_read_adapter", x)
    load = ("load_adapter", {"path": "/x"} | x)
    assert client.sent == [begin, *[has_read] * 3, load, ("unload_adapter", x), begin, has_read, load]


def test_an_adapter_that_the_core_has_dropped_for_another_is_loaded_again(made_async: Any) -> None:
    found = iter([X, Y, Y, X])
    engine, client = made_async(features=features(find=lambda lora_request: next(found)))
    client.unread = 0

    async def run() -> None:
        for client.drops in ([], ["x"], [], ["y"]):
            await engine.load_adapter(LORA)

    asyncio.run(run())
    loads = [arguments["digest"] for name, arguments in client.sent if name == "load_adapter"]
    assert loads == ["x", "y", "x"]


def test_grammars_need_the_vocabulary(made: Callable[..., LLM], made_async: Any) -> None:
    """A core is given it once, before the first of them."""
    calls: list[ControlCall] = []
    arguments = {"tokenizer": "{}", "vocab_size": 9, "eos_token_ids": [1, 3]}
    given = iter([prepared("a"), *[prepared("b", grammar="a grammar")] * 2])
    inputs = SimpleNamespace(process=lambda *arguments, **named: [next(given)])
    core = SimpleNamespace(tell=calls.append, close=lambda: None)
    loop = SimpleNamespace(run=lambda *arguments, **named: iter(()), close=lambda: None)
    told = features()
    told.structured.vocabulary = GrammarVocabulary("{}", 9, frozenset({3, 1}))
    llm = made(inputs=inputs, core=core, loop=loop, features=told)
    list(llm.stream([1]))
    assert calls == []
    for _ in range(2):
        list(llm.stream([1]))
    assert calls == [ControlCall("set_vocabulary", arguments)]
    told = features()
    told.structured.vocabulary = GrammarVocabulary("{}", 9, frozenset({3, 1}))
    engine, client = made_async(inputs=inputs, features=told)

    async def prepare() -> None:
        await asyncio.gather(*(engine.prepare_structured_outputs() for _ in range(3)))

    asyncio.run(prepare())
    assert client.sent == [("set_vocabulary", arguments)]
    engine, client = made_async(pools=True)
    client.sent.clear()
    asyncio.run(engine.prepare_structured_outputs())
    assert client.sent == []


def test_what_is_asked_of_an_async_engine(made_async: Any) -> None:
    engine, client = made_async()

    async def run() -> None:
        assert await engine.metrics() == {"steps": 5}
        await engine.reset_prefix_cache()
        await engine.check_health()
        with pytest.raises(ValueError, match="output is 'all'; allowed: cumulative, delta, final"):
            await anext(engine.generate([1], output="all"))
        with pytest.raises(ValueError, match="prompt must be a single prompt, got 2"):
            await anext(engine.generate([[1], [2]]))

    asyncio.run(run())
    assert client.sent == [("metrics", {}), ("reset_prefix_cache", {"of_running": False})]
    assert (engine.config, engine.tokenizer, engine.address) == (BASE, None, "/somewhere")
    assert (engine.num_unfinished, engine.errored) == (0, None)
    assert engine.get_default_sampling_params() == DEFAULT
    prompts, params, priority, lora = passed(
        lambda: asyncio.run(anext(engine.generate([1, 2], PARAMS, priority=4, lora_request=LORA)))
    )
    assert ([prompt.token_ids for prompt in prompts], params, priority, lora) == ([(1, 2)], PARAMS, 4, LORA)
    assert passed(lambda: asyncio.run(anext(engine.generate([1]))))[1] is DEFAULT


def test_an_engine_that_drains_takes_no_more(made_async: Any) -> None:
    engine, _ = made_async()

    async def drain() -> None:
        assert await engine.drain(timeout_s=0.0) == 0
        with pytest.raises(RuntimeError, match="this AsyncLLM is draining: it takes no more requests"):
            await anext(engine.generate([1]))

    asyncio.run(drain())

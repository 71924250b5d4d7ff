"""LLM and AsyncLLM without a model: their parts are stand-ins, which end a call or keep what they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from plain_config import BASE

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.engine.control import ControlError
from compiled_engine.engine.messages import ControlCall, EngineRequest
from compiled_engine.features.adapters.extras import AdapterRef, extras_of
from compiled_engine.features.adapters.frontend.requests import AdapterRequests
from compiled_engine.features.images.frontend.requests import ImageRequests
from compiled_engine.features.pooling.frontend.task import PoolingParams
from compiled_engine.features.request_registry import RequestFeatures
from compiled_engine.features.speech.frontend.requests import SpeechRequests
from compiled_engine.features.structured import extras as structured
from compiled_engine.features.structured.frontend.requests import StructuredRequests
from compiled_engine.frontend.prepared_request import PreparedRequest
from compiled_engine.frontend.request_stream import RequestStreams
from compiled_engine.frontend_parts import FrontendParts
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

PARAMS, POOLING, DEFAULT = SamplingParams(seed=3), PoolingParams(), SamplingParams(temperature=0.25)
LORA: Any = object()
SILENT = {"progress": False}


class Passed(Exception):
    """Raised to end a call, with the arguments that reached the end of its way."""


class Processor:
    """A processor that prepares nothing: it raises `Passed` with its arguments."""

    def process(self, *arguments: Any, lora_request: Any = None, attached: Any = ()) -> Any:
        """lora_request: also the last of the arguments, if given."""
        raise Passed(*arguments, *([] if lora_request is None else [lora_request]))

    score = process

    def num_characters_of_pairs(self, *texts: Any) -> int:
        return 0


def features(find: Callable[[Any], Any] = lambda lora_request: None, objects_allowed: str = "") -> RequestFeatures:
    """Return features whose adapters are those that `find` returns, and are not read."""
    adapters = AdapterRequests(None)
    adapters.finder = SimpleNamespace(find=find, has_read=lambda lora_request: True)  # type: ignore[assignment]
    structured_requests = StructuredRequests(None, 100, frozenset(), objects_allowed)
    return RequestFeatures(structured_requests, adapters, SpeechRequests(None), ImageRequests(None))


class Tokenizer:
    chat_template = "the template"
    hf = "the tokenizer of transformers"


def parts(*, pools: bool = False, tokenizer: Any = None, **rest: Any) -> Any:
    frontend = {
        "config": BASE,
        "limits": None,
        "tokenizer": tokenizer,
        "inputs": Processor(),
        "features": features(),
        "pooling": Processor() if pools else None,
        "default_sampling_params": DEFAULT,
    }
    given = {
        "core": SimpleNamespace(call=lambda call: call, close=lambda: None),
        "loop": SimpleNamespace(run=lambda *given, **named: iter([(given, named)]), close=lambda: None),
        "profiler": SimpleNamespace(running=False),
    }
    frontend |= {name: rest.pop(name) for name in frontend.keys() & rest.keys()}
    return SimpleNamespace(frontend=FrontendParts(**frontend), **given | rest)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    def make(*, options: Any = SILENT, **given: Any) -> LLM:
        made = parts(**given)
        monkeypatch.setattr("compiled_engine.llm._start", lambda *arguments: made)
        return LLM(**options)

    return make


class Client:
    """Takes the place of a core: keeps the messages that it gets, and answers calls."""

    def __init__(self) -> None:
        self.loop: Any = None
        self.dead: str | None = None
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.aborted: list[str] = []
        self.added: list[EngineRequest] = []
        self.unread = 2  # how often an adapter is said to be read still
        self.refuses = False
        self.drops: list[str] = []  # adapters, for the next one

    def attach(self, loop: Any) -> None:
        self.loop = loop

    def abort(self, request_ids: Any) -> None:
        self.aborted += request_ids

    def add(self, request: EngineRequest) -> None:
        self.added.append(request)

    async def call(self, name: str, **arguments: Any) -> Any:
        self.sent.append((name, arguments))
        if name == "has_read_adapter":
            self.unread -= 1
            return self.unread < 0
        if name == "load_adapter" and self.refuses:
            raise ControlError("rank 9; allowed: 4")
        return self.drops if name == "load_adapter" else {"steps": 5}

    def tell(self, call: ControlCall, request_ids: Sequence[str] = ()) -> None:
        self.sent.append((call.name, call.arguments))


@pytest.fixture
def made_async(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[AsyncLLM, Client]]:
    client = Client()

    def make(**given: Any) -> tuple[AsyncLLM, Client]:
        given = {"client": client, "streams": RequestStreams(None), "given": {}} | given  # type: ignore[arg-type]
        made = parts(**given)
        made.core.address = "/somewhere"
        monkeypatch.setattr("compiled_engine.async_llm.start_engine", lambda *arguments, **named: made)
        monkeypatch.setattr("compiled_engine.async_llm.end", lambda *arguments: None)
        return AsyncLLM(), client

    return make


def prepared(
    request_id: str, *, adapter: AdapterRef | None = None, grammar: str | None = None, completions: int = 1
) -> Any:
    made, extras = SamplingParams(), extras_of(adapter) | structured.extras_of(grammar)
    requests = tuple(EngineRequest(f"{request_id}-{i}", (1,), made, extras=extras) for i in range(completions))
    return PreparedRequest(request_id, None, (1,), made, requests)

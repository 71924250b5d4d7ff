"""State shared by all requests: the engine, server options, model facts, and admission control."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from starlette.requests import Request

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.features.adapters.lora_request import LoRARequest
from compiled_engine.frontend.input_processor import check_text
from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.schema import nearest
from compiled_engine.server.adapter_names import AdapterNames
from compiled_engine.server.chat_format import ChatFormat
from compiled_engine.server.errors import ApiError, bad_request, blamed_on_request, shown
from compiled_engine.server.long_work import LongWork
from compiled_engine.server.metrics import ServerMetrics
from compiled_engine.server.options import ServerOptions
from compiled_engine.server.pulse import Pulse
from compiled_engine.server.shared_figures import SharedFigures

# The delay that a busy server suggests to its clients.

RETRY_AFTER_S = 1
# Bytes of images, see ImageGate.
MOST_WAITING = 4 << 30


class Admission:
    """Bounds the completions that run or wait. Each of them holds state in this process and in the engine.

    The bound applies to the sum over all API processes. Each process adds its completions before it reads the sum, so
    the processes together never exceed the bound.
    """

    def __init__(self, most: int, figures: SharedFigures) -> None:
        self._most = most
        self._figures = figures
        self._taken = figures.reserve(1)
        self._refused = figures.reserve(1)

    @property
    def in_flight(self) -> int:
        """Running and waiting completions of all processes."""
        return int(self._figures.total(self._taken))

    @property
    def refused(self) -> int:
        """Requests of all processes that were refused because too many completions were under way."""
        return int(self._figures.total(self._refused))

    @contextmanager
    def admit(self, completions: int) -> Iterator[None]:
        """Count `completions` as under way within the block. Raises ApiError 503 if the sum exceeds the bound."""
        own = self._figures.own
        own[self._taken] += completions
        try:
            if (under_way := self.in_flight) > self._most:
                own[self._refused] += 1
                raise ApiError(
                    503,
                    f"the server is busy: {under_way - completions} completions are under way, "
                    f"and it takes {self._most}",
                    code="server_busy",
                    headers={"retry-after": str(RETRY_AFTER_S)},
                )
            yield
        finally:
            own[self._taken] -= completions

    def forget(self, process: int) -> None:
        """No longer count the completions of an API process that has ended."""
        self._figures.forget(process, self._taken)


class ImageGate:
    """Bounds the images that are processed at once in this process. Prompts wait in order until there is room.

    most: largest size in bytes of the processed images of all prompts that are being processed. It also bounds the
    bytes of the image URLs of all admitted and waiting prompts; a prompt beyond that is refused.
    """

    def __init__(self, most: int = MOST_WAITING) -> None:
        self.most, self._urls, self._processing = most, 0, 0
        self._turn = asyncio.Lock()  # held by the prompt that is next
        self._ended = asyncio.Event()  # some images are processed

    @asynccontextmanager
    async def admit(self, urls: int, size: int) -> AsyncIterator[None]:
        """Wait until there is room for a prompt's images, and count the prompt within the block.

        urls: bytes of the prompt's image URLs. size: largest possible size of its processed images, in bytes. If there
        are no other prompts, there is always room. Raises ApiError 503 if the URLs exceed the bound and there are other
        prompts.
        """
        if self._urls and self._urls + urls > self.most:
            raise ApiError(
                503,
                "the server is busy: too many images wait to be processed",
                code="server_busy",
                headers={"retry-after": str(RETRY_AFTER_S)},
            )
        self._urls += urls
        try:
            async with self._turn:
                while self._processing and self._processing + size > self.most:
                    self._ended.clear()
                    await self._ended.wait()
            self._processing += size
            try:
                yield
            finally:
                self._processing -= size
                self._ended.set()
        finally:
            self._urls -= urls


@dataclass(frozen=True)
class Serving:
    """The server's state that all HTTP requests share: engine, options, limits and metrics."""

    engine: AsyncLLM
    options: ServerOptions
    names: tuple[str, ...]  # names of the model; answers have the first
    chat: ChatFormat | None  # None without a tokenizer or a template
    metrics: ServerMetrics
    admission: Admission
    forms: LongWork  # checks of grammars
    texts: LongWork  # tokenisation and rendering
    max_new_tokens: int | None  # default for chats, if the checkpoint has one
    created: int  # start of the server, in seconds since 1970
    adapters: AdapterNames  # further names that requests may give as model
    pulse: Pulse  # liveness of the engine core
    images: ImageGate = field(default_factory=ImageGate)
    # held while a long body is decoded, so that other work runs in between
    decoding: asyncio.Lock = field(default_factory=asyncio.Lock)
    stopping: threading.Event = field(default_factory=threading.Event)  # set when the server stops accepting requests

    def default_chat_params(self) -> SamplingParams:
        """Return the checkpoint's sampling parameters. `max_tokens` is the checkpoint's max_new_tokens or None."""
        params = self.engine.get_default_sampling_params()
        params.max_tokens = self.max_new_tokens
        return params

    def now(self) -> int:
        """Return the current time in whole seconds since 1970, for answers."""
        return int(time.time())

    @property
    def max_model_len(self) -> int:
        """The context length: tokens of prompt and output together."""
        return self.engine.limits.max_model_len

    @property
    def max_answer_tokens(self) -> int:
        """The largest number of tokens that a request may ask for."""
        limit = self.options.limits.max_answer_tokens
        return self.max_model_len if limit == -1 else min(limit, self.max_model_len)

    def model(self, requested: str | None) -> str:
        """Return the name of the model in the answer: `requested`, or the model's first name if `requested` is None.

        Raises ApiError 404 for a name of neither the model nor an adapter.
        """
        if requested is None or requested in self.names or self.adapters.get(requested) is not None:
            return requested or self.names[0]
        names = [*self.names, *self.adapters]
        found = nearest(requested, names) if len(names) > 1 else None
        advice = f"; the nearest is {found}" if found else ""
        raise ApiError(
            404, f"the model {shown(requested)} does not exist; this server has {', '.join(names)}{advice}",
            param="model", code="model_not_found",
        )  # fmt: skip

    def adapter(self, requested: str | None) -> LoRARequest | None:
        """Return the adapter that a request names; None for the model.

        Raises ApiError 404 for an unknown name, such as that of an adapter unloaded since.
        """
        return self.adapters.get(self.model(requested))

    def check_text(self, text: str, params: SamplingParams, field: str) -> None:
        """Raise ApiError 400 if a prompt is certainly too long, without tokenising it. `field` is its request field."""
        try:
            check_text(field, text, params, self.tokenizer(), self.engine.limits)
        except ValueError as error:
            raise blamed_on_request(error, prompts=field) from error

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises ApiError 400 without one."""
        if self.engine.tokenizer is None:
            raise bad_request(None, "this server has no tokenizer: prompts must be token ids, and there is no chat")
        return self.engine.tokenizer

    def chat_format(self) -> ChatFormat:
        """Return the chat format. Raises ApiError 400 if the model cannot chat."""
        self.tokenizer()
        if self.chat is None:
            pools = self.engine.config.model.pooling is not None
            instead = "it pools: give input to /v1/embeddings or /pooling" if pools else "use /v1/completions"
            raise bad_request("messages", f"this model has no chat template: {instead}")
        return self.chat


def serving_of(request: Request) -> Serving:
    """Return the `Serving` that the request's application was built with."""
    serving: Serving = request.app.state.serving
    return serving

"""`AsyncLLM`: the engine for many callers of one event loop, its core in a process of its own."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from compiled_engine.config import EngineConfig
from compiled_engine.engine_parts import CoreKind, EngineParts, join_engine, start_engine
from compiled_engine.frontend.chat import Conversation, read_chat_template, render_chat
from compiled_engine.frontend.core_link import end, leave
from compiled_engine.frontend.input_processor import PreparedRequest
from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.frontend.prompts import Prompt, PromptLike, has_long_text, parse_prompts
from compiled_engine.frontend.request_stream import OUTPUT_KINDS, OutputKind
from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.messages import RequestLimits
from compiled_engine.processes.core_child import CoreChild
from compiled_engine.processes.core_client import EngineDeadError
from compiled_engine.sampling.params import SamplingParams

_POLL_S = 0.01


class AsyncLLM:
    """An engine with a model loaded, compiled and ready, for thousands of requests at once.

    model, options, progress: as for `LLM`. core: "process", a process of its own, or "in_process", a thread of this
    one. Token masks need "in_process", and so do logits processors that are not given as "package.module:Name". Or a
    CoreChild, which can be made before this class is imported, so that both processes import at the same time.

    Raises what `LLM` raises; EngineDeadError if the core's process ends before it is ready. The constructor waits for
    the core; `await AsyncLLM.start(...)` does not hold up the event loop meanwhile. All calls are to be made on one
    event loop at a time. Dropping the last reference ends the core, and so does the end of this process.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        core: CoreKind | CoreChild = "process",
        progress: bool = True,
        **options: Any,
    ) -> None:
        self._take(start_engine({"model": model, **options}, core, progress=progress))

    @classmethod
    async def start(cls, model: str | Path | None = None, **options: Any) -> AsyncLLM:
        """As the constructor, without holding up the event loop."""
        return await asyncio.to_thread(cls, model, **options)

    @classmethod
    async def join(cls, address: str) -> AsyncLLM:
        """One for another process of this user, at the core that has this `address`. It does not keep the core alive.

        Raises OSError if nobody listens there, EngineDeadError if the core ends meanwhile.
        """
        engine = cls.__new__(cls)
        engine._take(await asyncio.to_thread(join_engine, address))
        return engine

    def _take(self, parts: EngineParts) -> None:
        self._parts = parts
        self._client, self._streams = parts.client, parts.streams
        self._end = weakref.finalize(self, end, parts.client, parts.core, parts.streams)
        self._numbers = count()
        self._draining = False
        self._has_vocabulary = False  # the core, of the tokenizer

    def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output: OutputKind = "cumulative",
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt, given as for `LLM.generate`; the last output has `finished`.

        request_id: the outputs' request_id; None for a new one.
        output: "cumulative": all so far, whenever it has grown; "delta": what is new since the output before, of those
            completions that have grown (cumulative_logprob stays cumulative); "final": only the end.

        Cancelling or closing the iterator ends the request. Who reads slowly gets several tokens at once. The first
        output raises TypeError or ValueError for bad input, before anything is sent to the core; any output may raise
        EngineDeadError.
        """

        def parse() -> Prompt:
            prompts = parse_prompts(prompt)
            if len(prompts) != 1:
                raise ValueError(f"prompt must be a single one, got {len(prompts)}")
            return prompts[0]

        return self._run(parse, has_long_text(prompt), sampling_params, request_id, output, priority)

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat_template: str | Path | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        output: OutputKind = "cumulative",
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue one conversation, given as for `LLM.chat`; otherwise as `generate`."""

        def render() -> Prompt:
            tokenizer = self._require_tokenizer()
            return render_chat(
                tokenizer,
                messages,
                chat_template=read_chat_template(chat_template, tokenizer),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )

        return self._run(render, has_long_text(messages), sampling_params, request_id, output, priority)

    async def prepare_structured_outputs(self) -> None:
        """Have the core read the vocabulary, so that the first request with structured_outputs need not wait for it.

        Raises ValueError if there is no tokenizer, or one that runs in Python.
        """
        self._attach()
        if not self._has_vocabulary:
            vocabulary = await asyncio.to_thread(lambda: self._parts.inputs.vocabulary)
            if not self._has_vocabulary:
                self._has_vocabulary = True
                self._client.set_vocabulary(vocabulary)

    async def abort(self, request_id: str) -> None:
        """End a request: its iterator gives a last output with finish_reason "abort". Nothing if it is not known."""
        self._client.abort(self._streams.abort(request_id))

    async def metrics(self) -> dict[str, Any]:
        """What the core has counted since it started, as `LLM.metrics`, and api_processes, those that it serves."""
        self._attach()
        metrics: dict[str, Any] = await self._client.call("metrics")
        return metrics

    async def reset_prefix_cache(self) -> None:
        """Forget which prompts the KV cache holds; requests under way go on as they are."""
        self._attach()
        await self._client.call("reset_prefix_cache")

    async def check_health(self) -> None:
        """Raises EngineDeadError if the core has ended."""
        self._attach()
        if self.errored is not None:
            raise EngineDeadError(self.errored)

    async def wait_dead(self) -> str:
        """Wait until the core ends, or `shutdown`; the reason."""
        self._attach()
        return await self._client.wait_dead()

    async def drain(self, timeout_s: float | None = None) -> int:
        """Take no more requests, and wait until those under way have ended; after `timeout_s` abort them.

        Returns how many were aborted. `generate` raises RuntimeError from now on.
        """
        self._draining = True
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (left := self._streams.num_unfinished) and (deadline is None or time.monotonic() < deadline):
            await asyncio.sleep(_POLL_S)
        for request_id in self._streams:
            await self.abort(request_id)
        return left

    async def shutdown(self) -> None:
        """End the core and free the device; requests under way get EngineDeadError. May be called again."""
        if self.errored is None:
            self._attach()
        leave(self._client, self._streams)
        await asyncio.to_thread(self._end)

    @property
    def errored(self) -> str | None:
        """Why the engine is of no use any more; None while it is."""
        return self._client.dead

    @property
    def config(self) -> EngineConfig:
        """The resolved configuration."""
        return self._parts.config

    @property
    def limits(self) -> RequestLimits:
        """What a request may have at most."""
        return self._parts.limits

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None with skip_tokenizer_init, or if the checkpoint has none. `tokenizer.hf` is that of transformers."""
        return self._parts.tokenizer

    @property
    def address(self) -> str | None:
        """For `join`; None with core="in_process"."""
        return self._parts.core.address

    @property
    def num_unfinished(self) -> int:
        """Requests of this object that are under way."""
        return self._streams.num_unfinished

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used when no sampling_params are given: a copy, to be changed and given."""
        return self._parts.default_sampling_params.clone()

    async def _run(
        self,
        make_prompt: Callable[[], Prompt],
        is_long: bool,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        output: OutputKind,
        priority: int,
    ) -> AsyncGenerator[RequestOutput, None]:
        self._attach()
        self._require_open()
        if output not in OUTPUT_KINDS:
            raise ValueError(f"output is {output!r}; allowed: {', '.join(OUTPUT_KINDS)}")

        def prepare() -> PreparedRequest:
            params = self._parts.default_sampling_params if sampling_params is None else sampling_params
            (prepared,) = self._parts.inputs.process([make_prompt()], params, priority)
            if prepared.sampling_params.token_mask is not None and self._parts.token_masks is None:
                raise ValueError("sampling_params.token_mask must be None unless core is 'in_process'")
            return prepared

        structured = getattr(sampling_params, "structured_outputs", None) is not None  # what it is, is checked below
        beside_loop = is_long or structured or has_long_text(getattr(sampling_params, "bad_words", None))
        prepared = await asyncio.to_thread(prepare) if beside_loop else prepare()
        if structured:
            await self.prepare_structured_outputs()
        prepared = replace(prepared, request_id=self._new_id() if request_id is None else request_id)
        stream = self._streams.add(prepared, output)
        try:
            self._send(prepared)
            while True:
                result = await stream.next()
                yield result
                if result.finished:
                    return
        finally:
            self._client.abort(self._streams.remove(stream))

    def _send(self, prepared: PreparedRequest) -> None:
        self._require_open()
        mask = prepared.sampling_params.token_mask
        for request in prepared.engine_requests:
            if mask is not None and self._parts.token_masks is not None:
                self._parts.token_masks[request.request_id] = mask
            self._client.add(request)

    def _new_id(self) -> str:
        return next(request_id for number in self._numbers if (request_id := f"request-{number}") not in self._streams)

    def _attach(self) -> None:
        """Serve the running event loop; requests of one that has ended before end too."""
        loop = asyncio.get_running_loop()
        before = self._client.loop
        if before is loop:
            return
        if before is not None and before.is_running():
            raise RuntimeError("this AsyncLLM is at work on another event loop; allowed: one at a time")
        left = self._streams.fail_all(lambda: RuntimeError("the engine has been used on another event loop since"))
        self._client.attach(loop)
        self._client.abort(left)

    def _require_open(self) -> None:
        if self.errored is not None:
            raise EngineDeadError(self.errored)
        if self._draining:
            raise RuntimeError("this AsyncLLM is draining: it takes no more requests")

    def _require_tokenizer(self) -> Tokenizer:
        if self._parts.tokenizer is None:
            raise ValueError(f"tokenizer must be given: {str(self._parts.config.model.path)!r} has none")
        return self._parts.tokenizer

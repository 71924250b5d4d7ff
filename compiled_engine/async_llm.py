"""`AsyncLLM`: the engine for many concurrent callers on an event loop, with its core in another process or a thread."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from msgspec import structs

from compiled_engine.async_llm_parts import AsyncLLMParts, CoreKind, join_engine, start_engine
from compiled_engine.config import EngineConfig
from compiled_engine.engine.control import PauseMode
from compiled_engine.engine.messages import ControlCall, RequestLimits
from compiled_engine.features.adapters.lora_request import LoRARequest
from compiled_engine.features.pooling.frontend.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from compiled_engine.features.pooling.frontend.processor import (
    UNBOUNDED,
    PoolingBounds,
    PoolingProcessor,
    Scoring,
)
from compiled_engine.features.pooling.frontend.running import RunningPooling, classifications, embeddings, results
from compiled_engine.features.pooling.frontend.task import PoolingParams
from compiled_engine.features.rank_calls.frontend.collective_calls import OF_ENGINES, calls_on_ranks
from compiled_engine.features.request_registry import RequestFeatures
from compiled_engine.features.speech.frontend.transcription import Asked, Transcription, run_async
from compiled_engine.features.weight_updates.frontend import update_calls
from compiled_engine.features.weight_updates.frontend.update_calls import WeightSource
from compiled_engine.frontend.attachments import AttachmentThreads
from compiled_engine.frontend.chat import Conversation, read_chat_template, render_chat
from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.frontend.prepared_request import PreparedRequest
from compiled_engine.frontend.prompts import Prompt, PromptLike, num_characters, parse_prompt, rendering_size
from compiled_engine.frontend.request_hooks import Attachment
from compiled_engine.frontend.request_stream import (
    OUTPUT_KINDS,
    OutputKind,
    RequestStream,
    end,
    leave,
)
from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.frontend.tokenizer_backend import LONG_TEXT, QUICK_TEXT
from compiled_engine.process.forks import Owner, unless_forked
from compiled_engine.process.smallest_first import SmallestFirst, Stopped, never
from compiled_engine.processes.core_child import CoreChild
from compiled_engine.processes.core_client import EngineDeadError
from compiled_engine.sampling.params import SamplingParams

_POLL_S = 0.01
Prepared = TypeVar("Prepared")


class AsyncLLM:
    """An engine with a model loaded, compiled and ready, for thousands of concurrent requests.

    model, options, progress: see `LLM`. core: "process" runs the core in another process, "in_process" in a thread.
    Token masks need "in_process", and so do logits processors that are not given as "package.module:Name". core may
    also be a CoreChild: a process that was started before this class was imported, so that both processes import at the
    same time.

    Raises the errors of `LLM`, and EngineDeadError if the core's process ends before it is ready. The constructor waits
    for the core; `await AsyncLLM.start(...)` does not block the event loop. Make all calls on one event loop at a time.
    Dropping the last reference ends the core, and so does the end of this process.
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
        """Construct an engine without blocking the event loop. The arguments are those of the class."""
        return await asyncio.to_thread(cls, model, **options)

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> AsyncLLM:
        """Construct an engine from `EngineArgs`, like scripts for vLLM do."""
        return cls(**engine_args.keywords())

    @classmethod
    async def join(cls, address: str) -> AsyncLLM:
        """Return an engine that uses the core at `address`, which another process of this user has started.

        The engine does not keep the core alive. Raises OSError if no core listens there, EngineDeadError if the core
        ends meanwhile.
        """
        engine = cls.__new__(cls)
        engine._take(await asyncio.to_thread(join_engine, address))
        return engine

    def _take(self, parts: AsyncLLMParts) -> None:
        self._frontend, self._core = parts.frontend, parts.core
        self._client, self._streams, self._given = parts.client, parts.streams, parts.given
        self._owner = Owner("AsyncLLM")
        self._end = weakref.finalize(self, unless_forked(end), parts.client, parts.core, parts.streams)
        self._numbers = count()
        self._preparing = SmallestFirst(QUICK_TEXT, "prompts")
        self._attaching = AttachmentThreads()
        self._draining = False

    def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output: OutputKind = "cumulative",
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt. Yields outputs; only the last has `finished` set.

        prompt: see `LLM.generate`. request_id: the outputs' request_id; None for a new one. priority: lower values are
        served first; must be 0 unless scheduling_policy is "priority". lora_request: the request's adapter; requires
        enable_lora.
        output: "cumulative": outputs have the whole completions so far; "delta": only the new part of completions that
            have grown since the previous output (cumulative_logprob stays cumulative); "final": there is one output, at
            the end.

        Cancelling or closing the iterator ends the request. A slow reader gets several tokens in one output. The first
        output raises TypeError or ValueError for bad input, before anything is sent to the core; any output may raise
        EngineDeadError.
        """

        def parse(is_stopped: Stopped) -> Prompt:
            return parse_prompt(prompt)

        size = num_characters(prompt)
        return self._run(parse, size, False, sampling_params, request_id, output, priority, lora_request)

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
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        output: OutputKind = "cumulative",
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue one conversation. Yields outputs like `generate`.

        See `LLM.chat` for the conversation's arguments, and `generate` for the other arguments.
        """

        def render(is_stopped: Stopped) -> Prompt:
            tokenizer = self._frontend.require_tokenizer()
            return render_chat(
                tokenizer,
                messages,
                chat_template=read_chat_template(chat_template, tokenizer),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                is_stopped=is_stopped,
                placeholder=self._frontend.features.images.placeholder,
                mm_processor_kwargs=mm_processor_kwargs,
            )

        size = rendering_size([messages, tools, chat_template_kwargs])
        return self._run(render, size, True, sampling_params, request_id, output, priority, lora_request)

    async def transcribe(
        self,
        audio: Any,
        *,
        language: str | None = None,
        task: str = "transcribe",
        prompt: str | None = None,
        temperature: float | Sequence[float] | None = None,
        timestamps: bool = False,
    ) -> Transcription:
        """Return the text of audio of any length; see `LLM.transcribe`. The audio is read in a thread."""

        async def last(asked: Asked) -> RequestOutput:
            async with aclosing(self.generate(asked.prompt, asked.params, output="final")) as outputs:
                return [output async for output in outputs][-1]

        transcribing, chosen = self._frontend.features.speech.transcribing, (language, task, prompt, temperature)
        return await run_async(await asyncio.to_thread(transcribing, audio, *chosen, timestamps=timestamps), last)

    async def attach(self, prompt: Mapping[str, Any], sampling_params: SamplingParams | None = None) -> dict[str, Any]:
        """Process a prompt's images. Return the prompt, for `generate`, with the results and their placeholder tokens.

        sampling_params: those of `generate`; with truncate_prompt_tokens, the prompt may be longer than the engine's
        limit.

        Raises TypeError or ValueError for images that cannot be used.
        """
        self._attach()
        self._require_open()
        parsed = parse_prompt(prompt)
        attached = await self._attached(parsed)
        tokens = await self._prepared(
            num_characters(prompt),
            lambda is_stopped: self._frontend.inputs.tokens(parsed, attached[0], sampling_params or SamplingParams()),
            apart=True,  # data may stand for many tokens
        )
        return {**prompt, "prompt_token_ids": tokens, "multi_modal_data": {"image": attached[0]}}

    async def encode(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: str | None = None,
        prompt_name: str | None = None,
        priority: int = 0,
        bounds: PoolingBounds = UNBOUNDED,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return vectors like `LLM.encode`. Cancelling the call ends its requests and the preparation of their texts.

        Raises TimeoutError or ValueError if the work exceeds the bounds, see PoolingBounds.
        """
        return results(
            await self._encoded(prompts, pooling_params, pooling_task, prompt_name, priority, bounds, lora_request)
        )

    async def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | None = None,
        *,
        prompt_name: str | None = None,
        priority: int = 0,
        bounds: PoolingBounds = UNBOUNDED,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return embeddings like `LLM.embed`. See `encode` for bounds and for cancelling the call."""
        return embeddings(
            await self._encoded(prompts, pooling_params, "embed", prompt_name, priority, bounds, lora_request)
        )

    async def classify(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | None = None,
        *,
        priority: int = 0,
        bounds: PoolingBounds = UNBOUNDED,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return probabilities of labels like `LLM.classify`. See `encode` for bounds and for cancelling the call."""
        return classifications(
            await self._encoded(prompts, pooling_params, "classify", None, priority, bounds, lora_request)
        )

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        instruction: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        bounds: PoolingBounds = UNBOUNDED,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return scores of pairs like `LLM.score`. See `encode` for bounds and for cancelling the call.

        cache_salt: only pairs with the same salt share a cached prefix.
        """
        processor = self._pooler()

        given = {"lora_request": lora_request}

        def prepare(is_stopped: Stopped) -> Scoring:
            return processor.score(
                queries, documents, pooling_params, instruction, priority, cache_salt, bounds, is_stopped, **given
            )

        size = processor.num_characters_of_pairs(queries, documents, instruction)
        await self._read_files(given)
        scoring = await self._prepared(size, prepare, seconds=bounds.seconds)
        return scoring.scores(await self._pooled(scoring.requests))

    async def prepare_structured_outputs(self) -> None:
        """Have the core read the vocabulary, so that the first request with structured_outputs need not wait for it.

        Does nothing for a model that pools. Raises ValueError if there is no tokenizer, or if the tokenizer runs in
        Python.
        """
        self._attach()
        if self._frontend.pooling is None:
            await self._frontend.features.structured.give_vocabulary(self._client)

    async def load_adapter(self, lora_request: LoRARequest) -> str:
        """Let the core load an adapter into host memory before a request needs it. Returns the adapter's digest.

        Raises TypeError, ValueError or OSError if the files are no valid adapter, or the adapter does not fit the
        model.
        """
        self._attach()
        adapters = self._frontend.features.adapters
        adapter = await asyncio.to_thread(adapters.finder.find, lora_request)
        await adapters.load(adapter, self._client)
        return adapter.digest

    async def unload_adapter(self, digest: str) -> None:
        """Drop the adapter with this digest from host memory.

        An adapter that a request uses stays until other adapters need its memory.
        """
        self._attach()
        await self._frontend.features.adapters.unload(digest, self._client)

    async def abort(self, request_id: str) -> None:
        """End a request: its iterator yields a last output with finish_reason "abort". An unknown id has no effect."""
        self._owner.require_here()
        self._client.abort(self._streams.abort(request_id))

    async def metrics(self) -> dict[str, Any]:
        """Return the metrics of `LLM.metrics`, and api_processes, the number of the core's clients."""
        self._attach()
        metrics: dict[str, Any] = await self._client.call("metrics")
        return metrics | self._frontend.metrics()

    def frontend_metrics(self) -> dict[str, float]:
        """Return the metrics of features in this process, such as those of images; `metrics` contains them too."""
        return self._frontend.metrics()

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache, see `LLM.reset_prefix_cache`. Returns True."""
        self._attach()
        await self._client.call("reset_prefix_cache", of_running=reset_running_requests)
        return True

    async def pause_generation(
        self, *, mode: PauseMode = "abort", wait_for_inflight_requests: bool | None = None, clear_cache: bool = True
    ) -> None:
        """Stop running steps until `resume_generation`; return once no step runs. Requests that arrive meanwhile wait.

        mode: "abort" ends all requests of all clients with finish_reason "abort"; "keep" stops them where they are;
            "wait" lets requests that have begun run to their end.
        wait_for_inflight_requests: True is mode "wait", under an older name of vLLM's.
        clear_cache: True: the prefix cache is emptied, and kept requests are computed again. False: kept requests keep
            their keys and values, even if the weights change meanwhile.

        Raises ControlError for another mode.
        """
        self._attach()
        await self._client.call("pause", mode="wait" if wait_for_inflight_requests else mode, clear_cache=clear_cache)
        while not await self._client.call("is_paused"):
            await asyncio.sleep(_POLL_S)

    async def resume_generation(self) -> None:
        """Run steps again after `pause_generation`."""
        self._attach()
        await self._client.call("resume")

    async def is_paused(self) -> bool:
        """Return whether `pause_generation` has taken effect."""
        self._attach()
        paused: bool = await self._client.call("is_paused")
        return paused

    async def update_weights(
        self, weights: WeightSource, *, version: str | None = None, recompute: bool = True
    ) -> None:
        """Replace the weights in place, between two steps. Arguments and errors: see `LLM.update_weights`.

        Tensors go to the core through temporary files, in memory if there is room.
        """
        self._attach()
        calls = update_calls.update(weights, self.config.parallel, version, recompute=recompute, in_this_process=False)
        await update_calls.served_async(calls, self._client.make)

    async def connect_weight_sender(
        self,
        address: str,
        port: int,
        *,
        rank_offset: int = 1,
        world_size: int,
        packed: bool = False,
        backend: str = "gloo",
    ) -> None:
        """Join the process group of a trainer, so that `update_weights` can receive tensors that it broadcasts.

        address, port: of the trainer's store. rank_offset: the first rank of the engine. world_size: ranks of trainer
        and engine. packed: a message has several tensors, and ends with the tensor that brings it above 1 GiB.
        backend: gloo or nccl, see docs/rollouts.md.

        Raises ValueError with several replicas, ControlError if the trainer does not answer.
        """
        self._attach()
        group = self.config.parallel, address, port, rank_offset, world_size
        await self._client.make(update_calls.connect(*group, packed=packed, backend=backend))

    async def start_weight_update(self) -> None:
        """Begin an update in parts, see `LLM.start_weight_update`."""
        self._attach()
        await self._client.make(update_calls.START)

    async def finish_weight_update(self, version: str | None = None, *, recompute: bool = True) -> str:
        """Check the weights of an update, use them, and return their version; see `LLM.finish_weight_update`."""
        self._attach()
        found: str = await self._client.make(update_calls.finish(version, recompute=recompute))
        return found

    async def weight_update_state(self) -> dict[str, Any]:
        """Return the weights' version, the number of updates, and the number of tensors received for a running update.

        The keys are version, updates and received; received is None while no update is under way.
        """
        self._attach()
        state: dict[str, Any] = await self._client.make(update_calls.STATE)
        return state

    async def reset_mm_cache(self) -> None:
        """Forget the processed images in this process."""
        self._frontend.features.images.forget()

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Give memory back to the system until `wake_up`; requires enable_sleep_mode. level: see `LLM.sleep`.

        mode: whether requests are aborted, kept or finished first, see `pause_generation`.
        """
        await self.pause_generation(mode=mode, clear_cache=False)
        await self._client.make(ControlCall("sleep", {"level": level}, slow=True))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate again the memory that `sleep` has given back, see `LLM.wake_up`.

        Once weights and KV cache are both awake, generation resumes, even if it was paused before `sleep`.
        """
        self._attach()
        if await self._client.call("wake_up", tags=None if tags is None else list(tags)):
            await self._client.call("resume")

    async def is_sleeping(self) -> bool:
        """Return whether the memory of weights or KV cache is given back: after `sleep`, until `wake_up` for both."""
        self._attach()
        sleeping: bool = await self._client.call("is_sleeping")
        return sleeping

    async def reset_encoder_cache(self) -> None:
        """Drop the encoded images and audio that are kept on the device, see `LLM.reset_encoder_cache`."""
        await self.reset_prefix_cache()

    async def get_world_size(self, include_dp: bool = True) -> int:
        """Return the number of ranks, see `LLM.get_world_size`."""
        parallel = self.config.parallel
        return parallel.num_ranks if include_dp else parallel.devices_per_replica

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of the engine by its name, or a function on every rank; see `LLM.collective_rpc`.

        method: functions must be importable by the core's process or thread, and arguments and results plain data.
        timeout: seconds after which TimeoutError is raised; the call itself goes on, and may still take effect.
        """
        self._attach()
        if timeout is not None and timeout <= 0:
            raise ValueError(f"timeout must be above 0, got {timeout}")
        if method in OF_ENGINES:
            work = self._call_own(str(method), args, kwargs or {})
        else:
            calls = calls_on_ranks(method, args, kwargs or {}, self.config, in_this_process=False)
            work = update_calls.served_async(calls, self._client.make)
        results: list[Any] = await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(work)), timeout)
        return results

    async def _call_own(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        return [await getattr(self, method)(*args, **kwargs)] * self.config.parallel.num_ranks

    async def check_health(self) -> None:
        """Raise EngineDeadError if the core has ended."""
        self._attach()
        if self.errored is not None:
            raise EngineDeadError(self.errored)

    async def wait_dead(self) -> str:
        """Wait until the core ends, or `shutdown` is called. Returns the reason."""
        self._attach()
        return await self._client.wait_dead()

    async def drain(self, timeout_s: float | None = None) -> int:
        """Refuse new requests with RuntimeError, and wait until this object's running requests have ended.

        Requests that still run after timeout_s are aborted. Returns the number of aborted requests.
        """
        self._owner.require_here()
        self._draining = True
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (left := self._streams.num_unfinished) and (deadline is None or time.monotonic() < deadline):
            await asyncio.sleep(_POLL_S)
        for request_id in self._streams:
            await self.abort(request_id)
        return left

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Wait until no request of this object is unfinished, or the engine is paused, in which none runs.

        Raises TimeoutError after drain_timeout seconds.
        """
        self._attach()
        async with asyncio.timeout(drain_timeout):
            while self._streams.num_unfinished and not await self.is_paused():
                await asyncio.sleep(_POLL_S)

    async def shutdown(self) -> None:
        """End the core and free the device. Unfinished requests get EngineDeadError. May be called repeatedly.

        After `join`, the core runs on. Does nothing in a fork of the process that made the engine, because the core
        belongs to that process.
        """
        if not self._owner.is_here:
            return
        if self.errored is None:
            self._attach()
        leave(self._client, self._streams)
        await asyncio.to_thread(self._end)
        await asyncio.to_thread(self._frontend.close)
        self._attaching.close()

    @property
    def errored(self) -> str | None:
        """The reason why the engine no longer works; None while it does."""
        return self._client.dead

    @property
    def config(self) -> EngineConfig:
        """The resolved configuration."""
        return self._frontend.config

    @property
    def limits(self) -> RequestLimits:
        """The engine's limits on requests."""
        return self._frontend.limits

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None with skip_tokenizer_init or if the checkpoint has none.

        `tokenizer.hf` is transformers' object.
        """
        return self._frontend.tokenizer

    @property
    def features(self) -> RequestFeatures:
        """The parts of features that run in this process, such as those that process images and audio."""
        return self._frontend.features

    @property
    def address(self) -> str | None:
        """The address for `join`; None with core="in_process"."""
        return self._core.address

    @property
    def num_unfinished(self) -> int:
        """Number of this object's unfinished requests."""
        return self._streams.num_unfinished

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a copy of the parameters that are used when no sampling_params are given."""
        return self._frontend.default_sampling_params.clone()

    async def _run(
        self,
        make_prompt: Callable[[Stopped], Prompt],
        size: int,
        apart: bool,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        output: OutputKind,
        priority: int,
        lora_request: LoRARequest | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        self._attach()
        self._require_open()
        self._frontend.require_generating()
        if output not in OUTPUT_KINDS:
            raise ValueError(f"output is {output!r}; allowed: {', '.join(OUTPUT_KINDS)}")

        def prepare(is_stopped: Stopped) -> PreparedRequest | Prompt:
            prompt = make_prompt(is_stopped)
            if prompt.data:  # it may have to wait
                return prompt
            (prepared,) = self._frontend.completions([prompt], sampling_params, priority, **given)
            return prepared

        given: dict[str, Any] = {"lora_request": lora_request}
        size += num_characters(getattr(sampling_params, "bad_words", None))
        is_slow = any(feature.is_slow(sampling_params) for feature in self._frontend.features)
        await self._read_files(given)
        prepared = await self._prepared(size, prepare, apart=apart or is_slow)
        if isinstance(prepared, Prompt):
            prompt, attached = prepared, await self._attached(prepared)
            (prepared,) = await self._prepared(
                size,
                lambda is_stopped: self._frontend.completions(
                    [prompt], sampling_params, priority, attached=attached, **given
                ),
                apart=True,
            )
        await self._ready_core([prepared])
        prepared = structs.replace(prepared, request_id=self._new_id() if request_id is None else request_id)
        stream = self._streams.add(prepared, output)
        try:
            self._send(prepared)
            while True:
                self._owner.require_here()
                result = await stream.next()
                yield result
                if result.finished:
                    return
        finally:
            self._leave([stream])

    async def _prepared(
        self, size: int, prepare: Callable[[Stopped], Prepared], *, apart: bool = False, seconds: float | None = None
    ) -> Prepared:
        """Return the result of `prepare`, which runs in a thread if the texts are long or `apart` is set.

        `size` is the number of characters of the texts. `seconds` limits the time in the thread; raises TimeoutError
        after that. Cancelling the call ends the work, too.
        """
        if not apart and size < LONG_TEXT:
            return prepare(never)
        is_over = threading.Event()
        try:
            running = self._preparing.submit(size, lambda: prepare(is_over.is_set))
            return await asyncio.wait_for(asyncio.wrap_future(running), seconds)
        finally:
            is_over.set()

    async def _read_files(self, given: Mapping[str, Any]) -> None:
        """Read the files that features need for a call's arguments, `given`. Each is read in a thread."""
        for feature in self._frontend.features:
            for read in feature.reads(given):
                await asyncio.to_thread(read)

    async def _attached(self, prompt: Prompt) -> Sequence[Attachment | None]:
        """Process a prompt's data, such as images. Return a sequence of its one attachment; empty without data."""
        attached = self._frontend.attach([prompt])
        await self._attaching.wait(attached)
        return attached

    async def _ready_core(self, requests: Sequence[PreparedRequest]) -> None:
        """Make the control calls that must precede these requests, such as those that load adapters."""
        of_core = [each for request in requests for each in request.engine_requests]
        for feature in self._frontend.features:
            await feature.before_async(of_core, self._client)

    def _pooler(self) -> PoolingProcessor:
        self._attach()
        self._require_open()
        return self._frontend.require_pooling()

    async def _encoded(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | None,
        pooling_task: str | None,
        prompt_name: str | None,
        priority: int,
        bounds: PoolingBounds,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
    ) -> list[RunningPooling]:
        processor, given = self._pooler(), {"lora_request": lora_request}

        def prepare(is_stopped: Stopped) -> list[PreparedRequest]:
            return processor.process(
                prompts, pooling_params, pooling_task, prompt_name, priority, bounds, is_stopped, **given
            )

        await self._read_files(given)
        return await self._pooled(await self._prepared(num_characters(prompts), prepare, seconds=bounds.seconds))

    async def _pooled(self, requests: Sequence[PreparedRequest]) -> list[RunningPooling]:
        """Run pooling requests together, and return them, in the order given, once all have ended."""
        await self._ready_core(requests)
        streams = [self._streams.add(request, "final") for request in requests]
        try:
            for request in requests:
                self._send(request)
            ended: list[Any] = [await stream.next() for stream in streams]
        finally:
            self._leave(streams)
        return ended

    def _leave(self, streams: Sequence[RequestStream]) -> None:
        """Remove streams, and abort their requests.

        A forked process aborts no requests, since the streams of its parent process still read them.
        """
        left = [request_id for stream in streams for request_id in self._streams.remove(stream)]
        if self._owner.is_here:
            self._client.abort(left)

    def _send(self, prepared: PreparedRequest) -> None:
        self._require_open()
        for request in prepared.engine_requests:
            if prepared.given is not None:
                self._given[request.request_id] = prepared.given
            self._client.add(request)

    def _new_id(self) -> str:
        return next(request_id for number in self._numbers if (request_id := f"request-{number}") not in self._streams)

    def _attach(self) -> None:
        """Attach to the running event loop.

        Requests of an earlier event loop that no longer runs end with RuntimeError. Raises RuntimeError if the earlier
        loop still runs, or if this process is a fork of the one that made the engine.
        """
        self._owner.require_here()
        loop = asyncio.get_running_loop()
        before = self._client.loop
        if before is loop:
            return
        if before is not None and before.is_running():
            raise RuntimeError("this AsyncLLM is in use on another event loop; allowed: one at a time")
        left = self._streams.fail_all(lambda: RuntimeError("the engine has been used on another event loop since"))
        self._client.attach(loop)
        self._client.abort(left)

    def _require_open(self) -> None:
        if self.errored is not None:
            raise EngineDeadError(self.errored)
        if self._draining:
            raise RuntimeError("this AsyncLLM is draining: it takes no more requests")

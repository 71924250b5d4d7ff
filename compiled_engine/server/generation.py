"""Run a request's prompts on the engine as one stream of outputs, with engine errors mapped to API errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import TypeAlias, TypeVar

from compiled_engine.features.adapters.lora_request import LoRARequest
from compiled_engine.frontend.outputs import CompletionOutput, RequestOutput
from compiled_engine.frontend.prompts import PromptLike
from compiled_engine.frontend.request_stream import OutputKind
from compiled_engine.processes.core_client import EngineDeadError
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.sampled_tokens import NOTHING_ALLOWED, WHY_NO_TOKEN
from compiled_engine.server.cache_salt import salted
from compiled_engine.server.errors import (
    bad_request,
    blamed_on_request,
    engine_failure,
    require,
    shortened,
    shutting_down,
)
from compiled_engine.server.serving import Serving

Outputs: TypeAlias = "AsyncGenerator[tuple[int, RequestOutput], None]"
Item = TypeVar("Item")

# How long the status line waits for the first output, so that a refusal by the engine gets an error status.
PATIENCE_S = 0.05


async def generate(
    serving: Serving,
    prompts: Sequence[PromptLike],
    params: SamplingParams,
    output: OutputKind,
    priority: int = 0,
    field: str = "prompt",
    salt: str | None = None,
    model: str | None = None,
) -> Outputs:
    """Generate completions of the prompts, and yield each output as (index of its prompt, output).

    Closing the stream aborts unfinished completions. With the `output` "delta", each output has the new tokens and
    text; with "final", there is one output per prompt, at the end. `field` is the request field of the prompts, for
    errors. Only requests with the same `salt` share cached prefixes. `model` is the name of the model or of an adapter.

    Raises ApiError: 400 if the request exceeds a bound or the engine refuses it, 404 if the adapter was unloaded
    meanwhile, 503 if the server is busy or shuts down, 500 if the engine fails.
    """
    completions, most = len(prompts) * params.n, serving.options.limits.max_completions
    require(completions <= most, "n times the number of prompts", f"at most {most}", completions, param="n")
    _check_logprobs(serving, prompts, params)
    adapter = serving.adapter(model)
    with serving.admission.admit(completions):
        streams = [
            _of_prompt(serving, salted(prompt, salt), params, output, priority, field, adapter) for prompt in prompts
        ]
        if len(streams) > 1:
            async with aclosing(_merged(streams)) as outputs:
                async for each in outputs:
                    yield each
        else:
            async with aclosing(streams[0]) as stream:
                async for result in stream:
                    yield 0, result


def _check_logprobs(serving: Serving, prompts: Sequence[PromptLike], params: SamplingParams) -> None:
    """Raise ApiError 400 if the request exceeds the server's bound on log-probabilities.

    In prompts given as text, each character counts as a token. The tokens of a single completion do not count, since
    they arrive one by one.
    """
    most, longest = serving.options.limits.max_logprob_entries, serving.max_answer_tokens
    of_prompts = 0
    if params.prompt_logprobs is not None:
        given = [prompt.get("prompt_token_ids") or prompt["prompt"] if isinstance(prompt, Mapping) else prompt
                 for prompt in prompts]  # fmt: skip
        of_prompts = params.n * sum(map(len, given)) * _per_token(serving, params.prompt_logprobs)
    what = "n times the prompts' tokens times prompt_logprobs + 1"
    require(of_prompts <= most, what, f"at most {most}", of_prompts, param="prompt_logprobs")
    completions = len(prompts) * params.n
    if params.logprobs is not None and completions > 1:
        tokens = min(params.max_tokens or longest, longest)
        entries = completions * tokens * _per_token(serving, params.logprobs)
        what = "n times the number of prompts times max_tokens times logprobs + 1"
        require(entries <= most, what, f"at most {most}", entries, param="logprobs")


def _per_token(serving: Serving, wanted: int) -> int:
    return serving.engine.limits.vocab_size if wanted == -1 else wanted + 1


async def _of_prompt(
    serving: Serving,
    prompt: PromptLike,
    params: SamplingParams,
    output: OutputKind,
    priority: int,
    field: str,
    adapter: LoRARequest | None,
) -> AsyncGenerator[RequestOutput, None]:
    observed = serving.metrics.request(params)
    accepted = False
    try:
        outputs = serving.engine.generate(prompt, params, output=output, priority=priority, lora_request=adapter)
        async with aclosing(outputs) as stream:
            async for result in stream:
                accepted = True
                observed.output(result)
                for completion in result.outputs:
                    _raise_if_failed(completion)
                yield result
    except EngineDeadError as error:
        raise engine_failure(str(error)) from error
    except (TypeError, ValueError) as error:
        if accepted:
            raise
        observed.refused()
        raise blamed_on_request(error, prompts=field) from error
    finally:
        observed.end()


def _raise_if_failed(completion: CompletionOutput) -> None:
    """Raise ApiError for a completion that failed, or that was aborted by anything but a pause.

    A pause keeps the tokens of the completions that it ends. The status is 400 if no token was allowed or the grammar
    failed, 503 at shutdown, and otherwise 500.
    """
    if completion.finish_reason == "error" and completion.stop_reason == WHY_NO_TOKEN[NOTHING_ALLOWED]:
        raise bad_request(None, str(completion.stop_reason), code="no_token_allowed")
    if completion.finish_reason == "error" and str(completion.stop_reason).startswith("structured_outputs: "):
        raise bad_request("structured_outputs", shortened(str(completion.stop_reason)), code="grammar_failed")
    if completion.finish_reason == "error":
        raise engine_failure(str(completion.stop_reason))
    if completion.finish_reason == "abort" and completion.stop_reason is None:
        raise shutting_down()


async def _merged(streams: Sequence[AsyncGenerator[RequestOutput, None]]) -> Outputs:
    """Yield the outputs of several streams in order of arrival. A stream waits until the reader takes its output."""
    ready: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(1)

    async def pump(index: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(stream):
                async for result in stream:
                    await ready.put((index, result))
            await ready.put((index, None))
        except Exception as error:
            await ready.put((index, error))

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        left = len(pumps)
        while left:
            index, result = await ready.get()
            if isinstance(result, Exception):
                raise result
            if result is None:
                left -= 1
            else:
                yield index, result
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def begun(stream: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
    """Wait until the stream's first item has arrived or PATIENCE_S has passed, and return the stream.

    Raises an error that arrives instead of the item.
    """
    first = asyncio.ensure_future(anext(stream))
    try:
        await asyncio.wait({first}, timeout=PATIENCE_S)
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        with suppress(BaseException):
            await first
        await stream.aclose()
        raise
    return _continued(first, stream)


async def _continued(first: asyncio.Future[Item], stream: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
    try:
        yield await first
        async for item in stream:
            yield item
    finally:
        first.cancel()
        with suppress(BaseException):
            await first
        await stream.aclose()

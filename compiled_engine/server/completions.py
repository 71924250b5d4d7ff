"""/v1/completions: the endpoint, complete answers and event streams."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request

from compiled_engine.frontend.logprob_list import first_text
from compiled_engine.frontend.outputs import CompletionOutput, Logprob, RequestOutput
from compiled_engine.frontend.prompts import has_long_text
from compiled_engine.frontend.request_stream import OutputKind
from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.server.cache_salt import cache_salt
from compiled_engine.server.forms import asked_form
from compiled_engine.server.generation import Outputs, begun, generate
from compiled_engine.server.logprob_shapes import (
    CompletionLogprobs,
    Entries,
    completion_logprobs,
    echoed_logprobs,
    prompt_logprobs,
)
from compiled_engine.server.protocol import (
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    Usage,
    UsageCounter,
    parse_prompts,
)
from compiled_engine.server.replies import (
    EventStream,
    Reply,
    event,
    json_response,
    read_body,
    unless_gone,
    warned,
    with_errors,
)
from compiled_engine.server.sampling_fields import sampling_params
from compiled_engine.server.serving import Serving, serving_of


async def completions(request: Request) -> Reply:
    """Handle POST /v1/completions."""
    serving = serving_of(request)
    fields, ignored = await read_body(request, serving, CompletionRequest)
    answer = await unless_gone(request.receive, _answer(serving, fields))
    prompts = await unless_gone(request.receive, _prompts(serving, fields, answer.params))
    kind: OutputKind = "delta" if fields.streams else "final"
    salt, priority = cache_salt(request, fields), fields.priority or 0
    outputs = generate(serving, prompts, answer.params, kind, priority, salt=salt, model=answer.model)
    if fields.streams:
        return EventStream(with_errors(answer_events(answer, await begun(outputs))), warned(ignored))
    return json_response(await unless_gone(request.receive, whole_answer(answer, outputs)), ignored)


@dataclass(frozen=True)
class Answer:
    """The values that all parts of a request's answer share: id, time, model, and the request itself."""

    id: str
    created: int
    model: str
    fields: CompletionRequest
    params: SamplingParams
    unwanted: bool  # One token per completion is generated although max_tokens is 0.
    tokenizer: Tokenizer | None

    @property
    def shows_ids(self) -> bool:
        return bool(self.fields.return_tokens_as_token_ids)

    def echoed(self, output: RequestOutput) -> str:
        """Return the prompt as text, for a request with `echo`."""
        whole = output.prompt is not None and self.fields.truncate_prompt_tokens is None
        if whole or self.tokenizer is None:
            return output.prompt or ""
        return self.tokenizer.decode(output.prompt_token_ids)

    @property
    def left_out(self) -> frozenset[int]:
        """The ids of tokens that the completion's text omits."""
        return self.tokenizer.special_ids if self.tokenizer and self.params.skip_special_tokens else frozenset()

    def echoed_logprobs(self, output: RequestOutput, entries: Entries) -> tuple[CompletionLogprobs, int] | None:
        """Return (log-probabilities of the prompt, length of the prompt's text in characters).

        `entries` are the log-probabilities of the prompt's tokens as the engine returns them; those of a request that
        was aborted may be of the first tokens alone. Returns None unless the
        request asks for the prompt's log-probabilities, by giving both `echo` and `logprobs`.
        """
        if not self.fields.echo or self.fields.logprobs is None or not entries:
            return None
        ids, text = output.prompt_token_ids[: len(entries)], self.echoed(output)
        first, special = "", frozenset[int]()
        if self.tokenizer is not None:
            first, special = first_text(self.tokenizer, ids, self.params), self.tokenizer.special_ids
        return echoed_logprobs(entries, ids, text, first, special, as_ids=self.shows_ids), len(text)

    def response(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None = UNSET) -> CompletionResponse:
        return CompletionResponse(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)


async def _prompts(serving: Serving, fields: CompletionRequest, params: SamplingParams) -> list[Any]:
    """Return the prompts for the engine.

    Texts are tokenised here only if `add_special_tokens` is false. Otherwise the engine tokenises them.
    """
    prompts: list[Any] = list(parse_prompts(fields.prompt, serving.options.limits.max_completions))
    if not isinstance(prompts[0], str) or fields.add_special_tokens in (None, True):
        return prompts
    tokenizer = serving.tokenizer()
    for prompt in prompts:
        serving.check_text(prompt, params, "prompt")

    def encoded() -> list[Any]:
        ids = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
        return [{"prompt": prompt, "prompt_token_ids": each} for prompt, each in zip(prompts, ids, strict=True)]

    if not has_long_text(prompts):
        return encoded()
    return await serving.texts.run("prompt", sum(map(len, prompts)), encoded)


async def _answer(serving: Serving, fields: CompletionRequest) -> Answer:
    model = serving.model(fields.model)
    form = await asked_form(serving.forms, fields.response_format, fields.structured_outputs)
    echo = bool(fields.echo)
    unwanted = fields.max_tokens == 0
    more: dict[str, Any] = {"structured_outputs": form}
    if unwanted:
        more["max_tokens"] = 1
    if fields.logprobs is not None:
        more["logprobs"] = fields.logprobs
        if echo:
            more["prompt_logprobs"] = fields.logprobs
    params = sampling_params(
        fields, serving.engine.get_default_sampling_params(), serving.options.limits, serving.max_answer_tokens, **more
    )
    return Answer(f"cmpl-{uuid.uuid4().hex}", serving.now(), model, fields, params, unwanted, serving.engine.tokenizer)


async def whole_answer(answer: Answer, outputs: Outputs) -> CompletionResponse:
    """Wait for all outputs. Return the response with the completions of all prompts."""
    usage = UsageCounter()
    choices: list[CompletionChoice] = []
    async with aclosing(outputs):
        async for prompt, output in outputs:
            usage.add(prompt, output)
            of_prompt = output.prompt_logprobs
            shows_prompt = answer.fields.prompt_logprobs is not None
            # Converted once for all completions.
            shown = prompt_logprobs(of_prompt or ()) if shows_prompt else None
            echoed = answer.echoed_logprobs(output, of_prompt or ())
            for completion in output.outputs:
                choice = _part(answer, prompt, output, completion, _Place(), echoed)
                choice.prompt_logprobs = shown
                if not answer.fields.return_token_ids:
                    choice.token_ids = choice.prompt_token_ids = None
                choices.append(choice)
    choices.sort(key=lambda choice: choice.index)
    return answer.response(choices, usage.usage(len(choices) if answer.unwanted else 0))


@dataclass
class _Place:
    """The progress of a streamed completion: the number of characters sent, and whether the first part was sent."""

    characters: int = 0
    begun: bool = False


def _part(
    answer: Answer,
    prompt: int,
    output: RequestOutput,
    completion: CompletionOutput,
    place: _Place,
    echoed: tuple[CompletionLogprobs, int] | None,
) -> CompletionChoice:
    """Return the next part of a streamed completion, or the whole of one that is not streamed. Updates `place`.

    With `echo`, the first part begins with the prompt. `prompt` is the prompt's index in the request. `echoed` is the
    result of `Answer.echoed_logprobs`.
    """
    fields = answer.fields
    text, token_ids, entries = completion.text, list(completion.token_ids), list(completion.logprobs or ())
    if answer.unwanted:
        text, token_ids, entries = "", [], []
    logprobs: CompletionLogprobs | None = None
    first = not place.begun
    if fields.logprobs is not None:
        if first and echoed is not None:
            of_prompt, place.characters = echoed
        logprobs, place.characters = completion_logprobs(
            entries, token_ids, place.characters, answer.left_out, as_ids=answer.shows_ids
        )
        if first and echoed is not None:
            logprobs = of_prompt + logprobs
    if first and fields.echo:
        text = answer.echoed(output) + text
    place.begun = True
    return CompletionChoice(
        index=prompt * answer.params.n + completion.index,
        text=text,
        logprobs=logprobs,
        finish_reason="length" if answer.unwanted and completion.finish_reason else completion.finish_reason,
        stop_reason=completion.stop_reason,
        token_ids=token_ids if fields.return_token_ids else UNSET,
        prompt_token_ids=output.prompt_token_ids if fields.return_token_ids and first else UNSET,
        weight_version=output.weight_version or UNSET,
    )


async def answer_events(
    answer: Answer, outputs: AsyncGenerator[tuple[int, RequestOutput], None]
) -> AsyncGenerator[bytes, None]:
    """Yield a streamed answer as server-sent events, encoded as bytes."""
    options = answer.fields.stream_options
    continuous = options is not None and options.shows_usage_so_far
    usage = UsageCounter()
    # All completions begin with the prompt's log-probabilities, so they wait until these are complete.
    shows_prompt = bool(answer.fields.echo) and answer.fields.logprobs is not None
    waiting: dict[int, list[CompletionOutput]] = {}
    places: dict[tuple[int, int], _Place] = {}
    of_prompts: dict[int, list[dict[int, Logprob] | None]] = {}
    echoed: dict[int, tuple[CompletionLogprobs, int] | None] = {}
    async with aclosing(outputs):
        async for prompt, output in outputs:
            usage.add(prompt, output)
            of_prompt = of_prompts.setdefault(prompt, [])
            of_prompt += output.prompt_logprobs or ()
            waiting[prompt] = waiting.get(prompt, []) + output.outputs
            if shows_prompt and len(of_prompt) < len(output.prompt_token_ids) and not output.finished:
                continue
            if prompt not in echoed:
                echoed[prompt] = answer.echoed_logprobs(output, of_prompt)
            for completion in waiting.pop(prompt):
                place = places.setdefault((prompt, completion.index), _Place())
                choice = _part(answer, prompt, output, completion, place, echoed[prompt])
                if choice.text or choice.finish_reason or choice.logprobs or choice.token_ids:
                    yield event(answer.response([choice], usage.usage() if continuous else UNSET))
    if options is not None and options.include_usage:
        yield event(answer.response([], usage.usage(len(places) if answer.unwanted else 0)))

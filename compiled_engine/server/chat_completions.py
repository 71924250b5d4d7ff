"""/v1/chat/completions: the endpoint, complete answers and event streams."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from msgspec import UNSET, UnsetType
from starlette.requests import Request

from compiled_engine.frontend.outputs import CompletionOutput, RequestOutput
from compiled_engine.frontend.request_stream import OutputKind
from compiled_engine.server.cache_salt import cache_salt
from compiled_engine.server.chat_prompt import ChatPrompt, chat_prompt
from compiled_engine.server.generation import Outputs, begun, generate
from compiled_engine.server.logprob_shapes import ChatLogprobs, chat_logprobs, prompt_logprobs
from compiled_engine.server.parsers.answer import AnswerParser, joined
from compiled_engine.server.parsers.call_object import is_whole
from compiled_engine.server.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from compiled_engine.server.protocol import (
    AnswerMessage,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatRequest,
    ChatResponse,
    ChunkChoice,
    Delta,
    ToolCall,
    Usage,
    UsageCounter,
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
from compiled_engine.server.serving import serving_of


async def chat_completions(request: Request) -> Reply:
    """Handle POST /v1/chat/completions."""
    serving = serving_of(request)
    fields, ignored = await read_body(request, serving, ChatRequest)
    model = serving.model(fields.model)
    prompt = await unless_gone(request.receive, chat_prompt(serving, fields))
    answer = Answer(f"chatcmpl-{uuid.uuid4().hex}", serving.now(), model, fields, prompt)
    kind: OutputKind = "delta" if fields.streams else "final"
    salt = cache_salt(request, fields)
    outputs = generate(serving, [prompt.prompt], prompt.params, kind, fields.priority or 0, "messages", salt, model)
    if fields.streams:
        return EventStream(with_errors(answer_events(answer, await begun(outputs))), warned(ignored))
    return json_response(await unless_gone(request.receive, whole_answer(answer, outputs)), ignored)


@dataclass(frozen=True)
class Answer:
    """The values that all parts of a request's answer share: id, time, model, and the request itself."""

    id: str
    created: int
    model: str
    fields: ChatRequest
    prompt: ChatPrompt

    def logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if not self.fields.logprobs or not completion.logprobs:
            return None
        as_ids = bool(self.fields.return_tokens_as_token_ids)
        return chat_logprobs(completion.logprobs, self.fields.top_logprobs or 0, as_ids=as_ids)

    def shown(self, pieces: list[Piece]) -> list[Piece]:
        """Return the pieces without reasoning if the request excludes it, otherwise all."""
        if self.fields.include_reasoning is False:
            return [piece for piece in pieces if not isinstance(piece, Reasoning)]
        return pieces

    def chunk(self, choices: list[ChunkChoice], usage: Usage | UnsetType = UNSET) -> ChatChunk:
        return ChatChunk(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)


def finish_reason(completion: CompletionOutput, last_arguments: str | None) -> str | None:
    """Return a completion's finish reason in the chat API's terms.

    `last_arguments` has the arguments of the last tool call, or is None if there are no calls. A stop string or an
    end-of-sequence token can cut off a call. Such a call cannot be executed, so the reason is then "stop".
    """
    called = last_arguments is not None and is_whole(last_arguments)
    return "tool_calls" if called and completion.finish_reason == "stop" else completion.finish_reason


async def whole_answer(answer: Answer, outputs: Outputs) -> ChatResponse:
    """Wait for all outputs. Return the response with all completions."""
    usage = UsageCounter()
    async with aclosing(outputs):
        async for _, last in outputs:
            usage.add(0, last)
            output = last
    fields = answer.fields
    return ChatResponse(
        id=answer.id,
        created=answer.created,
        model=answer.model,
        choices=[_choice(answer, completion) for completion in output.outputs],
        usage=usage.usage(),
        prompt_logprobs=None if output.prompt_logprobs is None else prompt_logprobs(output.prompt_logprobs),
        prompt_token_ids=output.prompt_token_ids if fields.return_token_ids else None,
        weight_version=output.weight_version or UNSET,
    )


def _choice(answer: Answer, completion: CompletionOutput) -> ChatChoice:
    parser = answer.prompt.make_parser()
    pieces = answer.shown(joined(parser.push(completion.text) + parser.finish()))
    message = message_of(pieces, answer.prompt.make_call_id)
    last = message.tool_calls[-1].function.arguments if message.tool_calls else None
    return ChatChoice(
        index=completion.index,
        message=message,
        logprobs=answer.logprobs(completion),
        finish_reason=finish_reason(completion, last),
        stop_reason=completion.stop_reason,
        token_ids=completion.token_ids if answer.fields.return_token_ids else None,
    )


def message_of(pieces: list[Piece], make_call_id: Callable[[], str]) -> AnswerMessage:
    """Return the message that all pieces of an answer make up.

    `make_call_id` creates the id of a tool call whose piece has none.
    """
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)) or None
    calls: list[ToolCall] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            function = CalledFunction(name=piece.name, arguments="")
            calls.append(ToolCall(id=piece.id or make_call_id(), type="function", function=function))
        elif isinstance(piece, CallArguments):
            calls[piece.index].function.arguments += piece.text
    return AnswerMessage(
        content=None if calls and not content else content,
        reasoning_content=reasoning,
        reasoning=reasoning,
        tool_calls=calls or UNSET,
    )


class _Part:
    """The state of one streamed completion: its parser, and the arguments of its last tool call so far."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._parser: AnswerParser = answer.prompt.make_parser()
        self._last_arguments: str | None = None  # of the last call

    def choices(self, completion: CompletionOutput) -> list[ChunkChoice]:
        """Return the choices of the next events: one for each piece of the output, and one for the completion's end.

        completion: the new text and tokens since the last call.
        """
        pieces = self._parser.push(completion.text)
        if completion.finish_reason is not None:
            pieces += self._parser.finish()
        deltas = [self._delta(piece) for piece in self._answer.shown(joined(pieces))]
        logprobs = self._answer.logprobs(completion)
        token_ids = completion.token_ids if self._answer.fields.return_token_ids and completion.token_ids else UNSET
        if not deltas and (logprobs is not None or token_ids is not UNSET):
            deltas.append(Delta(content=""))
        choices = [ChunkChoice(index=completion.index, delta=delta) for delta in deltas]
        if choices:
            choices[0].logprobs, choices[0].token_ids = logprobs, token_ids
        if completion.finish_reason is not None:
            reason = finish_reason(completion, self._last_arguments)
            choices.append(
                ChunkChoice(
                    index=completion.index, delta=Delta(), finish_reason=reason, stop_reason=completion.stop_reason
                )
            )
        return choices

    def _delta(self, piece: Piece) -> Delta:
        match piece:
            case Content(text):
                return Delta(content=text)
            case Reasoning(text):
                return Delta(reasoning_content=text, reasoning=text)
            case CallStart(index, name, call_id):
                self._last_arguments = ""
                function = CalledFunction(name=name, arguments="")
                call_id = call_id or self._answer.prompt.make_call_id()
                return Delta(tool_calls=[ToolCall(index=index, id=call_id, type="function", function=function)])
            case CallArguments(index, text):
                self._last_arguments = (self._last_arguments or "") + text
                return Delta(tool_calls=[ToolCall(index=index, function=CalledFunction(arguments=text))])


async def answer_events(
    answer: Answer, outputs: AsyncGenerator[tuple[int, RequestOutput], None]
) -> AsyncGenerator[bytes, None]:
    """Yield a streamed answer as server-sent events, encoded as bytes."""
    options = answer.fields.stream_options
    continuous = options is not None and options.shows_usage_so_far
    usage = UsageCounter()
    usage.begin(0, len(answer.prompt.prompt["prompt_token_ids"]))
    parts = [_Part(answer) for _ in range(answer.prompt.params.n)]
    async with aclosing(outputs):
        for index in range(len(parts)):
            first = ChunkChoice(index=index, delta=Delta(role="assistant", content=""))
            begin = answer.chunk([first], usage.usage() if continuous else UNSET)
            if answer.fields.return_token_ids:
                begin.prompt_token_ids = list(answer.prompt.prompt["prompt_token_ids"])
            yield event(begin)
        async for prompt, output in outputs:
            usage.add(prompt, output)
            so_far = usage.usage() if continuous else UNSET
            for completion in output.outputs:
                for choice in parts[completion.index].choices(completion):
                    yield event(answer.chunk([choice], so_far))
    if options is not None and options.include_usage:
        yield event(answer.chunk([], usage.usage()))

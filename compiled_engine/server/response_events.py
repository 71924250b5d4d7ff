"""A response as it grows: each piece of the answer makes events, and all of them make the whole."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from compiled_engine.server.logprob_shapes import TokenLogprob
from compiled_engine.server.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from compiled_engine.server.responses_protocol import (
    FunctionCallItem,
    IncompleteDetails,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseObject,
    ResponseUsage,
)

Event = dict[str, Any]


class ResponseEvents:
    """response: what there is so far. One item is open at a time: the next kind of piece closes it."""

    def __init__(self, response: ResponseObject, make_call_id: Callable[[], str]) -> None:
        self.response = response
        self._make_call_id = make_call_id
        self._number = 0
        self._open: Item | None = None

    def begin(self) -> Iterator[Event]:
        yield self._event("response.created", response=self.response)
        yield self._event("response.in_progress", response=self.response)

    def piece(self, piece: Piece, logprobs: Sequence[TokenLogprob]) -> Iterator[Event]:
        """The events of a piece; `logprobs` are those of text."""
        match piece:
            case Content(text):
                if not isinstance(self._open, MessageItem):
                    item = MessageItem(id=new_id("msg"), status="in_progress", content=[])
                    yield from self._add(item)
                    item.content.append(OutputText(text="", annotations=[], logprobs=[]))
                    yield self._part("response.content_part.added", part=item.content[0])
                yield from self._add_text(text, logprobs)
            case Reasoning(text):
                if not isinstance(self._open, ReasoningItem):
                    reasoning = ReasoningItem(id=new_id("rs"), status="in_progress", content=[])
                    yield from self._add(reasoning)
                    reasoning.content.append(ReasoningText(text=""))
                assert isinstance(self._open, ReasoningItem)
                self._open.content[0].text += text
                yield self._part("response.reasoning_text.delta", delta=text)
            case CallStart(_, name):
                call = FunctionCallItem(
                    id=new_id("fc"), status="in_progress", call_id=self._make_call_id(), name=name, arguments=""
                )
                yield from self._add(call)
            case CallArguments(_, text):
                assert isinstance(self._open, FunctionCallItem)
                self._open.arguments += text
                yield self._of_item("response.function_call_arguments.delta", delta=text)

    def end(self, usage: ResponseUsage, finish_reason: str | None) -> Iterator[Event]:
        """The last events."""
        cut = finish_reason == "length"
        yield from self._close("incomplete" if cut else "completed")
        self.response.usage = usage
        self.response.status = "incomplete" if cut else "completed"
        if cut:
            self.response.incomplete_details = IncompleteDetails("max_output_tokens")
        yield self._event(f"response.{self.response.status}", response=self.response)

    def fail(self, code: str, message: str) -> Event:
        """The last event of a response that came to nothing."""
        self.response.status = "failed"
        self.response.error = ResponseError(code, message)
        return self._event("response.failed", response=self.response)

    def _add_text(self, text: str, logprobs: Sequence[TokenLogprob]) -> Iterator[Event]:
        assert isinstance(self._open, MessageItem)
        part, new = self._open.content[0], list(logprobs)
        part.text += text
        part.logprobs += new
        yield self._part("response.output_text.delta", delta=text, logprobs=new)

    def _add(self, item: Item) -> Iterator[Event]:
        yield from self._close("completed")
        self._open = item
        self.response.output.append(item)
        yield self._event("response.output_item.added", output_index=self._index, item=item)

    def _close(self, status: Any) -> Iterator[Event]:
        item = self._open
        if item is None:
            return
        item.status = status
        if isinstance(item, MessageItem):
            part = item.content[0]
            yield self._part("response.output_text.done", text=part.text, logprobs=part.logprobs)
            yield self._part("response.content_part.done", part=part)
        elif isinstance(item, ReasoningItem):
            yield self._part("response.reasoning_text.done", text=item.content[0].text)
        else:
            yield self._of_item("response.function_call_arguments.done", name=item.name, arguments=item.arguments)
        yield self._event("response.output_item.done", output_index=self._index, item=item)
        self._open = None

    @property
    def _index(self) -> int:
        return len(self.response.output) - 1

    def _event(self, kind: str, **values: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **values}

    def _of_item(self, kind: str, **values: Any) -> Event:
        assert self._open is not None
        return self._event(kind, item_id=self._open.id, output_index=self._index, **values)

    def _part(self, kind: str, **values: Any) -> Event:
        return self._of_item(kind, content_index=0, **values)


def new_id(kind: str) -> str:
    """Of a response or an item."""
    return f"{kind}_{uuid.uuid4().hex}"

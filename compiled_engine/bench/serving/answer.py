"""Reads a streamed answer: when its parts came, how many tokens it has, and whether it is whole."""

from __future__ import annotations

from typing import Any

import msgspec

KEPT_TEXT = 300


class Record(msgspec.Struct):
    """What became of a request. Times are seconds from the start of the run; those of a request that was not sent are
    None.

    due: when it was to be sent. sent: when it was. chunk_times: of the parts of the answer that carry output. end: of
    its last byte. output_tokens: as `counted_by` says it: usage (the server's own count), token_ids, or chunks, where
    the server counts nothing. error: the kind of failure, for counting; message: the first one's words.
    """

    index: int
    due: float
    sent: float | None = None
    end: float | None = None
    chunk_times: list[float] = []
    prompt_tokens: int | None = None
    output_tokens: int = 0
    counted_by: str = "chunks"
    error: str | None = None
    message: str | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None

    def carries_output(self) -> bool:
        delta = self.delta
        return bool(
            self.text
            or self.token_ids
            or (delta and (delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls))
        )


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class AnswerReader:
    """Takes the body of one answer, in any pieces, and fills in its record. start: of the run, monotonic."""

    def __init__(self, record: Record, start: float) -> None:
        self._record = record
        self._start = start
        self._rest = b""
        self._decode = msgspec.json.Decoder(_Chunk).decode
        self._beginning = b""
        self._is_done = False
        self._num_ids = 0
        self._all_have_ids = True

    def feed(self, data: bytes, now: float) -> None:
        """A piece that came at `now`."""
        if len(self._beginning) < KEPT_TEXT:
            self._beginning += data[:KEPT_TEXT]
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now)

    def finish(self, status: int, now: float) -> None:
        """The answer is over."""
        record = self._record
        record.end = now - self._start
        if status != 200:
            self.fail(f"HTTP {status}", self._beginning.decode(errors="replace"))
        elif record.error is None and not self._is_done:
            self.fail("incomplete stream", "the answer ended without [DONE]")
        elif record.error is None and not record.chunk_times:
            self.fail("no output", "the answer has no text and no token")
        if record.counted_by != "usage":
            record.counted_by = "token_ids" if self._all_have_ids and self._num_ids else "chunks"
            record.output_tokens = self._num_ids if record.counted_by == "token_ids" else len(record.chunk_times)

    def fail(self, kind: str, message: str) -> None:
        """The first failure counts."""
        if self._record.error is None:
            self._record.error, self._record.message = kind, message[:KEPT_TEXT]

    def _take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            chunk = self._decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.fail("malformed event", f"{error}: {data[:100].decode(errors='replace')}")
            return
        record = self._record
        if chunk.error is not None:
            self.fail("error event", str(chunk.error))
        output = [choice for choice in chunk.choices if choice.carries_output()]
        if output:
            record.chunk_times.append(now - self._start)
            ids = [choice.token_ids for choice in output]
            self._all_have_ids = self._all_have_ids and None not in ids
            self._num_ids += sum(len(each) for each in ids if each is not None)
        if chunk.usage is not None and chunk.usage.completion_tokens is not None:
            record.output_tokens, record.counted_by = chunk.usage.completion_tokens, "usage"
            record.prompt_tokens = chunk.usage.prompt_tokens

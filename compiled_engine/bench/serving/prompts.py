"""What a load test sends: random prompts of drawn lengths, or the lines of a JSONL file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from compiled_engine.bench.serving.lengths import Lengths

Endpoint = Literal["completions", "chat"]
# Short words, each of which is a token of its own in most vocabularies; for endpoints that take text alone.
WORDS = (
    *("the", "of", "and", "to", "in", "is", "it", "you", "that", "he", "was", "for", "on", "are", "with", "as", "his"),
    *("they", "at", "be", "this", "have", "from", "or", "one", "had", "by", "word", "but", "not", "what", "all"),
    *("were", "we", "when", "your", "can", "said", "there", "use", "an", "each", "which", "she", "do", "how", "their"),
    *("if", "will", "up", "other", "about", "out", "many", "then", "them", "these", "so", "some", "her", "would"),
    *("make", "like", "him", "into", "time", "has", "look", "two", "more", "write", "go", "see", "number", "no", "way"),
    *("could", "people", "my", "than", "first", "water", "been", "call", "who", "oil", "its", "now", "find", "long"),
    *("down", "day", "did", "get", "come", "made", "may", "part"),
)


class PlannedRequest(msgspec.Struct, frozen=True):
    """prompt: token ids or text, or the messages of a conversation. output_len: tokens to ask for."""

    prompt: Any
    output_len: int


@dataclass(frozen=True)
class RandomPrompts:
    """input_len: tokens of each prompt's own part. shared_prefix: tokens that come before it, which `num_prefixes`
    groups of requests have in common. vocab_size: token ids are below it.

    Chats get words of text instead of ids: about a token each, and how many exactly is for the server to say.
    """

    input_len: Lengths
    output_len: Lengths
    shared_prefix: int
    num_prefixes: int
    vocab_size: int

    def requests(self, endpoint: Endpoint, count: int, generator: np.random.Generator) -> list[PlannedRequest]:
        """`count` requests; others with each state of the generator."""
        own, outputs = self.input_len.draw(generator, count), self.output_len.draw(generator, count)
        prefixes = [self._ids(endpoint, self.shared_prefix, generator) for _ in range(self.num_prefixes)]
        requests = []
        for index, (length, output_len) in enumerate(zip(own, outputs, strict=True)):
            ids = prefixes[index % self.num_prefixes] + self._ids(endpoint, length, generator)
            prompt: Any = ids if endpoint == "completions" else [_message(" ".join(WORDS[each] for each in ids))]
            requests.append(PlannedRequest(prompt, output_len))
        return requests

    def _ids(self, endpoint: Endpoint, length: int, generator: np.random.Generator) -> list[int]:
        """Token ids, or places in WORDS."""
        most = self.vocab_size if endpoint == "completions" else len(WORDS)
        return [int(each) for each in generator.integers(0, most, length)]


class Line(msgspec.Struct, forbid_unknown_fields=False):
    """A line of a dataset; the last three are names of the same thing."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    output_len: int | None = None
    output_tokens: int | None = None
    max_tokens: int | None = None


def read_dataset(
    path: Path, endpoint: Endpoint, count: int | None, output_len: Lengths, generator: np.random.Generator
) -> list[PlannedRequest]:
    """The first `count` lines, or all; fewer lines are used again from the first. output_len: of lines without one.

    Raises ValueError naming the file and the line.
    """
    if not path.is_file():
        raise ValueError(f"dataset is {str(path)!r}; allowed: a file with a JSON object a line")
    decoder = msgspec.json.Decoder(Line)
    lines = []
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        if text.strip():
            lines.append(_read_line(f"dataset is {str(path)!r}, line {number}", text, decoder, endpoint))
    if not lines:
        raise ValueError(f"dataset is {str(path)!r}, which is empty")
    count = len(lines) if count is None else count
    drawn = output_len.draw(generator, count)
    chosen = [lines[index % len(lines)] for index in range(count)]
    return [PlannedRequest(prompt, own or length) for (prompt, own), length in zip(chosen, drawn, strict=True)]


def _read_line(
    where: str, text: bytes, decoder: msgspec.json.Decoder[Line], endpoint: Endpoint
) -> tuple[Any, int | None]:
    """The prompt as this endpoint takes it, and the output length if there is one."""
    try:
        line = decoder.decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(f"{where}: {error}") from None
    length = next((each for each in (line.output_len, line.output_tokens, line.max_tokens) if each is not None), None)
    if length is not None and length < 1:
        raise ValueError(f"{where}: the output length is {length}; allowed: from 1")
    if endpoint == "completions":
        if not line.prompt:
            raise ValueError(f"{where} has no prompt; allowed: text or token ids as 'prompt'")
        return line.prompt, length
    if line.messages:
        return line.messages, length
    if not isinstance(line.prompt, str) or not line.prompt:
        raise ValueError(f"{where}: a chat needs 'messages', or text as 'prompt'")
    return [_message(line.prompt)], length


def _message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def longest(requests: Sequence[PlannedRequest]) -> int:
    """Tokens of the longest request that is given as token ids, prompt and output together; 0 if none is."""
    return max((len(each.prompt) + each.output_len for each in requests if _is_ids(each.prompt)), default=0)


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)

"""Make the requests of a load test, and the times at which they are due.

Prompts are random with random lengths, or the lines of a JSONL file. Requests arrive in a gamma process with a constant
or ramping rate. Burstiness is the shape of the gamma distribution of the gaps between requests: 1 is a Poisson process,
smaller is burstier, larger is more even. Gaps of a constant rate are scaled so that a run has exactly this rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

FORMS = {
    "uniform": "uniform:LEAST:MOST",
    "normal": "normal:MEAN:DEVIATION:LEAST:MOST",
    "lognormal": "lognormal:MEDIAN:SIGMA:LEAST:MOST",
}
ALLOWED = f"a number of tokens, or {', '.join(FORMS.values())}"


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens. Drawn lengths are clipped to the range from `least` to `most`."""

    text: str
    kind: str  # "fixed", or a key of FORMS
    least: int
    most: int
    centre: float = 0.0  # mean of a normal, median of a lognormal distribution
    spread: float = 0.0  # standard deviation of a normal, sigma (natural logarithm) of a lognormal distribution

    def draw(self, generator: np.random.Generator, count: int) -> list[int]:
        """Return `count` lengths drawn from the distribution."""
        if self.kind == "uniform":
            drawn = generator.integers(self.least, self.most, count, endpoint=True).astype(float)
        elif self.kind == "normal":
            drawn = generator.normal(self.centre, self.spread, count)
        elif self.kind == "lognormal":
            drawn = generator.lognormal(math.log(self.centre), self.spread, count)
        else:
            drawn = np.full(count, self.least, float)
        return [int(length) for length in np.clip(np.rint(drawn), self.least, self.most)]


def parse_lengths(name: str, text: str) -> Lengths:
    """Parse a number of tokens, or a distribution such as uniform:128:1024 (see FORMS).

    Raises ValueError, which names the option `name`.
    """
    kind, _, rest = text.partition(":")
    error = ValueError(f"{name} is {text!r}; allowed: {ALLOWED}, with LEAST from 1 and at most MOST")
    try:
        if kind not in FORMS:
            return Lengths(text, "fixed", *_range(int(text), int(text)))
        numbers = rest.split(":")
        if len(numbers) != FORMS[kind].count(":"):
            raise error
        *shape, least, most = numbers
        return Lengths(text, kind, *_range(int(least), int(most)), *_shape(kind, [float(number) for number in shape]))
    except ValueError:
        raise error from None


def _range(least: int, most: int) -> tuple[int, int]:
    if not 1 <= least <= most:
        raise ValueError
    return least, most


def _shape(kind: str, numbers: Sequence[float]) -> Sequence[float]:
    if numbers and (
        not all(map(math.isfinite, numbers)) or numbers[1] < 0 or (kind == "lognormal" and numbers[0] <= 0)
    ):
        raise ValueError
    return numbers


Endpoint = Literal["completions", "chat"]
# Short words, each a single token in most vocabularies, for endpoints that only take text.
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
    """A request of a load test: its prompt, and how many tokens it asks for."""

    prompt: Any  # token ids, text, or messages
    output_len: int  # tokens to request


@dataclass(frozen=True)
class RandomPrompts:
    """A distribution of random prompts: token ids for completions, and words for chats.

    A word has about one token; the server reports the exact number.
    """

    input_len: Lengths  # tokens of each prompt's own part
    output_len: Lengths
    shared_prefix: int  # tokens before it, shared within each of `num_prefixes` groups
    num_prefixes: int
    vocab_size: int  # upper bound of token ids, exclusive

    def requests(self, endpoint: Endpoint, count: int, generator: np.random.Generator) -> list[PlannedRequest]:
        """Return `count` requests with random prompts and lengths, drawn with the generator."""
        own, outputs = self.input_len.draw(generator, count), self.output_len.draw(generator, count)
        prefixes = [self._ids(endpoint, self.shared_prefix, generator) for _ in range(self.num_prefixes)]
        requests = []
        for index, (length, output_len) in enumerate(zip(own, outputs, strict=True)):
            ids = prefixes[index % self.num_prefixes] + self._ids(endpoint, length, generator)
            prompt: Any = ids if endpoint == "completions" else [_message(" ".join(WORDS[each] for each in ids))]
            requests.append(PlannedRequest(prompt, output_len))
        return requests

    def _ids(self, endpoint: Endpoint, length: int, generator: np.random.Generator) -> list[int]:
        """Return random token ids; for chats, random indices into WORDS."""
        most = self.vocab_size if endpoint == "completions" else len(WORDS)
        return [int(each) for each in generator.integers(0, most, length)]


class Line(msgspec.Struct, forbid_unknown_fields=False):
    """A line of a dataset. The last three fields all mean the output length; the first one that is given counts."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    output_len: int | None = None
    output_tokens: int | None = None
    max_tokens: int | None = None


def read_dataset(
    path: Path, endpoint: Endpoint, count: int | None, output_len: Lengths, generator: np.random.Generator
) -> list[PlannedRequest]:
    """Return `count` requests from the first lines of a file, or a request for each line if count is None.

    If the file has fewer lines, they repeat. output_len: for lines without an output length. Raises ValueError with the
    file and the line.
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
    """Return (prompt in the form that the endpoint takes, output length or None if the line has none).

    where: the file and line, for errors. Raises ValueError for an invalid line.
    """
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
    """Return the tokens (prompt and output) of the longest request whose prompt is token ids; 0 if there is none."""
    return max((len(each.prompt) + each.output_len for each in requests if _is_ids(each.prompt)), default=0)


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)


ALLOWED_RATE = "a number of requests per second above 0, inf, or a share such as 70% of what an earlier inf completed"
ALLOWED_RAMP = "START:END in requests per second, or exponential:START:END"


@dataclass(frozen=True)
class Rate:
    """A constant rate of requests: in requests per second, inf for all at once, or as a share of a measured rate."""

    value: float
    is_share: bool = False  # `value` is a share of the requests per second that an earlier run at inf completed

    def __str__(self) -> str:
        return f"{100 * self.value:g}%" if self.is_share else f"{self.value:g}"


@dataclass(frozen=True)
class Ramp:
    """A rate that changes from `start` to `end` requests per second, linearly or exponentially."""

    start: float
    end: float
    is_exponential: bool

    def rate_at(self, place: float) -> float:
        """Return the rate at `place`, from 0 for the first request to 1 for the last."""
        if self.is_exponential:
            return self.start * (self.end / self.start) ** place
        return self.start + (self.end - self.start) * place

    def __str__(self) -> str:
        return f"{'exponential:' * self.is_exponential}{self.start:g}:{self.end:g}"


def parse_rates(texts: Sequence[str]) -> list[Rate]:
    """Parse rates. Each text has one rate, or several separated by commas. Raises ValueError for invalid rates.

    A share is only valid after a rate of inf.
    """
    rates = [_parse_rate(part.strip()) for text in texts for part in text.split(",")]
    for place, rate in enumerate(rates):
        if rate.is_share and not any(math.isinf(earlier.value) for earlier in rates[:place]):
            raise ValueError(f"request_rate is {rate}, a share; allowed: after a rate of inf, such as inf,{rate}")
    return rates


def parse_ramp(text: str) -> Ramp:
    """Parse a ramp such as 1:10 or exponential:1:10, in requests per second. Raises ValueError for any other text."""
    kind, *numbers = text.split(":") if text.startswith("exponential:") else ("linear", *text.split(":"))
    try:
        start, end = (_positive(number) for number in numbers)
    except ValueError:
        raise ValueError(f"ramp is {text!r}; allowed: {ALLOWED_RAMP}") from None
    return Ramp(start, end, kind == "exponential")


def arrival_times(
    count: int, rate: float, burstiness: float, ramp: Ramp | None, generator: np.random.Generator
) -> list[float]:
    """Return when each request is due, in seconds after the first request.

    rate: requests per second; inf: all at once. ramp: takes the place of `rate` unless None. burstiness: see the
    module.
    """
    if ramp is None and math.isinf(rate):
        return [0.0] * count
    places = np.arange(1, count) / max(count - 1, 1)
    rates = np.array([rate if ramp is None else ramp.rate_at(place) for place in places])
    gaps = generator.gamma(burstiness, 1 / burstiness, count - 1) / rates
    times = np.concatenate([[0.0], np.cumsum(gaps)])
    if ramp is None and times[-1] > 0:
        times *= (count - 1) / rate / times[-1]
    return [float(time) for time in times]


def _parse_rate(text: str) -> Rate:
    try:
        is_share = text.endswith("%")
        value = _positive(text.removesuffix("%"), finite=is_share)
    except ValueError:
        raise ValueError(f"request_rate is {text!r}; allowed: {ALLOWED_RATE}") from None
    return Rate(value / 100 if is_share else value, is_share)


def _positive(text: str, *, finite: bool = True) -> float:
    value = float(text)
    if not value > 0 or (finite and math.isinf(value)):
        raise ValueError
    return value

"""Convert texts to pooling requests for the engine. The texts of a call are tokenised together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from compiled_engine.engine.messages import ROOT, EngineRequest, RequestLimits, prefix_root
from compiled_engine.features.pooling import extras as pooling_extras
from compiled_engine.features.pooling.frontend.outputs import ScoringOutput, ScoringRequestOutput
from compiled_engine.features.pooling.frontend.running import RunningPooling, finished_rows, result_of_each
from compiled_engine.features.pooling.frontend.task import PoolingParams, PoolingTask
from compiled_engine.frontend.input_processor import check_token_ids, checked_priorities, require_unicode
from compiled_engine.frontend.prepared_request import PreparedRequest
from compiled_engine.frontend.prompts import Prompt, PromptLike, check_salt, num_characters, parse_prompts
from compiled_engine.frontend.request_hooks import NO_PART, RequestFeature, RequestPart, parts_of_all
from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.frontend.tokenizer_backend import HUGE_TEXT, LONG_TEXT, Pair
from compiled_engine.pooling import EMBED, Pooling
from compiled_engine.process.memory import return_free_memory
from compiled_engine.process.smallest_first import Stopped, WorkStopped, never
from compiled_engine.sampling.params import SamplingParams

if TYPE_CHECKING:
    from compiled_engine.config import ModelConfig
    from compiled_engine.frontend.input_processor import InputProcessor

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

# Characters tokenised at a time, unless a single text has more. Each takes about a hundred bytes meanwhile.
CHARACTERS_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class PoolingBounds:
    """Upper bounds on one call; None for no bound."""

    seconds: float | None = None  # for tokenising its texts, including the wait for other calls
    values: int | None = None  # of all results together
    characters: int | None = None  # of all pairs together, each counted with its query and instruction


UNBOUNDED = PoolingBounds()


@dataclass(frozen=True)
class Scoring:
    """Holds the requests that score pairs of texts, and computes the scores from their results."""

    requests: list[PreparedRequest]
    # Pairs of request indices whose embeddings are compared; None if each request scores one pair itself.
    compared: list[tuple[int, int]] | None

    def scores(self, ended: Sequence[RunningPooling]) -> list[ScoringRequestOutput]:
        """Return the score of each pair: the model's, or the cosine similarity of the pair's embeddings.

        `ended` are the ended `requests`, in the same order. Raises RuntimeError if a request has no result.
        """
        rows_ML = finished_rows(ended)
        if self.compared is None:
            return result_of_each(ScoringRequestOutput, ScoringOutput, ended, rows_ML[:, 0].tolist())
        return [_cosine(ended[i], ended[j], rows_ML[i], rows_ML[j]) for i, j in self.compared]


def _cosine(first: RunningPooling, second: RunningPooling, a: np.ndarray, b: np.ndarray) -> ScoringRequestOutput:
    score = float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-8))
    both = [*first.request.prompt_token_ids, *second.request.prompt_token_ids]
    cached = (first.num_cached_tokens or 0) + (second.num_cached_tokens or 0)
    return ScoringRequestOutput(second.request_id, ScoringOutput(score), both, True, cached)


class PoolingProcessor:
    """Checks and tokenises texts for pooling requests. Request ids begin with `id_prefix`."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: RequestLimits,
        pooling: Pooling,
        hidden_size: int,
        id_prefix: str = "",
        features: Sequence[RequestFeature] = (),
    ) -> None:
        self._tokenizer, self._limits, self.pooling, self._hidden_size = tokenizer, limits, pooling, hidden_size
        self._features = features
        self._id_prefix, self._numbers = id_prefix, itertools.count()
        self._width = pooling.width(hidden_size)

    def process(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: PoolingParams | None = None,
        task: str | None = None,
        prompt_name: str | None = None,
        priority: int = 0,
        bounds: PoolingBounds = UNBOUNDED,
        is_stopped: Stopped = never,
        **given: Any,
    ) -> list[PreparedRequest]:
        """Return a request for each prompt.

        `task` defaults to that of `params`, or the model's. `prompt_name` selects one of the checkpoint's prompts,
        which is put before each text. `is_stopped` is polled between parts of the work. `given` has arguments that only
        other features read, such as lora_request.

        Raises TypeError or ValueError with the field, its value and what is allowed; WorkStopped if stopped.
        """
        wanted = self._task(params, task)
        (priority,) = checked_priorities(priority, 1, self._limits)
        parsed = parse_prompts(prompts)
        for each in parsed:
            if each.data:
                raise ValueError(
                    f"{each.part_name(next(iter(each.data)))} must be absent: a model that pools takes only text"
                )
        parts = parts_of_all(self._features, [_one_step()] * len(parsed), given)
        prepared = self._process(parsed, wanted, prompt_name, priority, is_stopped, parts)
        results = sum(len(each.prompt_token_ids) for each in prepared) if wanted.by_token else len(prepared)
        if bounds.values is not None and results * self._width > bounds.values:
            what = "tokens" if wanted.by_token else "texts"
            raise ValueError(
                f"prompts must have at most {bounds.values // self._width} {what} in all, as each has a result of "
                f"{self._width} values, got {results}"
            )
        return prepared

    def _process(
        self,
        parsed: Sequence[Prompt],
        wanted: PoolingTask,
        prompt_name: str | None,
        priority: int,
        is_stopped: Stopped,
        parts: Sequence[RequestPart],
    ) -> list[PreparedRequest]:
        before, most = self._before(prompt_name), self._most(wanted.params)
        texts = [before + (each.text or "") for each in parsed if each.token_ids is None]
        if self.pooling.lower_case:
            texts = [text.lower() for text in texts]
        names = (each.name for each in parsed if each.token_ids is None)
        for name, text in zip(names, texts, strict=True):
            self._check_text(name, text, wanted.params)
        encoded = map(tuple, self._encoded(texts, wanted.params, is_stopped))
        token_ids = [next(encoded) if each.token_ids is None else each.token_ids[:most] for each in parsed]
        return self._prepare(parsed, token_ids, wanted, priority, parts)

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        params: PoolingParams | None = None,
        instruction: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        bounds: PoolingBounds = UNBOUNDED,
        is_stopped: Stopped = never,
        **given: Any,
    ) -> Scoring:
        """Return requests that score pairs of texts: one query with each document, or each query with its own document.

        `instruction` is for rerankers with a template. `given` applies to all texts and is explained at `process`.
        Raises the errors of `process`, and ValueError for a classifier with several labels or a task with per-token
        results.
        """
        wanted = self._task(params, None)
        if wanted.by_token:
            raise ValueError(f"task is {wanted.name!r}, but a score is of a whole text; allowed: {self.pooling.task}")
        firsts = _texts("queries", queries)
        seconds = _texts("documents", documents)
        if len(firsts) not in (1, len(seconds)):
            raise ValueError(f"queries must be one, or one for each of the {len(seconds)} documents, got {len(firsts)}")
        if instruction is not None and not self.pooling.template:
            raise ValueError(f"instruction must be None, as the model has no template, got {instruction!r}")
        characters = (len(seconds) if len(firsts) == 1 else 1) * sum(map(len, firsts)) + sum(map(len, seconds))
        characters += len(seconds) * len(instruction or "")
        if bounds.characters is not None and characters > bounds.characters:
            raise ValueError(
                f"documents must have at most {bounds.characters} characters in all, each counted with its query and "
                f"instruction, got {characters}"
            )
        (priority,) = checked_priorities(priority, 1, self._limits)
        if cache_salt is not None:
            check_salt("cache_salt", cache_salt)
        (part,) = parts_of_all(self._features, [_one_step()], given)
        if self.pooling.task == EMBED:
            named = [("queries", firsts), ("documents", seconds)]
            prompts = [
                Prompt(f"{name}[{i}]", text, None, cache_salt) for name, texts in named for i, text in enumerate(texts)
            ]
            requests = self._process(prompts, wanted, None, priority, is_stopped, [part] * len(prompts))
            first = itertools.repeat(0) if len(firsts) == 1 else itertools.count()
            return Scoring(requests, [(i, len(firsts) + j) for i, j in zip(first, range(len(seconds)), strict=False)])
        if self.pooling.num_labels != 1:
            raise ValueError(f"score needs a classifier with one label, and the model has {self.pooling.num_labels}")
        for name, texts in (("queries", firsts), ("documents", seconds)):
            for i, text in enumerate(texts):
                self._check_text(f"{name}[{i}]", text, wanted.params)
        most = self._most(wanted.params)
        prompts, token_ids, places = [], [], []
        for i, pair in enumerate(self._judged(firsts, seconds, instruction, most, is_stopped)):
            ids = tuple(pair.token_ids[:most])
            if len(ids) > self._limits.most_prompt_tokens:
                self._limits.check_length(f"documents[{i}]", len(ids))
            prompts.append(Prompt(f"documents[{i}]", None, ids, cache_salt))
            token_ids.append(ids)
            places.append(pair.second)
        parts = [part] * len(prompts)
        return Scoring(self._prepare(prompts, token_ids, wanted, priority, parts, places), None)

    def num_characters_of_pairs(self, queries: Any, documents: Any, instruction: Any) -> int:
        """Return how many characters `score` tokenises for these arguments, which need not be valid.

        With a template, the instruction and the query count once for each pair.
        """
        once = num_characters([queries, documents])
        if not self.pooling.template or not isinstance(documents, list | tuple):
            return once
        repeated = num_characters(instruction or INSTRUCTION)
        if isinstance(queries, str) or (isinstance(queries, list | tuple) and len(queries) == 1):
            repeated += num_characters(queries)
        return once + len(documents) * repeated

    def _task(self, params: PoolingParams | None, name: str | None) -> PoolingTask:
        if not isinstance(params, PoolingParams | None):
            raise TypeError(f"pooling_params must be PoolingParams, got {params!r}")
        params = params or PoolingParams()
        return PoolingTask(name or params.task or self.pooling.task, self.pooling, params, self._hidden_size)

    def _before(self, name: str | None) -> str:
        prompts = dict(self.pooling.prompts)
        if name is None:
            return ""
        if name not in prompts:
            raise ValueError(
                f"prompt_name is {name!r}; allowed: {', '.join(prompts) or 'None, the model has no prompts'}"
            )
        if not self.pooling.include_prompt:
            raise ValueError(f"prompt_name is {name!r}, but the model does not pool its prompts; allowed: None")
        return prompts[name]

    def _check_text(self, name: str, text: str, params: PoolingParams) -> None:
        if self._tokenizer is None:
            raise ValueError(f"{name} must be token ids, as there is no tokenizer, got {text!r}")
        require_unicode(name, text)
        if params.truncate_prompt_tokens is None and len(text) >= LONG_TEXT:
            self._limits.check_length(name, max(self._tokenizer.fewest_tokens(text), 1), at_least=True)

    def _in_parts(
        self, texts: Sequence[str], is_stopped: Stopped, *, add_special_tokens: bool = True
    ) -> Iterator[list[int]]:
        """Yield the token ids of each text, tokenised in parts. Raises WorkStopped once `is_stopped` returns True."""
        assert self._tokenizer is not None
        start = done = 0
        while start < len(texts):
            if is_stopped():
                raise WorkStopped("nobody waits for these texts any more")
            end, size = start + 1, len(texts[start])
            while end < len(texts) and size + len(texts[end]) <= CHARACTERS_AT_ONCE:
                size += len(texts[end])
                end += 1
            yield from self._tokenizer.encode_batch(texts[start:end], add_special_tokens=add_special_tokens)
            start, done = end, done + size
        if done >= HUGE_TEXT:
            return_free_memory()

    def _encoded(self, texts: list[str], params: PoolingParams, is_stopped: Stopped) -> list[list[int]]:
        """Return the token ids of each text with special tokens, truncated by `_truncated` if `params` ask for it."""
        if not texts:
            return []
        encoded = list(self._in_parts(texts, is_stopped))
        most = self._most(params)
        too_long = [] if most is None else [i for i, ids in enumerate(encoded) if len(ids) > most]
        bare = self._in_parts([texts[i] for i in too_long], is_stopped, add_special_tokens=False)
        for i, ids in zip(too_long, bare, strict=True):
            assert most is not None
            encoded[i] = _truncated(encoded[i], ids, most)
        return encoded

    def _judged(
        self, firsts: list[str], seconds: list[str], instruction: str | None, most: int | None, is_stopped: Stopped
    ) -> Iterator[Pair]:
        """Yield the tokens of each pair of texts: in the model's template, or else joined by the tokenizer.

        A single text in `firsts` is paired with each text in `seconds`; without a template, it is tokenised once.
        `most` is the most tokens of a pair, None for no bound.
        """
        assert self._tokenizer is not None
        if not self.pooling.template:
            before = list(self._in_parts(firsts, is_stopped, add_special_tokens=False))
            behind = self._in_parts(seconds, is_stopped, add_special_tokens=False)
            for first, second in zip(before * (len(seconds) // len(firsts)), behind, strict=True):
                yield self._tokenizer.join(first, second, most)
            return
        start, form, end = self.pooling.template
        head, tail = self._tokenizer.encode_batch([start, end], add_special_tokens=False)
        of_template = len(head) + len(tail)
        if most is not None and most <= of_template:
            raise ValueError(
                f"truncate_prompt_tokens must be more than {of_template}, the tokens of the template, got {most}"
            )
        room = None if most is None else most - of_template
        given = INSTRUCTION if instruction is None else instruction
        queries = firsts * (len(seconds) // len(firsts))
        pairs = zip(queries, seconds, strict=True)
        texts = [form.format(instruction=given, query=query, document=document) for query, document in pairs]
        for body in self._in_parts(texts, is_stopped, add_special_tokens=False):
            yield Pair([*head, *body[:room], *tail], None)

    def _most(self, params: PoolingParams) -> int | None:
        keep, longest = params.truncate_prompt_tokens, self._limits.longest_prompt
        return None if keep is None else longest if keep == -1 else min(keep, longest)

    def _prepare(
        self,
        prompts: Sequence[Prompt],
        token_ids: Sequence[tuple[int, ...]],
        task: PoolingTask,
        priority: int,
        parts: Sequence[RequestPart],
        second_texts: Iterable[int | None] = itertools.repeat(None),
    ) -> list[PreparedRequest]:
        limits, params = self._limits, _one_step()
        longest, of_task = limits.most_prompt_tokens, pooling_extras.extras_of(by_token=task.by_token)
        collect = partial(RunningPooling, task)
        prepared = []
        for prompt, ids, part, second_text in zip(prompts, token_ids, parts, second_texts, strict=False):
            check_token_ids(prompt, ids, limits.vocab_size, limits.refused_id)
            if len(ids) > longest:
                limits.check_length(prompt.name, len(ids))
            request_id = f"{self._id_prefix}{next(self._numbers)}"
            root, extras = ROOT, of_task
            if prompt.cache_salt is not None or part is not NO_PART:
                root = prefix_root(salt=prompt.cache_salt, **part.root)
                extras = {**extras, **part.extras}
            if second_text is not None:
                extras = extras | pooling_extras.extras_of(by_token=task.by_token, second_text=second_text)
            request = EngineRequest(request_id, ids, params, priority=priority, prefix_root=root, extras=extras)
            prepared.append(PreparedRequest(request_id, prompt.text, ids, params, (request,), collect=collect))
        return prepared


@cache
def _one_step() -> SamplingParams:
    """Return parameters with which a request ends after the step that computes its last prompt token."""
    return SamplingParams(max_tokens=1, temperature=0.0, seed=0, detokenize=False, ignore_eos=True)


def _truncated(with_special: list[int], bare: list[int], most: int) -> list[int]:
    """Return a text's first tokens with the special tokens around them, `most` tokens in all.

    `with_special` and `bare` are the text's token ids with and without special tokens. If the special tokens do not
    surround the text, or leave it no room, the first `most` of `with_special` are returned.
    """
    around = len(with_special) - len(bare)
    places = (i for i in range(around + 1) if with_special[i : i + len(bare)] == bare)
    start = next(places, None)
    if start is None or around >= most:  # the special tokens do not surround the text
        return with_special[:most]
    return with_special[:start] + bare[: most - around] + with_special[start + len(bare) :]


def _texts(name: str, given: Any) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{name} must be a string or a list of strings, got {given!r}")
    if not texts:
        raise ValueError(f"{name} must have at least one input, got none")
    return list(texts)


def make_pooling_processor(model: ModelConfig, inputs: InputProcessor) -> PoolingProcessor | None:
    """Return a PoolingProcessor for the model, or None if the model is generative.

    The processor shares the tokenizer, limits and features of `inputs`.
    """
    if model.pooling is None:
        return None
    pooling, hidden_size = model.pooling, model.hidden_size
    return PoolingProcessor(inputs.tokenizer, inputs.limits, pooling, hidden_size, inputs.id_prefix, inputs.features)

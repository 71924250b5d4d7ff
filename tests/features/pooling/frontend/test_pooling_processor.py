"""Requests that pool: which tokens of a text are kept, which tasks a model has, and what its steps' vectors become."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st
from tiny_tokenizers import KINDS, byte_level, with_bos, wrap
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from compiled_engine.engine.messages import EngineOutput, RequestLimits, StepOutputs
from compiled_engine.features.pooling.extras import NAME, Vectors
from compiled_engine.features.pooling.frontend.processor import CHARACTERS_AT_ONCE, PoolingBounds, PoolingProcessor
from compiled_engine.features.pooling.frontend.running import results
from compiled_engine.features.pooling.frontend.task import PoolingParams, PoolingTask
from compiled_engine.frontend.output_processor import OutputProcessor
from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.pooling import CLASSIFY, EMBED, LAST, NONE, NORMALISE, SOFTMAX, Dense, Pooling

LONGEST = 20
TEXT = "the quick brown fox jumps over the lazy dog " * 4
EMBEDS = Pooling(EMBED, LAST, (), NONE)
RERANKS = Pooling(
    CLASSIFY, LAST, (Dense("", 4, 2, tokens=(5, 6)),), SOFTMAX, ("yes",), ("ab", "{query}{document}", "c")
)


def processor(tokenizer: Tokenizer, pooling: Pooling = EMBEDS) -> PoolingProcessor:
    limits = RequestLimits(len(tokenizer.hf), LONGEST, 400, yields_tokens=False)
    return PoolingProcessor(tokenizer, limits, pooling, hidden_size=4)


def with_both() -> Tokenizer:
    """A tokenizer like BERT's, with a special token before and one after every text."""
    backend = Backend.from_str(byte_level().hf.backend_tokenizer.to_str())
    ends = [("<s>", 0), ("</s>", 1)]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return wrap(backend)


@pytest.mark.parametrize("keep", [3, 4, LONGEST, LONGEST + 5, -1])
def test_the_first_tokens_are_kept_with_the_special_ones_around_them(keep: int) -> None:
    bare = byte_level().encode(TEXT)
    most = min(keep, LONGEST) if keep > 0 else LONGEST
    for tokenizer, before, behind in ((byte_level(), [], []), (with_bos(), [0], []), (with_both(), [0], [1])):
        (request,) = processor(tokenizer).process(TEXT, PoolingParams(truncate_prompt_tokens=keep))
        expected = [*before, *bare[: most - len(before) - len(behind)], *behind]
        assert list(request.prompt_token_ids) == expected


def test_special_tokens_alone_are_not_what_is_kept() -> None:
    (request,) = processor(with_both()).process(TEXT, PoolingParams(truncate_prompt_tokens=2))
    assert list(request.prompt_token_ids) == [0, byte_level().encode(TEXT)[0]]


@pytest.mark.parametrize(("keep", "most"), [(15, 15), (LONGEST + 9, LONGEST), (-1, LONGEST)])
def test_a_pair_is_cut_within_its_template(keep: int, most: int) -> None:
    tokenizer = byte_level()
    head, body, tail = (tokenizer.encode(text) for text in ("ab", "fox" + TEXT, "c"))
    scoring = processor(tokenizer, RERANKS).score("fox", TEXT, PoolingParams(truncate_prompt_tokens=keep))
    (request,) = scoring.requests
    assert list(request.prompt_token_ids) == [*head, *body[: most - len(head) - len(tail)], *tail]


ENDS = [("<s>", 0), ("</s>", 1)]
FORMS = {
    "plain": None,
    "bert": processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> $B:1 </s>:1", ENDS),
    "roberta": processors.RobertaProcessing(("</s>", 1), ("<s>", 0)),
    "the second first": processors.TemplateProcessing("$A", "$B:1 <s> $A:0", ENDS),
    "without types": processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", ENDS),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@drawn(
    texts=st.lists(st.sampled_from(["", "a", "hello world", "the dog \n", "é😀"]), min_size=2, max_size=9),
    data=st.data(),
)
def test_pairs_are_joined_and_cut_as_the_tokenizer_does(kind: str, form: str, texts: list[str], data: Any) -> None:
    backend = Backend.from_str(KINDS[kind]().hf.backend_tokenizer.to_str())
    if FORMS[form] is not None:
        backend.post_processor = FORMS[form]
    tokenizer = wrap(Backend.from_str(backend.to_str()))
    split = data.draw(st.integers(0, len(texts)))
    pair = "".join(texts[:split]), "".join(texts[split:])
    most = data.draw(st.none() | st.integers(backend.num_special_tokens_to_add(True) + 1, 20))
    if most is not None:
        backend.enable_truncation(most, strategy="longest_first")
    expected = backend.encode(*pair)
    bare = [tokenizer.encode(text, add_special_tokens=False) for text in pair]
    num_special = backend.num_special_tokens_to_add(True)
    with pytest.raises(ValueError, match=rf"^truncate_prompt_tokens must be more than {num_special}, .* got "):
        tokenizer.join(bare[0], bare[1], num_special)
    joined = tokenizer.join(bare[0], bare[1], most)
    assert joined.token_ids == expected.ids
    assert joined.second == (expected.type_ids.index(1) if 1 in expected.type_ids else None)


class Counted:
    """A tokenizer that counts the characters that it is given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.characters, self.calls = tokenizer, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        self.calls += 1
        self.characters += sum(map(len, texts))
        return self._tokenizer.encode_batch(texts, **options)


@pytest.mark.parametrize("keep", [None, 8])
def test_a_query_of_many_documents_is_tokenised_once(keep: int | None) -> None:
    counted = Counted(byte_level())
    query, documents = "fox " * (5 if keep is None else 5000), ["the dog"] * 500
    judges = Pooling(CLASSIFY, LAST, (Dense("", 4, 1),), NONE, ("yes",))
    scoring = processor(counted, judges).score(query, documents, PoolingParams(truncate_prompt_tokens=keep))  # type: ignore[arg-type]
    assert len(scoring.requests) == 500
    assert counted.characters == len(query) + 500 * len("the dog")


@pytest.mark.parametrize("instruction", [None, "words " * 50])
def test_the_size_of_pairs_is_of_what_is_tokenised(instruction: str | None) -> None:
    """The size decides whether the work leaves the event loop. A template repeats query and instruction per
    document."""
    documents = ["the dog"] * 50
    for queries in ("fox " * 100, ["fox " * 100], ["fox " * 100] * 50):
        counted = Counted(byte_level())
        form = ("ab", "{instruction}{query}{document}", "c")
        reranks = Pooling(CLASSIFY, LAST, (Dense("", 4, 2, tokens=(5, 6)),), SOFTMAX, ("yes",), form)
        reranker = processor(counted, reranks)  # type: ignore[arg-type]
        reranker.score(queries, documents, PoolingParams(truncate_prompt_tokens=8), instruction)
        size = reranker.num_characters_of_pairs(queries, documents, instruction)
        assert 0.9 * counted.characters < size < 1.1 * counted.characters


def test_pairs_have_a_bound_on_what_they_are_together() -> None:
    for pooling, words in ((EMBEDS, None), (RERANKS, "words")):
        most = 10 * len("fox the dog" + (words or ""))
        bounds, documents = PoolingBounds(characters=most), ["the dog"] * 10
        assert processor(byte_level(), pooling).score("fox ", documents, None, words, bounds=bounds).requests
        more = most + len("fox a" + (words or ""))
        with pytest.raises(ValueError, match=rf"documents must have at most {most} characters in all, .*, got {more}$"):
            processor(byte_level(), pooling).score("fox ", [*documents, "a"], None, words, bounds=bounds)


@pytest.mark.parametrize(("task", "most"), [("embed", 6), ("token_embed", 6)])
def test_results_have_a_bound_on_their_values(task: str, most: int) -> None:
    bounds = PoolingBounds(values=4 * most)
    prompts = [[5, 6]] * 3 if task == "token_embed" else [[5, 6]] * 6
    assert processor(byte_level()).process(prompts, task=task, bounds=bounds)
    what = "tokens" if task == "token_embed" else "texts"
    with pytest.raises(
        ValueError, match=f"prompts must have at most 6 {what} in all, as each has .* 4 values, got [78]"
    ):
        processor(byte_level()).process([*prompts, [5]], task=task, bounds=bounds)


@pytest.mark.parametrize("pooling", [EMBEDS, RERANKS, Pooling(CLASSIFY, LAST, (Dense("", 4, 1),), NONE, ("yes",))])
def test_work_on_many_texts_ends_when_it_is_stopped(pooling: Pooling) -> None:
    counted = Counted(byte_level())
    texts = ["x" * (CHARACTERS_AT_ONCE // 2)] * 20
    params = PoolingParams(truncate_prompt_tokens=8)
    with pytest.raises(RuntimeError, match="nobody waits"):
        processor(counted, pooling).score("fox", texts, params, is_stopped=lambda: counted.calls > 3)  # type: ignore[arg-type]
    assert counted.calls == 4


def test_a_head_of_several_kinds_has_no_result_for_each_token() -> None:
    several = Pooling(EMBED, ("max", "cls"), (), NORMALISE)
    assert PoolingTask("token_embed", several, PoolingParams(), 4).by_token
    with_head = Pooling(EMBED, ("max", "cls"), (Dense("2_Dense", 8, 3),), NORMALISE)
    with pytest.raises(ValueError, match="task is 'token_embed', but the model's head reads several kinds of pooling"):
        PoolingTask("token_embed", with_head, PoolingParams(), 4)


def vectors(first: int, *values: float) -> Vectors:
    return Vectors(first, 1, np.array(values, "<f4").tobytes())


def test_vectors_that_are_computed_again_replace_the_earlier_ones() -> None:
    """This happens when a request continues on another replica."""
    (request,) = processor(byte_level()).process("hello", task="token_embed")
    outputs = OutputProcessor(None)
    outputs.add(request)
    name = request.engine_requests[0].request_id

    def step(given: Vectors, **more: Any) -> Any:
        changed, _ = outputs.process(StepOutputs([], [], [EngineOutput(name, (), extras={NAME: given}, **more)]))
        return changed[0].snapshot()

    for given in (vectors(0, 1, 2), vectors(2, 3), vectors(0, 4, 5), vectors(2, 6)):
        assert not step(given).finished
    (output,) = results([step(vectors(3, 7), finish_reason="length")])
    assert output.finished
    assert output.outputs.values.tolist() == [[4], [5], [6], [7]]

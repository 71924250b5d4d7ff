"""Requests that pool: which tokens of a text are kept, which tasks a model has, and what its steps' vectors become."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_tokenizers import byte_level, with_bos, wrap
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from compiled_engine.frontend.output_processor import OutputProcessor
from compiled_engine.frontend.pooling import PoolingParams, PoolingTask
from compiled_engine.frontend.pooling_processor import PoolingProcessor
from compiled_engine.frontend.running_pooling import results
from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.messages import EngineOutput, RequestLimits, StepOutputs, Vectors
from compiled_engine.pooling import CLASSIFY, EMBED, LAST, NONE, NORMALISE, SOFTMAX, Dense, Pooling

LONGEST = 20
TEXT = "the quick brown fox jumps over the lazy dog " * 4
EMBEDS = Pooling(EMBED, LAST, (), NONE)
RERANKS = Pooling(
    CLASSIFY, LAST, (Dense("", 4, 2, tokens=(5, 6)),), SOFTMAX, ("yes",), ("ab", "{query}{document}", "c")
)


def processor(tokenizer: Tokenizer, pooling: Pooling = EMBEDS) -> PoolingProcessor:
    limits = RequestLimits(len(tokenizer.hf), LONGEST, 400, pools=True)
    return PoolingProcessor(tokenizer, limits, pooling, hidden_size=4)


def with_both() -> Tokenizer:
    """Like BERT: a token before every text and one behind it."""
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


def test_a_head_of_several_kinds_has_no_result_for_each_token() -> None:
    several = Pooling(EMBED, ("max", "cls"), (), NORMALISE)
    assert PoolingTask("token_embed", several, PoolingParams(), 4).by_token
    with_head = Pooling(EMBED, ("max", "cls"), (Dense("2_Dense", 8, 3),), NORMALISE)
    with pytest.raises(ValueError, match="task is 'token_embed', but the model's head reads several kinds of pooling"):
        PoolingTask("token_embed", with_head, PoolingParams(), 4)


def vectors(first: int, *values: float) -> Vectors:
    return Vectors(first, 1, np.array(values, "<f4").tobytes())


def test_vectors_that_are_computed_again_replace_the_earlier_ones() -> None:
    """As for a request that goes on elsewhere after the loss of a replica."""
    (request,) = processor(byte_level()).process("hello", task="token_embed")
    outputs = OutputProcessor(None)
    outputs.add(request)
    name = request.engine_requests[0].request_id

    def step(given: Vectors, **more: Any) -> Any:
        changed, _ = outputs.process(StepOutputs([], [], [EngineOutput(name, (), vectors=given, **more)]))
        return changed[0].snapshot()

    for given in (vectors(0, 1, 2), vectors(2, 3), vectors(0, 4, 5), vectors(2, 6)):
        assert not step(given).finished
    (output,) = results([step(vectors(3, 7), finish_reason="length")])
    assert output.finished
    assert output.outputs.values.tolist() == [[4], [5], [6], [7]]

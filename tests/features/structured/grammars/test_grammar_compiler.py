"""The compiler of grammars in the core, and the requests that wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
from busy_threads import busy
from token_masks import ByLastToken

from compiled_engine.engine.messages import EngineRequest
from compiled_engine.features.structured import constraints
from compiled_engine.features.structured.constraints import GrammarQueue
from compiled_engine.features.structured.extras import extras_of
from compiled_engine.features.structured.grammars.compiler import GrammarCompiler
from compiled_engine.features.structured.grammars.constraint import fill_masks
from compiled_engine.features.structured.grammars.text import grammar_text
from compiled_engine.features.structured.grammars.trials import on_large_stack
from compiled_engine.features.structured.grammars.vocabulary import GrammarVocabulary
from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.structured_outputs import StructuredOutputs
from compiled_engine.sampling.token_mask import MaskConstraint, num_words

VOCAB_SIZE = 4096


@pytest.fixture(scope="module")
def vocabulary(bundled_tokenizer: Tokenizer) -> GrammarVocabulary:
    assert bundled_tokenizer.eos_token_id is not None
    return GrammarVocabulary(bundled_tokenizer.to_json(), VOCAB_SIZE, frozenset({bundled_tokenizer.eos_token_id}))


@pytest.fixture
def compiler(vocabulary: GrammarVocabulary) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(vocabulary, kept=3)
    yield compiler
    compiler.close()


def choice(*texts: str) -> str:
    return grammar_text(StructuredOutputs(choice=texts))


def test_the_last_used_are_kept(compiler: GrammarCompiler) -> None:
    first = compiler.compile(choice("a"))
    for text in "bcad":
        compiler.compile(choice(text)).result()
    assert compiler.compile(choice("a")) is first
    assert compiler.metrics()["grammar_compiles"] == 4
    compiler.compile(choice("b")).result()  # it was the first to go
    metrics = compiler.metrics()
    assert (metrics["grammar_compiles"], metrics["grammar_cache_hits"], metrics["grammar_failures"]) == (5, 2, 0)
    assert metrics["grammar_compile_s"] > 0


def test_a_grammar_whose_request_has_gone_is_compiled_for_the_next_one(vocabulary: GrammarVocabulary) -> None:
    """Cancelled before it begins, while others are compiled; what has begun is kept."""
    with closing(GrammarCompiler(vocabulary)) as compiler:
        begun = compiler.compile(choice("a"))
        waiting = [compiler.compile(choice(f"b{i}")) for i in range(50)]
        begun.result()
        compiler.cancel(choice("a"), begun)
        assert compiler.compile(choice("a")) is begun
        compiler.cancel(choice("b49"), waiting[49])
        assert waiting[49].cancelled()
        again = compiler.compile(choice("b49"))
        assert compiler.constraint(again) is not None
        assert compiler.compile(choice("b49")) is again


def test_copies_do_not_know_of_each_other(compiler: GrammarCompiler, bundled_tokenizer: Tokenizer) -> None:
    compiled = compiler.compile(choice("ab", "cd"))
    one, other = compiler.constraint(compiled), compiler.constraint(compiled)
    words_MW = np.zeros((2, num_words(VOCAB_SIZE)), np.int32)
    (token_id,) = bundled_tokenizer.encode("c", add_special_tokens=False)
    with ThreadPoolExecutor(1) as thread:
        assert fill_masks([(one, []), (other, [token_id])], words_MW, thread).result() == {}
    texts = [
        {
            bundled_tokenizer.decode([int(i)])
            for i in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        }
        for row in words_MW
    ]
    assert {"a", "c"} <= texts[0] <= {"a", "c", "ab", "cd"}
    assert texts[1] == {"d"}


def test_failures_are_by_row_and_disturb_nobody(compiler: GrammarCompiler) -> None:
    good = compiler.constraint(compiler.compile(choice("ab")))
    bad = compiler.constraint(compiler.compile(choice("ab")))
    mask = MaskConstraint(ByLastToken(VOCAB_SIZE, 1), VOCAB_SIZE)
    words_MW = np.zeros((3, num_words(VOCAB_SIZE)), np.int32)
    with ThreadPoolExecutor(1) as thread:
        failures = fill_masks([(bad, [7, 7, 7]), (mask, [5]), (good, [])], words_MW, thread).result()
    assert failures.keys() == {0, 1}
    assert failures[0].startswith("structured_outputs: ")
    assert failures[1].startswith("token_mask: ")
    assert words_MW[2].any()


def test_what_cannot_be_compiled(compiler: GrammarCompiler) -> None:
    with pytest.raises(ValueError, match=r"structured_outputs: .*unknown special token"):
        compiler.compile(grammar_text(StructuredOutputs(grammar="start: <|nobody|>"))).result()
    assert compiler.metrics()["grammar_failures"] == 1


def test_a_tokenizer_that_cannot_be_read_is_an_error_of_the_requests() -> None:
    compiler = GrammarCompiler(GrammarVocabulary("{}", 9, frozenset({0})))
    with pytest.raises(ValueError, match="structured_outputs: the tokenizer cannot be read"):
        compiler.compile(choice("a")).result()
    compiler.close()


def test_a_large_stack_gives_what_the_work_gives() -> None:
    before = threading.stack_size()
    assert on_large_stack(lambda: threading.current_thread().name) == "large stack"
    with pytest.raises(KeyError):
        on_large_stack(lambda: {}["nothing"])
    assert threading.stack_size() == before


def request(request_id: str, grammar: str | None) -> EngineRequest:
    return EngineRequest(request_id, (1, 2), SamplingParams(), extras=extras_of(grammar))


class TestQueue:
    def test_a_vocabulary_has_to_come_first(self) -> None:
        with pytest.raises(ValueError, match="the grammar of request 'a' needs a vocabulary"):
            GrammarQueue().add(request("a", choice("a")))

    def test_requests_leave_when_their_grammar_is_ready(self, vocabulary: GrammarVocabulary) -> None:
        queue = GrammarQueue()
        queue.set_vocabulary(vocabulary)
        queue.add(request("a", choice("a")))
        queue.add(request("gone", choice("a")))
        queue.add(request("bad", "start: <|nobody|>"))
        assert len(queue.waiting) == 3
        assert queue.remove("gone")
        assert not queue.remove("gone")
        ready, failed = [], []
        while queue.waiting:
            more, ends = queue.release(patience_s=1.0)
            ready += more
            failed += ends
        assert [given.request_id for given, _ in ready] == ["a"]
        assert [(output.request_id, output.finish_reason) for output in failed] == [("bad", "error")]
        assert str(failed[0].stop_reason).startswith("structured_outputs: ")
        queue.close()

    def test_what_nobody_waits_for_any_more_is_not_compiled(self, vocabulary: GrammarVocabulary) -> None:
        """It is for the others that wait with it."""
        queue = GrammarQueue()
        queue.set_vocabulary(vocabulary)
        compiler = queue._compiler
        assert compiler is not None
        compiler._vocabulary.result()
        with busy(compiler._threads):
            for index, text in enumerate(["gone", "shared", "shared"]):
                queue.add(request(str(index), choice(text)))
            assert queue.remove("0")
            assert queue.remove("1")
        ready, failed = queue.release(10.0)
        queue.close()
        assert ([given.request_id for given, _ in ready], failed) == (["2"], [])
        assert queue.metrics()["grammar_compiles"] == 1

    def test_who_waits_too_long_is_told(self, vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(constraints, "LONGEST_COMPILE_S", 0.05)
        queue = GrammarQueue()
        queue.set_vocabulary(vocabulary)
        assert queue._compiler is not None
        with busy(queue._compiler._threads):
            queue.add(request("a", choice("a")))
            time.sleep(0.06)
            ready, (failed,) = queue.release()
        assert (ready, failed.stop_reason) == (
            [],
            "structured_outputs: the grammar takes more than 0.05 s to compile",
        )
        assert not queue.waiting
        queue.close()

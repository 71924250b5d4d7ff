"""Logits processors of the user: which rows they see, what they do to tokens, and what becomes of those that fail."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from compiled_engine.cli.app import app
from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.llm import LLM
from compiled_engine.options import EngineOptions
from compiled_engine.resolve.engine import resolve
from compiled_engine.rows.row_fields import RowFields
from compiled_engine.sampling.logits_processor import LogitsProcessor, build_processors, resolve_logits_processors
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.ranks import row_chunks
from compiled_engine.sampling.sampler import Sampler, SamplerClass

PROMPTS = ["def add(a, b):\n", "class Stack:\n    def __init__(self", "import os\nimport sys\n\n", "for i in range("]
SMALL: dict[str, Any] = {
    "mode": "eager",
    "device": "cpu",
    "progress": False,
    "max_model_len": 64,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 32,
    "num_blocks": 64,
}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


class ByPosition:
    """Forces token extra_args["force"] + position, using a table on the device, for requests that have this
    argument."""

    def __init__(self, *, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.base_N = torch.full((max_num_rows,), -1, dtype=torch.int64, device=device)
        self.vocab_size = vocab_size
        self.rows: set[int] = set()
        self.added: list[tuple[int, int]] = []

    def add_row(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        assert row not in self.rows
        if not params.extra_args or "force" not in params.extra_args:
            return False
        self.rows.add(row)
        self.added.append((len(token_ids), num_prompt_tokens))
        self.base_N[row] = params.extra_args["force"]
        return True

    def remove_row(self, row: int) -> None:
        self.rows.remove(row)
        self.base_N[row] = -1

    def apply(self, logits_RV: torch.Tensor, row_index_R: torch.Tensor, positions_R: torch.Tensor) -> None:
        assert logits_RV.dtype == torch.float32
        assert logits_RV.shape == (len(row_index_R), self.vocab_size)
        base_R = self.base_N[row_index_R]
        assert (base_R >= 0).all(), "a row that it does not apply to"
        forced_R = (base_R + positions_R) % self.vocab_size
        kept_R1 = logits_RV.gather(1, forced_R[:, None])
        logits_RV.fill_(-torch.inf)
        logits_RV.scatter_(1, forced_R[:, None], kept_R1)


class Forbid:
    """Forbids the tokens in extra_args["forbid"]; an object, not a factory."""

    def __init__(self) -> None:
        self.token_ids: dict[int, list[int]] = {}

    def add_row(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        if params.extra_args and "forbid" in params.extra_args:
            self.token_ids[row] = params.extra_args["forbid"]
        return row in self.token_ids

    def remove_row(self, row: int) -> None:
        del self.token_ids[row]

    def apply(self, logits_RV: torch.Tensor, row_index_R: torch.Tensor, positions_R: torch.Tensor) -> None:
        for i, row in enumerate(row_index_R.tolist()):
            logits_RV[i, self.token_ids[row]] = -torch.inf


class Failing:
    """Fails in the method, and for the request, that extra_args["fail"] names."""

    def __init__(self) -> None:
        self.fails: dict[int, str] = {}
        self.num_calls = 0

    def add_row(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> Any:
        where = (params.extra_args or {}).get("fail")
        if where == "add_row":
            raise KeyError("injected")
        if where == "answer":
            return None
        if where is not None:
            self.fails[row] = where
        return where is not None

    def remove_row(self, row: int) -> None:
        if self.fails.pop(row) == "remove_row":
            raise KeyError("injected")

    def apply(self, logits_RV: torch.Tensor, row_index_R: torch.Tensor, positions_R: torch.Tensor) -> Any:
        self.num_calls += 1
        if "apply" in self.fails.values() and self.num_calls % 3 == 0:
            raise KeyError("injected")
        return logits_RV if "result" in self.fails.values() else None


forbid, failing = Forbid(), Failing()
factory_calls: list[ByPosition] = []


def by_position(*, max_num_rows: int, vocab_size: int, device: torch.device) -> LogitsProcessor:
    factory_calls.append(ByPosition(max_num_rows=max_num_rows, vocab_size=vocab_size, device=device))
    return factory_calls[-1]


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def llm(request: pytest.FixtureRequest, one_thread: None) -> Iterator[LLM]:
    with LLM(**SMALL, async_scheduling=request.param, logits_processors=[by_position, forbid, failing]) as engine:
        yield engine


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        engine = request.getfixturevalue("llm")
        metrics = engine.metrics()
        assert (metrics["running"], metrics["waiting"], metrics["kv_usage"]) == (0, 0, 0)
        engine.generate(PROMPTS[0], SamplingParams(max_tokens=1))  # rows are taken back with the next step
        assert (factory_calls[-1].rows, forbid.token_ids, failing.fails) == (set(), {}, {})


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


def generate(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> list[list[int]]:
    return tokens(llm.generate(prompts, params, use_tqdm=False))


@pytest.mark.parametrize("sampling", [GREEDY, {"temperature": 1.3, "seed": 4, "max_tokens": 8, "ignore_eos": True}])
def test_some_requests_are_processed_and_the_others_stay_as_they_are(llm: LLM, sampling: dict[str, Any]) -> None:
    """More requests than rows, so that rows are used again by requests of the other kind."""
    plain = SamplingParams(**sampling)
    alone = generate(llm, PROMPTS, [plain] * 4)
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    params = [p for i in range(4) for p in (SamplingParams(**sampling, extra_args={"force": 100 * i}), plain)]
    mixed = generate(llm, prompts, params)
    assert mixed[1::2] == alone
    for i, prompt in enumerate(PROMPTS):
        start = len(llm.get_tokenizer().encode(prompt)) + 100 * i
        assert mixed[2 * i] == list(range(start, start + 8))


def test_a_token_is_forbidden_and_log_probabilities_stay_those_of_the_model(llm: LLM) -> None:
    plain = SamplingParams(**GREEDY, logprobs=1)
    (expected,) = llm.generate(PROMPTS[0], plain)
    first = expected.outputs[0].token_ids[0]
    extra_args: dict[str, Any] = {"forbid": [first]}
    (output,) = llm.generate(PROMPTS[0], SamplingParams(**GREEDY, logprobs=1, extra_args=extra_args))
    assert first not in output.outputs[0].token_ids
    assert expected.outputs[0].logprobs is not None
    assert output.outputs[0].logprobs is not None
    assert output.outputs[0].logprobs[0][first] == expected.outputs[0].logprobs[0][first]


def test_every_completion_has_a_row_of_its_own(llm: LLM) -> None:
    params = SamplingParams(n=5, seed=1, max_tokens=4, ignore_eos=True, extra_args={"force": 7, "forbid": [3]})
    added = len(factory_calls[-1].added)
    start = len(llm.get_tokenizer().encode(PROMPTS[0])) + 7
    assert generate(llm, PROMPTS[:1], [params]) == [list(range(start, start + 4))] * 5
    assert len(factory_calls[-1].added) - added == 5


def test_processors_come_after_biases_and_before_penalties(llm: LLM) -> None:
    forced = len(llm.get_tokenizer().encode(PROMPTS[0]))
    params = SamplingParams(
        **GREEDY | {"max_tokens": 1}, extra_args={"force": 0}, logit_bias={9: 80.0}, repetition_penalty=2.0
    )
    assert generate(llm, PROMPTS[:1], [params]) == [[forced]]


def test_a_preempted_request_takes_a_row_again(one_thread: None) -> None:
    options: dict[str, Any] = SMALL | {"num_blocks": 6, "block_size": 8, "enable_prefix_caching": False}
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, extra_args={"force": 5})
    with LLM(**options, logits_processors=[by_position]) as llm:
        outputs = generate(llm, PROMPTS, [params] * 4)
        assert llm.metrics()["preemptions"] > 0
    assert any(known > of_prompt for known, of_prompt in factory_calls[-1].added)
    for prompt, got in zip(PROMPTS, outputs, strict=True):
        start = len(llm.get_tokenizer().encode(prompt)) + 5
        assert got == list(range(start, start + 30))


@pytest.mark.parametrize("where", ["add_row", "apply", "remove_row", "answer", "result"])
def test_a_failure_is_told_and_the_engine_stays_usable(llm: LLM, where: str) -> None:
    plain = SamplingParams(**GREEDY)
    expected = generate(llm, PROMPTS[:1], [plain])
    bad = SamplingParams(**GREEDY | {"max_tokens": 5}, extra_args={"fail": where, "force": 1, "forbid": [2]})
    message = {
        "answer": "Failing.add_row must return True or False, got None",
        "result": "Failing.apply must edit in place and return None, got Tensor",
        **{name: rf"logits processor .*Failing.{name} failed: KeyError: 'injected'" for name in ("add_row", "apply")},
        "remove_row": "Failing.remove_row failed: KeyError: 'injected'",
    }[where]
    with pytest.raises((RuntimeError, TypeError), match=message):
        generate(llm, PROMPTS, [plain, bad, plain, plain])
    assert generate(llm, PROMPTS[:1], [plain]) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_on_a_gpu(temperature: float) -> None:
    """With CUDA graphs and steps launched ahead; more requests than rows."""
    plain = SamplingParams(temperature=temperature, max_tokens=8, ignore_eos=True)
    forced = SamplingParams(temperature=temperature, max_tokens=8, ignore_eos=True, extra_args={"force": 9})
    options: dict[str, Any] = {"progress": False, "max_model_len": 64, "num_blocks": 64, "max_num_seqs": 3}
    with LLM(device="cuda", **options, logits_processors=[by_position]) as llm:
        mixed = generate(llm, [prompt for prompt in PROMPTS for _ in range(2)], [forced, plain] * 4)
        for prompt, token_ids, other in zip(PROMPTS, mixed[::2], mixed[1::2], strict=True):
            start = len(llm.get_tokenizer().encode(prompt)) + 9
            assert token_ids == list(range(start, start + 8))
            assert other != token_ids
            assert len(other) == 8


def test_what_makes_a_batch_general() -> None:
    sampler = Sampler(RowFields(4, "cpu"), 40, processors=[Forbid()])
    for row, extra_args in enumerate([None, {"forbid": [1]}, {"force": 1}]):
        sampler.add_row(row, SamplingParams(extra_args=extra_args), 0, [1], 1, set())
    assert sampler.sampler_class(np.array([0, 2, -1])) is SamplerClass.TEMPERATURE_ONLY
    assert sampler.sampler_class(np.array([0, 1])) is SamplerClass.GENERAL


def test_a_large_batch_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is in one part, in any order; padding is in none."""
    monkeypatch.setattr(row_chunks, "__defaults__", (3 * 40,))
    (processor,) = build_processors([ByPosition], 12, 40, torch.device("cpu"))
    sampler = Sampler(RowFields(12, "cpu"), 40, processors=[processor, Forbid()])
    for row in range(12):
        extra_args: dict[str, Any] = {"force": row} if row % 3 else {"forbid": [1]}
        sampler.add_row(row, SamplingParams(temperature=0, extra_args=extra_args), 0, [1], 1, set())
    rows = np.array([7, -1, 3, 0, 11, 1, 2, -1, 8, 6, 5, 4, 10, 9])
    logits_SV = torch.zeros(len(rows), 40)
    logits_SV[:, 1] = 1.0
    logits_SV[rows < 0] = torch.nan
    before = logits_SV.clone()
    positions_S = torch.arange(len(rows))
    sampled = sampler.sample(logits_SV, rows, torch.from_numpy(rows).int(), positions_S).tolist()
    expected = [0 if row < 0 or row % 3 == 0 else row + position for position, row in enumerate(rows.tolist())]
    assert sampled == expected
    torch.testing.assert_close(logits_SV, before, rtol=0, atol=0, equal_nan=True)


class NotEnough:
    def add_row(self) -> None: ...


def fails(**arguments: Any) -> LogitsProcessor:
    raise OSError("no table")


def no_processor(**arguments: Any) -> Any:
    return 5


class TestWhatIsGiven:
    def resolved(self, *given: Any) -> tuple[Any, ...]:
        resolve(EngineOptions(device="cpu", mode="eager", logits_processors=given))
        return resolve_logits_processors(given)

    def test_objects_factories_and_names(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "some_processors.py").write_text(Path(__file__).read_text())
        monkeypatch.syspath_prepend(tmp_path)
        given = (forbid, ByPosition, by_position, "some_processors:Forbid", "some_processors:failing")
        found = self.resolved(*given)
        module: Any = sys.modules.pop("some_processors")
        assert found == (*given[:3], module.Forbid, module.failing)
        assert self.resolved() == ()

    @pytest.mark.parametrize(
        ("given", "kind", "message"),
        [
            ((5,), TypeError, r"logits_processors\[0\] is 5; allowed: objects with add_row, remove_row, apply"),
            ((forbid, NotEnough), TypeError, r"logits_processors\[1\] is <class .*NotEnough'>; allowed"),
            ((NotEnough(),), TypeError, r"logits_processors\[0\] is <.*NotEnough object.*; allowed"),
            (("json",), ValueError, r"logits_processors\[0\] is 'json'; allowed: 'package.module:Name'"),
            ((":Name",), ValueError, r"is ':Name'; allowed: 'package.module:Name'"),
            (("no_such_module:A",), ValueError, r"is 'no_such_module:A', which cannot be imported \(ModuleNotFound"),
            (("json:Nothing",), ValueError, r"is 'json:Nothing', which cannot be imported \(AttributeError"),
            (("string:digits",), TypeError, r"is 'string:digits', which is '0123456789'; allowed"),
        ],
    )
    def test_what_is_refused(self, given: tuple[Any, ...], kind: type[Exception], message: str) -> None:
        with pytest.raises(kind, match=message):
            resolve_logits_processors(given)
        with pytest.raises(kind, match=message):
            resolve(EngineOptions(device="cpu", mode="eager", logits_processors=given))

    def test_one_that_is_not_in_a_list(self) -> None:
        with pytest.raises(TypeError, match=r"logits_processors is .*Forbid.*; allowed: a list"):
            LLM(**SMALL, logits_processors=forbid)

    @pytest.mark.parametrize(
        ("factory", "message"),
        [
            (fails, r"logits_processors: .*fails\(max_num_rows=3, .*device='cpu'\) failed: OSError: no table"),
            (Forbid, r"logits_processors: .*Forbid\(max_num_rows=3, .*\) failed: TypeError: .*max_num_rows"),
            (no_processor, r"logits_processors: .*no_processor returned 5; allowed: an object with add_row"),
        ],
    )
    def test_factories_that_fail(self, factory: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            LLM(**SMALL, logits_processors=[factory])

    def test_on_the_command_line(self) -> None:
        arguments = ["config", "--device", "cpu", "--mode", "eager", "--json"]
        result = CliRunner().invoke(app, [*arguments, "--logits-processor", "test_logits_processors:ByPosition"])
        assert result.exit_code == 0
        result = CliRunner().invoke(app, [*arguments, "--logits-processor", "nothing"])
        assert result.exit_code == 2
        assert "logits_processors[0] is 'nothing'; allowed" in result.stderr

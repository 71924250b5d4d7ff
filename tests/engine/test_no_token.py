"""Logits of which no token can be chosen, and tokens that alone may come: errors of their request, others go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file
from small_engines import PROMPTS, SMALL

from compiled_engine.frontend.outputs import CompletionOutput
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.5, "seed": 3, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.8, "seed": 3, "logprobs": 2, "presence_penalty": 1.0, "bad_words": ["self"]},
]


class NanFrom:
    """A logits processor that writes one NaN, from the position in extra_args["nan_from"] on."""

    def __init__(self, *, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.nan_from_N = torch.zeros(max_num_rows, dtype=torch.int64, device=device)

    def add_row(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        if params.extra_args is None:
            return False
        self.nan_from_N[row] = num_prompt_tokens + params.extra_args["nan_from"]
        return True

    def remove_row(self, row: int) -> None: ...

    def apply(self, logits_RV: torch.Tensor, row_index_R: torch.Tensor, positions_R: torch.Tensor) -> None:
        begun_R = positions_R >= self.nan_from_N[row_index_R]
        logits_RV[:, 777] = torch.where(begun_R, torch.nan, logits_RV[:, 777])


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def llm(request: pytest.FixtureRequest, one_thread: None) -> Iterator[LLM]:
    with LLM(**SMALL, async_scheduling=request.param, logits_processors=[NanFrom]) as engine:
        yield engine
        metrics = engine.metrics()
        assert (metrics["running"], metrics["waiting"], metrics["kv_usage"]) == (0, 0, 0)


def generate(llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> list[CompletionOutput]:
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.product(one_in=3, each=("llm", "nan_from"))
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("nan_from", [0, 1, 4])
def test_nan_ends_its_request_alone(llm: LLM, sampling: dict[str, Any], nan_from: int) -> None:
    good = SamplingParams(**sampling, max_tokens=9, ignore_eos=True)
    bad = good.clone()
    bad.extra_args = {"nan_from": nan_from}
    expected = [generate(llm, [prompt], [good])[0].token_ids for prompt in PROMPTS]
    completions = generate(llm, [*PROMPTS, PROMPTS[0]], [good, bad, good, bad])
    assert [completions[i].token_ids for i in (0, 2)] == [expected[i] for i in (0, 2)]
    for failed, whole in ((completions[1], expected[1]), (completions[3], expected[0])):
        assert failed.token_ids == whole[:nan_from]
        assert failed.finish_reason == "error"
        assert str(failed.stop_reason).startswith("the logits of the next token are NaN")
        assert failed.logprobs is None or len(failed.logprobs) == nan_from
    assert generate(llm, PROMPTS[1:2], [good])[0].token_ids == expected[1]


@pytest.fixture(scope="module")
def one_bad_token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in which token 7 has a NaN for its embedding, so that its keys and values are NaN as well."""
    path = tmp_path_factory.mktemp("one_bad_token")
    make_checkpoint(path, "llama", tie_word_embeddings=False)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][7, 3] = torch.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"mode": "eager", "device": "cpu"}, marks=pytest.mark.product(one_in=1000)),
        pytest.param(
            {"mode": "compiled", "device": "cpu", "async_scheduling": True}, marks=pytest.mark.product(one_in=1000)
        ),
        pytest.param({"mode": "graphed", "device": "cuda"}, marks=pytest.mark.gpu),
        pytest.param({"mode": "eager", "device": "cuda", "attention_backend": "torch"}, marks=pytest.mark.gpu),
    ],
)
def test_nan_of_a_model_leaves_nothing_behind(one_bad_token: Path, options: dict[str, Any]) -> None:
    """Blocks that hold NaN go to other requests, which run meanwhile and after."""
    random_ = torch.Generator().manual_seed(0)
    good = [torch.randint(8, 131, (length,), generator=random_).tolist() for length in (3, 17, 40, 5, 33)]
    bad = [[7], [*good[1], 7], [*good[2][:20], 7, *good[2][20:]]]
    params = SamplingParams(temperature=0, max_tokens=12, detokenize=False)
    small = {"max_num_seqs": 3, "max_num_batched_tokens": 32, "max_model_len": 128, "num_blocks": 16}
    with LLM(one_bad_token, progress=False, **small, **options) as llm:
        expected = [generate(llm, [prompt], [params])[0].token_ids for prompt in good]
        mixed = [bad[0], good[0], bad[1], good[1], good[2], bad[2], good[3], bad[0], good[4]]
        for _ in range(2):
            completions = generate(llm, mixed, [params] * len(mixed))
            for prompt, completion in zip(mixed, completions, strict=True):
                if prompt in good:
                    assert completion.token_ids == expected[good.index(prompt)]
                else:
                    assert (completion.token_ids, completion.finish_reason) == ([], "error")


@pytest.mark.parametrize("sampling", SAMPLING)
def test_only_allowed_tokens_come(llm: LLM, sampling: dict[str, Any]) -> None:
    plain = SamplingParams(**sampling, max_tokens=9, ignore_eos=True)
    allowed = [*range(5, 4096, 3)]
    limited = plain.clone()
    limited.allowed_token_ids = allowed
    free = generate(llm, PROMPTS, [plain] * 3)
    assert not {token_id for each in free for token_id in each.token_ids} <= set(allowed)
    completions = generate(llm, [*PROMPTS, *PROMPTS], [plain, limited, plain, limited, plain, limited])
    assert [completions[i].token_ids for i in (0, 2, 4)] == [free[i].token_ids for i in (0, 2, 1)]
    for i in (1, 3, 5):
        assert len(completions[i].token_ids) == 9
        assert set(completions[i].token_ids) <= set(allowed)


def test_what_leaves_no_token_is_an_error_of_the_request(llm: LLM) -> None:
    end = llm.get_tokenizer().eos_token_id
    at_once = SamplingParams(allowed_token_ids=[end], max_tokens=5)
    never = SamplingParams(allowed_token_ids=[end], min_tokens=2, max_tokens=5)
    plain = SamplingParams(temperature=0, max_tokens=5)
    ended, failed, other = generate(llm, PROMPTS, [at_once, never, plain])
    assert (ended.token_ids, ended.finish_reason) == ([end], "stop")
    assert (failed.token_ids, failed.finish_reason) == ([], "error")
    assert str(failed.stop_reason).startswith("no token may come next")
    assert other.token_ids == generate(llm, PROMPTS[2:], [plain])[0].token_ids


def test_an_assignment_does_not_reach_a_request_that_runs(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.max_tokens, params.temperature, params.ignore_eos = 6, 0.0, True
    stream = llm.stream(PROMPTS[0], params)
    tokens = next(stream).outputs[0].token_ids
    params.max_tokens, params.stop_token_ids = 2, [*range(4096)]
    for output in stream:
        tokens = output.outputs[0].token_ids
    assert len(tokens) == 6
    assert llm.get_default_sampling_params().max_tokens == 16

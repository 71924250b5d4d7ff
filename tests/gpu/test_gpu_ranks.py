"""Ranks, stages and replicas on two GPUs: tokens and log-probabilities are those of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from adapter_folders import make_adapter
from checkpoints import make_checkpoint
from families import family, write_checkpoint
from family_comparison import difference_of
from invariant_requests import alone, requests, together

from compiled_engine import LLM, LoRARequest, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpu_pair,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.usefixtures("exact_float32"),
]

TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2}
TWO_STAGES: dict[str, Any] = {"pipeline_parallel_size": 2}
TWO_REPLICAS: dict[str, Any] = {"data_parallel_size": 2}
SIZES: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
SIZES |= {"num_hidden_layers": 4, "intermediate_size": 512, "max_position_embeddings": 1024}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
PROMPTS = [[(7 * i + 3 * j) % 130 for j in range(9 + 13 * i)] for i in range(5)]
# So many tokens that norms are divided.
LONG = [[(7 * i + 3 * j * j) % 130 for j in range(700)] for i in range(3)]
GREEDY: dict[str, Any] = {"temperature": 0}
# Top-p without a top-k takes whole rows of logits. Requests with penalties get no drafts.
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 5}
PENALTIES: dict[str, Any] = SAMPLED | {"presence_penalty": 0.5}
NGRAM: dict[str, Any] = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}
CODES: dict[str, Any] = {"kv_cache_dtype": "int8"}
LARGEST_OF_CODES = 0.05  # scales of 8 bits round otherwise


@dataclass(frozen=True)
class Case:
    """two: options on two GPUs; both: on one as well. vocab_size: two ranks divide an even one; each has the whole of
    an odd one. worst: the largest difference of a prompt's log-probability. draft_model: the model drafts for itself.
    """

    two: dict[str, Any]
    both: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=lambda: GREEDY)
    vocab_size: int = 132
    worst: float = 3e-4
    family: str = "qwen3"
    sizes: dict[str, Any] = field(default_factory=dict)
    adapters: bool = False
    draft_model: bool = False
    prompts: list[list[int]] = field(default_factory=lambda: PROMPTS)


CASES = {
    "ranks": Case(TWO_RANKS),
    "ranks, sampled": Case(TWO_RANKS, sampling=PENALTIES),
    "ranks, undivided vocabulary, sampled": Case(TWO_RANKS, sampling=PENALTIES, vocab_size=131),
    "ranks, long prompts": Case(TWO_RANKS, prompts=LONG, worst=1e-3),
    "ranks, divided norms": Case(TWO_RANKS | {"sequence_parallel": True}, prompts=LONG, worst=1e-3),
    "ranks over NCCL": Case(TWO_RANKS | {"collectives": "nccl"}),
    "ranks, experts": Case(TWO_RANKS, family="qwen3_moe", sizes=EXPERTS, worst=1e-3),
    "ranks, 8-bit cache": Case(TWO_RANKS, CODES, worst=LARGEST_OF_CODES),
    "ranks, adapters": Case(TWO_RANKS, LORA, adapters=True),
    "ranks, adapters, drafts, 8-bit cache": Case(
        TWO_RANKS, LORA | CODES | NGRAM, adapters=True, worst=LARGEST_OF_CODES
    ),
    "ranks, drafts": Case(TWO_RANKS, NGRAM),
    "ranks, drafts, sampled": Case(TWO_RANKS, NGRAM, sampling=SAMPLED),
    "ranks, draft model, sampled": Case(TWO_RANKS, sampling=SAMPLED, draft_model=True),
    "ranks, draft model, 8-bit cache": Case(TWO_RANKS, CODES, draft_model=True, worst=LARGEST_OF_CODES),
    "stages": Case(TWO_STAGES),
    "stages, experts": Case(TWO_STAGES, family="qwen3_moe", sizes=EXPERTS),
    "replicas": Case(TWO_REPLICAS, sampling=PENALTIES),
    "replicas through Ray": Case(TWO_REPLICAS | {"distributed_executor": "ray"}, sampling=PENALTIES),
    "replicas, drafts": Case(TWO_REPLICAS, NGRAM, sampling=SAMPLED),
}


def generate(
    folder: Path, prompts: list[list[int]], sampling: dict[str, Any], **options: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Outputs and metrics of an engine on the GPUs; lora_request among the options: of each prompt."""
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=0, prompt_logprobs=0, detokenize=False, **sampling)
    given = {name: options.pop(name) for name in ("lora_request",) if name in options}
    options = {"device": "cuda", "dtype": "float32", "max_model_len": 1024, "num_blocks": 256} | options
    with LLM(folder, progress=False, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False, **given)
        return outputs, llm.metrics()


def differences(ones: list[Any], others: list[Any], prompts: list[list[int]]) -> list[float]:
    """Of the log-probabilities of the prompts' tokens."""
    return [
        abs(x[token].logprob - y[token].logprob)
        for one, other, ids in zip(ones, others, prompts, strict=True)
        for x, y, token in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], ids[1:], strict=True)
    ]


@pytest.mark.parametrize("name", CASES)
def test_two_gpus_compute_what_one_does(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    if case.two.get("distributed_executor") == "ray":
        pytest.importorskip("ray")
    folder = tmp_path / "model"
    model = make_checkpoint(folder, case.family, **SIZES | {"vocab_size": case.vocab_size} | case.sizes)
    both = dict(case.both)
    if case.adapters:
        paths = [make_adapter(tmp_path / str(rank), model, rank, seed=rank, size=0.5) for rank in (4, 16)]
        one, other = (LoRARequest(path.name, number, path) for number, path in enumerate(paths, start=1))
        both["lora_request"] = [None, one, other, None, one]
    if case.draft_model:
        draft = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
        both["speculative_config"] = draft
    (one_gpu, _), (two_gpus, metrics) = (
        generate(folder, case.prompts, case.sampling, **both, **more) for more in ({}, case.two)
    )
    assert [x.outputs[0].token_ids for x in one_gpu] == [x.outputs[0].token_ids for x in two_gpus]
    assert max(differences(one_gpu, two_gpus, case.prompts)) <= case.worst
    assert (metrics["draft_tokens"] > 0) == ("speculative_config" in both)
    if case.draft_model:
        assert metrics["accepted_tokens"] > 0.4 * metrics["draft_tokens"]


def test_a_hybrid_on_two_ranks(tmp_path: Path) -> None:
    """Of the families with recurrences this one can be divided."""
    oracle = write_checkpoint(tmp_path, family("qwen3_5_text").to_divide())
    difference = difference_of(tmp_path, oracle, {"device": "cuda", **TWO_RANKS})
    assert difference.is_right(torch.float32), difference
    assert difference.tokens_equal


@pytest.mark.parametrize(
    ("scheme", "kind", "sizes"), [("fp8_block", "qwen3", {}), ("fp8", "qwen3_moe", EXPERTS)], ids=["block", "experts"]
)
def test_ranks_in_fp8_are_nearer_to_one_than_fp8_to_bfloat16(
    scheme: str, kind: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    """They round otherwise than one: a rank finds the scales of its own part."""
    make_checkpoint(tmp_path / "model", kind, **SIZES | {"vocab_size": 132} | sizes)
    plain, one, two = (
        generate(tmp_path / "model", PROMPTS, GREEDY, dtype="bfloat16", **more)[0]
        for more in ({}, {"quantization": scheme}, {"quantization": scheme} | TWO_RANKS)
    )
    of_ranks, of_fp8 = (median(differences(*pair, PROMPTS)) for pair in ((one, two), (plain, one)))
    assert of_ranks <= 1.2 * of_fp8


@pytest.mark.parametrize("collectives", ["auto", "nccl"])
def test_a_request_has_the_same_bits_in_every_batch_of_two_ranks(collectives: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe", dtype=torch.bfloat16, vocab_size=132, **SIZES, **EXPERTS)
    prompts, params = requests([(7 * i * i) % 130 for i in range(4000)], 20, 240)
    sizes: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 64, "max_num_batched_tokens": 192, "num_blocks": 120}
    options = sizes | TWO_RANKS | {"block_size": 16, "collectives": collectives, "batch_invariant": True}
    with LLM(tmp_path, device="cuda", progress=False, skip_tokenizer_init=True, **options) as llm:
        expected = alone(llm, prompts, params)
        for size in (64, 3, 33):
            chosen = [(n * 7 + size) % 20 for n in range(size)]
            found = together(llm, [prompts[n] for n in chosen], [params[n] for n in chosen])
            assert [n for n, result in zip(chosen, found, strict=True) if result != expected[n]] == []

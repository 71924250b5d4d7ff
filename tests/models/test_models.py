"""The models against transformers: the same log-probabilities of a checkpoint, however work is batched."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_checkpoint, make_checkpoint
from torch import nn
from torch._dynamo.decorators import mark_unbacked

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.config import ModelConfig
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.models.checkpoint.config_reader import read_model_config
from compiled_engine.models.checkpoint.loader import load_weights
from compiled_engine.models.checkpoint.parameters import materialize, parameters_of
from compiled_engine.process.progress import SilentProgress

BLOCK_SIZE = 4
NUM_BLOCKS = 64

YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA = {"sliding_window": 6, "query_pre_attn_scalar": 24}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}


@dataclass(frozen=True)
class Case:
    name: str
    family: str
    overrides: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case("llama", "llama"),
    Case("llama_biases_llama3", "llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    Case(
        "llama_tied_linear_head_64",
        "llama",
        {"tie_word_embeddings": True, "rope_parameters": LINEAR, "head_dim": 64},
    ),
    Case("llama_no_gqa", "llama", {"num_key_value_heads": 7, "vocab_size": 97, "head_dim": None}),
    Case("mistral_window", "mistral", {"sliding_window": 6}),
    Case("mistral_no_window_head_80", "mistral", {"sliding_window": None, "head_dim": 80}),
    Case("qwen2_yarn", "qwen2", {"rope_parameters": YARN}),
    Case(
        "qwen2_tied_upper_windows",
        "qwen2",
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
    Case("qwen3_head_128", "qwen3", {"head_dim": 128, "num_attention_heads": 14, "num_key_value_heads": 2}),
    Case(
        "qwen3_tied_biases_layer_types",
        "qwen3",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    Case("gemma2", "gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    Case("gemma3", "gemma3", GEMMA | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}),
    Case("phi3", "phi3"),
    Case("phi3_window_no_gqa", "phi3", {"sliding_window": 7, "head_dim": 8, "num_key_value_heads": 7}),
    Case("qwen3_moe", "qwen3_moe", MOE | {"norm_topk_prob": True}),
    Case("qwen3_moe_dense_layer", "qwen3_moe", MOE | {"norm_topk_prob": False, "mlp_only_layers": [1]}),
    Case("qwen3_yarn_mscale", "qwen3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
]


def load(path: Path, device: str = "cpu", dtype: str = "auto") -> tuple[nn.Module, ModelConfig]:
    config, _ = read_model_config(path, dtype=dtype, max_model_len=None, load_format="auto", seed=0, device_type=device)
    model = build_model(config)
    weights = materialize(model, parameters_of(model), torch.device(device))
    load_weights(weights, model, config, SilentProgress())
    return model, config


def new_kv_caches(config: ModelConfig, device: str = "cpu") -> list[torch.Tensor]:
    """KV caches filled with noise, as recycled blocks are, so that reading an unwritten slot shows."""
    shape = (NUM_BLOCKS, 2, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    generator = torch.Generator().manual_seed(7)
    noise = torch.randn(shape, generator=generator).to(device, config.dtype)
    return [noise.clone() for _ in range(config.num_layers)]


def attention_inputs(
    counts: list[int], computed: list[int], block_tables: list[list[int]], device: str = "cpu"
) -> AttentionInputs:
    """Inputs for rows that compute `counts` tokens each after `computed` ones."""
    slots = [
        blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for count, start, blocks in zip(counts, computed, block_tables, strict=True)
        for position in range(start, start + count)
    ]
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    seq_lens = [start + count for start, count in zip(computed, counts, strict=True)]
    return AttentionInputs(
        query_start_loc_R1=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens_R=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table_RB=torch.tensor(block_tables, dtype=torch.int32, device=device),
        slot_mapping_T=torch.tensor(slots, dtype=torch.int64, device=device),
        host_3=torch.tensor([sum(n == 1 for n in counts), max(counts), max(seq_lens)], dtype=torch.int32),
        backend="torch",
    )


def run_steps(
    model: nn.Module,
    config: ModelConfig,
    sequences: list[list[int]],
    steps: list[list[int]],
    device: str = "cpu",
) -> list[torch.Tensor]:
    """Return log-probabilities [length, V] of each sequence. A step gives the number of tokens to compute for each."""
    kv_caches = new_kv_caches(config, device)
    blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
    per_sequence = NUM_BLOCKS // len(sequences)
    tables = [blocks[i * per_sequence : (i + 1) * per_sequence] for i in range(len(sequences))]
    computed = [0] * len(sequences)
    results: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in steps:
        rows = sorted((row for row, count in enumerate(step) if count), key=lambda row: step[row] > 1)
        counts = [step[row] for row in rows]
        spans = [range(computed[row], computed[row] + step[row]) for row in rows]
        ids = [sequences[row][position] for row, span in zip(rows, spans, strict=True) for position in span]
        inputs = attention_inputs(counts, [computed[row] for row in rows], [tables[row] for row in rows], device)
        positions = [position for span in spans for position in span]
        hidden_TD = model(torch.tensor(ids, device=device), torch.tensor(positions, device=device), inputs, kv_caches)
        assert hidden_TD.shape == (sum(counts), config.hidden_size)
        logits_TV = model.logits(hidden_TD)
        for row, part in zip(rows, logits_TV.float().log_softmax(-1).split(counts), strict=True):
            results[row].append(part)
            computed[row] += len(part)
    assert computed == [len(sequence) for sequence in sequences]
    return [torch.cat(parts) for parts in results]


def random_sequences(vocab_size: int, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logprobs_are_those_of_transformers(case: Case, tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path, case.family, **case.overrides)
    model, config = load(tmp_path)
    sequences = random_sequences(config.vocab_size, 31, 18)
    expected = [oracle(torch.tensor([ids])).logits[0].log_softmax(-1) for ids in sequences]
    # A cap on the logits leaves no peaks.
    peaked = 0.3 if not config.logit_soft_cap else 0.03
    assert expected[0].exp().amax(-1).mean() > peaked, "the distributions must be peaked to compare anything"

    alone = run_steps(model, config, sequences[:1], [[31]])
    together = run_steps(model, config, sequences, [[31, 18]])
    ragged = run_steps(model, config, sequences, [[9, 1], [1, 6], [0, 1], [14, 1], [1, 1], [6, 8]])
    for run in (alone, together, ragged):
        for ours, theirs in zip(run, expected, strict=False):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_bfloat16_rounds_where_transformers_rounds(family: str, tmp_path: Path) -> None:
    """A lone token attends to itself only, so all but attention shows, bit for bit."""
    make_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    oracle = load_checkpoint(tmp_path, torch.bfloat16)
    model, config = load(tmp_path, dtype="bfloat16")
    for token in range(0, config.vocab_size, 10):
        ours = run_steps(model, config, [[token]], [[1]])[0]
        theirs = oracle(torch.tensor([[token]])).logits[0].float().log_softmax(-1)
        assert torch.equal(ours, theirs)
    rotary = oracle.get_submodule("model.rotary_emb")
    positions = torch.arange(200)
    theirs_cos, theirs_sin = rotary(torch.empty(0, dtype=torch.bfloat16), positions[None])
    ours_cos, ours_sin = model.get_submodule("model.rotary_emb")(positions)
    assert torch.equal(ours_cos, theirs_cos.transpose(0, 1))
    assert torch.equal(ours_sin, theirs_sin.transpose(0, 1))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi3", "qwen3_moe"])
def test_bfloat16_is_as_exact_as_transformers(family: str, tmp_path: Path) -> None:
    check_bfloat16(tmp_path, family, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "qwen3_moe"])
def test_bfloat16_on_a_gpu_is_as_exact_as_transformers(family: str, tmp_path: Path) -> None:
    check_bfloat16(tmp_path, family, "cuda", hidden_size=448, head_dim=64)


def check_bfloat16(path: Path, family: str, device: str, **config_overrides: Any) -> None:
    """Check that the distance from the fp32 log-probabilities is about that of transformers in bf16."""
    exact_oracle = make_checkpoint(path, family, dtype=torch.bfloat16, **config_overrides).to(device)
    oracle = load_checkpoint(path, torch.bfloat16).to(device)
    model, config = load(path, device, "bfloat16")
    sequences = random_sequences(config.vocab_size, 60)
    ids = torch.tensor(sequences, device=device)
    exact = exact_oracle(ids).logits[0].log_softmax(-1)
    theirs = oracle(ids).logits[0].float().log_softmax(-1)
    ours = run_steps(model, config, sequences, [[60]], device)[0]
    allowed = 1.3 * (theirs - exact).abs().mean()
    assert 0 < (ours - exact).abs().mean() < allowed


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_one_trace_serves_every_number_of_tokens(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    model, config = load(tmp_path)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for num_tokens in (17, 1, 2):
        ids = torch.arange(num_tokens)
        inputs = attention_inputs([num_tokens], [0], [list(range(8))])
        eager = model(ids, ids, inputs, new_kv_caches(config))
        kv_caches = new_kv_caches(config)
        positions = ids.clone()
        for tensor in (ids, positions, inputs.slot_mapping_T):
            mark_unbacked(tensor, 0, shape_id="tokens")
        for tensor in kv_caches:
            mark_unbacked(tensor, 0, shape_id="blocks")
        torch.testing.assert_close(compiled(ids, positions, inputs, kv_caches), eager)
    assert len(graphs) == 1
    attention_calls = [node for node in graphs[0].graph.nodes if "compiled_engine" in str(node.target)]
    assert len(attention_calls) == config.num_layers


def test_parameters_have_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    for family in ("llama", "qwen3"):
        oracle = make_checkpoint(tmp_path / family, family, attention_bias=True, tie_word_embeddings=True)
        model, _ = load(tmp_path / family)
        shapes = {name: value.shape for name, value in oracle.named_parameters()}
        assert {name: value.shape for name, value in model.named_parameters()} == shapes
        assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")


def test_the_model_is_built_without_memory_but_with_real_frequencies(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    config, _ = read_model_config(
        tmp_path, dtype="bfloat16", max_model_len=None, load_format="auto", seed=0, device_type="cpu"
    )
    model = build_model(config)
    assert {(p.device.type, p.dtype, p.requires_grad) for p in model.parameters()} == {("meta", torch.bfloat16, False)}
    assert {(b.device.type, b.dtype) for b in model.buffers()} == {("cpu", torch.float32)}

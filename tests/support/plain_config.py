"""A configuration as it is resolved, made by hand: nothing of it comes from a checkpoint or a device."""

from __future__ import annotations

from pathlib import Path

import torch

from compiled_engine.config import (
    CacheConfig,
    CompileConfig,
    EngineConfig,
    GraphConfig,
    GraphMode,
    ModelConfig,
    ParallelConfig,
    RopeConfig,
    SchedulerConfig,
    SpeculationConfig,
)

MODEL = ModelConfig(
    path=Path("model"),
    hub_name=None,
    revision=None,
    architecture="Qwen3ForCausalLM",
    vocab_size=101,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
    rope=RopeConfig(1e4),
    tie_word_embeddings=False,
    qkv_bias=False,
    attention_out_bias=False,
    mlp_bias=False,
    sliding_windows=(None, None),
    dtype=torch.float32,
    max_model_len=128,
    load_format="auto",
    seed=0,
)
BASE = EngineConfig(
    model=MODEL,
    tokenizer=None,
    cache=CacheConfig(16, None, 0.9, True),
    scheduler=SchedulerConfig(8, 256, 128, "fcfs"),
    compile=CompileConfig(True, (), ((1, 256),), False, False, 0, None),
    graph=GraphConfig(GraphMode.NONE),
    parallel=ParallelConfig(1, "in_process"),
    device=torch.device("cpu"),
    attention_backend="torch",
    reasons={},
    speculation=SpeculationConfig(),
    adapters=None,
    images=None,
    image_input=None,
    speech=None,
    kv_events=None,
    sleeps=False,
    logprobs_mode="raw_logprobs",
    batch_invariant=False,
)

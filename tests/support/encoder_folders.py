"""Tiny checkpoints of encoders, with transformers' model as the oracle."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from pooling_folders import VOCAB, write_modules
from tiny_tokenizers import byte_level, wrap
from tokenizers import Tokenizer as Backend
from tokenizers import processors
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedConfig
from transformers.models.bert import BertConfig
from transformers.models.distilbert import DistilBertConfig
from transformers.models.modernbert import ModernBertConfig
from transformers.models.mpnet import MPNetConfig
from transformers.models.nomic_bert import NomicBertConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.roberta import RobertaConfig
from transformers.models.xlm_roberta import XLMRobertaConfig

HIDDEN, LENGTH = 48, 320
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": LENGTH,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "bert": lambda: BertConfig(**TINY),
    "roberta": lambda: RobertaConfig(**TINY, pad_token_id=2),
    "xlm-roberta": lambda: XLMRobertaConfig(**TINY, pad_token_id=2, type_vocab_size=1),
    "distilbert": lambda: DistilBertConfig(
        vocab_size=VOCAB, dim=HIDDEN, n_layers=4, n_heads=4, hidden_dim=64, max_position_embeddings=LENGTH
    ),
    "modernbert": lambda: ModernBertConfig(**TINY, **SPECIAL, local_attention=24, global_attn_every_n_layers=3),
    "nomic": lambda: NomicBertConfig(**TINY),
    "mpnet": lambda: MPNetConfig(**TINY, pad_token_id=1),
    "qwen2, in both directions": lambda: Qwen2Config(**TINY, num_key_value_heads=2, is_causal=False),
}

if find_spec("transformers.models.gte"):  # from 5.18 on
    FAMILIES["gte"] = lambda: AutoConfig.for_model("gte", **TINY, type_vocab_size=0)


def _write(path: Path, model: Any) -> Any:
    torch.manual_seed(17)
    model = model.eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 1.5 / parameter.shape[1] ** 0.5)
        else:
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    model.save_pretrained(path)
    backend = Backend.from_str(byte_level().hf.backend_tokenizer.to_str())
    first, last = "<s>", "</s>"
    ends = [(token, backend.token_to_id(token)) for token in (first, last)]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", pair=f"{first} $A {last} $B:1 {last}:1", special_tokens=ends
    )
    wrap(backend, pad_token=last).hf.save_pretrained(path)
    stated = json.loads((path / "tokenizer_config.json").read_text())
    stated["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]  # as BERT's
    (path / "tokenizer_config.json").write_text(json.dumps(stated))
    return model


def make_encoder(path: Path, family: str = "bert", **modules: Any) -> Any:
    """Write a random encoder with a tokenizer and, if `modules` are given, modules; return the model."""
    config = FAMILIES[family]()
    model = _write(path, AutoModel.from_config(config, dtype=torch.float32))
    if modules:
        write_modules(path, width=HIDDEN, **modules)
    return model


def make_encoder_classifier(path: Path, family: str = "bert", num_labels: int = 3, **values: Any) -> Any:
    """Write a random classifier with a tokenizer, and return the model."""
    config = FAMILIES[family]()
    for name, value in {"num_labels": num_labels, **values}.items():
        setattr(config, name, value)
    return _write(path, AutoModelForSequenceClassification.from_config(config, dtype=torch.float32))

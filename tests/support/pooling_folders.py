"""Tiny checkpoints of models that pool, in the layouts of sentence-transformers and of transformers, with an oracle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoints import CONFIGS, TINY, make_checkpoint
from safetensors.torch import load_file, save_file
from tiny_tokenizers import byte_level
from torch import nn
from transformers import AutoModelForSequenceClassification

VOCAB = 400
NEW = {
    "Transformer": "sentence_transformers.base.modules.transformer",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling",
    "Dense": "sentence_transformers.base.modules.dense",
    "Normalize": "sentence_transformers.base.modules.normalize",
}
OLD = "sentence_transformers.models"


def write_modules(
    path: Path,
    kinds: Sequence[str] = ("lasttoken",),
    dense: Sequence[tuple[int, int, bool, str]] = (),
    *,
    normalize: bool = True,
    old: bool = False,
    width: int = 56,
    prompts: dict[str, str] | None = None,
    max_length: int | None = None,
) -> None:
    """Write the files of sentence-transformers, in its old or new spelling. dense: sizes, bias, activation of torch."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules += [(f"{2 + i}_Dense", "Dense") for i in range(len(dense))]
    modules += [(f"{2 + len(dense)}_Normalize", "Normalize")] * normalize
    listed = [
        {"idx": i, "name": str(i), "path": folder, "type": f"{OLD if old else NEW[kind]}.{kind}"}
        for i, (folder, kind) in enumerate(modules)
    ]
    (path / "modules.json").write_text(json.dumps(listed))
    old_names = {"lasttoken": "lasttoken", "mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "cls": "cls_token"}
    pooling: dict[str, Any] = {"word_embedding_dimension": width}
    if old:
        pooling |= {f"pooling_mode_{old_names.get(kind, f'{kind}_tokens')}": True for kind in kinds}
    else:
        pooling |= {"pooling_mode": kinds[0] if len(kinds) == 1 else list(kinds)}
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    generator = torch.Generator().manual_seed(5)
    for i, (rows, columns, bias, activation) in enumerate(dense):
        folder = path / f"{2 + i}_Dense"
        folder.mkdir()
        config = {"in_features": rows, "out_features": columns, "bias": bias, "activation_function": activation}
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {"linear.weight": torch.randn(columns, rows, generator=generator) / rows**0.5}
        if bias:
            tensors["linear.bias"] = torch.randn(columns, generator=generator)
        save_file(tensors, folder / "model.safetensors")
    if prompts is not None:
        values = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
        (path / "config_sentence_transformers.json").write_text(json.dumps(values))
    if max_length is not None:
        values = {"max_seq_length": max_length, "do_lower_case": False}
        (path / "sentence_bert_config.json").write_text(json.dumps(values))


def make_embedder(path: Path, family: str = "qwen3", *, alone: bool = False, **modules: Any) -> Any:
    """Write a random decoder with a tokenizer and modules, and return transformers' decoder.

    alone: stored without prefix and output projection, as a base model.
    """
    model = make_checkpoint(path, family, vocab_size=VOCAB)
    if alone:
        model.base_model.save_pretrained(path)
    byte_level().hf.save_pretrained(path)
    if modules:
        write_modules(path, **modules)
    return model.base_model


def make_classifier(path: Path, num_labels: int = 3, family: str = "qwen3", **config: Any) -> Any:
    """Write a random classifier of transformers with a tokenizer, and return the model."""
    torch.manual_seed(11)
    made = CONFIGS[family](**(TINY | {"vocab_size": VOCAB, "pad_token_id": 0, "num_labels": num_labels} | config))
    model = AutoModelForSequenceClassification.from_config(made, dtype=torch.float32).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 3 / parameter.shape[1] ** 0.5)
    model.save_pretrained(path)
    byte_level().hf.save_pretrained(path)
    return model


def hidden_states(decoder: Any, ids: Sequence[int]) -> torch.Tensor:
    """Return the hidden states of the last layer, [tokens, hidden]."""
    with torch.no_grad():
        return decoder(torch.tensor([list(ids)])).last_hidden_state[0]


def pooled(kinds: Sequence[str], hidden_TD: torch.Tensor) -> torch.Tensor:
    """Return the pooled hidden states of one text, by the definition of sentence-transformers."""
    count = len(hidden_TD)
    weights = torch.arange(1, count + 1).unsqueeze(1).float()
    found = {
        "cls": hidden_TD[0],
        "max": hidden_TD.max(dim=0).values,
        "mean": hidden_TD.mean(dim=0),
        "mean_sqrt_len_tokens": hidden_TD.sum(dim=0) / count**0.5,
        "weightedmean": (weights * hidden_TD).sum(dim=0) / weights.sum(),
        "lasttoken": hidden_TD[-1],
    }
    return torch.cat([found[kind] for kind in kinds])


def embedding(path: Path, decoder: Any, ids: Sequence[int], *, kinds: Sequence[str], **modules: Any) -> torch.Tensor:
    """Return the embedding of a text as the modules that `write_modules` wrote define it."""
    vector = pooled(kinds, hidden_states(decoder, ids))
    for i, (_, _, _, activation) in enumerate(modules.get("dense", ())):
        tensors = load_file(path / f"{2 + i}_Dense" / "model.safetensors")
        linear = nn.functional.linear(vector, tensors["linear.weight"], tensors.get("linear.bias"))
        vector = getattr(nn, activation.rpartition(".")[2])()(linear)
    return nn.functional.normalize(vector, dim=0) if modules.get("normalize", True) else vector


def make_reranker(path: Path) -> Any:
    """Write a random Qwen3 whose tokenizer has the tokens no and yes. Returns transformers' causal language model."""
    model = make_checkpoint(path, "qwen3", vocab_size=VOCAB, max_position_embeddings=1024)
    byte_level().hf.save_pretrained(path)
    values = json.loads((path / "tokenizer.json").read_text())
    vocabulary, merges = values["model"]["vocab"], values["model"]["merges"]
    for word, entry in zip(("no", "yes"), [*vocabulary][-2:], strict=True):
        vocabulary[word] = vocabulary.pop(entry)
        values["model"]["merges"] = merges = [pair for pair in merges if "".join(pair) != entry]
    (path / "tokenizer.json").write_text(json.dumps(values))
    return model


def assert_close(got: list[float] | torch.Tensor, expected: torch.Tensor) -> None:
    """Compare a result of the engine with the oracle's, in fp32."""
    values = torch.as_tensor(got)
    assert values.shape == expected.shape
    assert (values - expected).abs().max() <= 1e-4
    assert torch.nn.functional.cosine_similarity(values.flatten(), expected.flatten(), dim=0) >= 0.9999

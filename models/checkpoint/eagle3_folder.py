"""Read folders of EAGLE-3 heads in three formats: EAGLE-3's own, SpecForge's (used by SGLang) and speculators'.

The formats differ in tensor names, in where config.json states the layer's shape, in defaults, and in how layers of the
target model are counted. A head may have a smaller vocabulary than the target model: the tensor `d2t` holds, for each
draft token, the target model's token id minus the draft token id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from compiled_engine.config import HeadConfig, ModelConfig
from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.checkpoint.match_tensors import match_tensors
from compiled_engine.models.checkpoint.safetensors_files import map_tensors
from compiled_engine.models.checkpoint.textbook_config import textbook_model
from compiled_engine.models.textbook.architectures import build_model
from compiled_engine.models.textbook.eagle3 import EAGLE3

NAMES = (EAGLE3, "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
# speculators' field for the kind of draft model, its section for the layer's shape, and SpecForge's for layer ids.
SPECULATORS, LAYER, SPECFORGE = "speculators_model_type", "transformer_layer_config", "eagle_config"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
EMBEDDING = "embed_tokens.weight"
# Tensors that are no parameters: the vocabulary mappings in both directions, and one used in training only.
TOKENS = "d2t"
UNREAD = (TOKENS, "t2d", "mask_hidden")


def read_head(path: Path, target: ModelConfig, max_model_len: int, load_format: str) -> tuple[ModelConfig, list[int]]:
    """Return the configuration of a folder's head, and the layers of the target model whose inputs the head reads.

    Layers are counted from 0. target: the model to draft for. max_model_len: the head accepts positions up to this
    length, whatever length it was trained with. load_format: "dummy" for random weights; no tensors are read then.
    Raises ValueError for a field or tensor that is wrong or missing, and for a head of another model.
    """
    fields = JsonFields.from_file(path / "config.json")
    layer = _layer_fields(fields)
    layer = layer.replaced(architectures=["LlamaForCausalLM"], tie_word_embeddings=False)
    layer.require_values(num_hidden_layers=1)
    vocab_size, hidden_size = layer.integer("vocab_size"), layer.integer("hidden_size")
    of_target = f"that of the model it drafts for, {target.vocab_size}"
    layer.require("vocab_size", vocab_size == target.vocab_size, of_target)
    target_size = fields.integer("target_hidden_size", hidden_size)
    name = "target_hidden_size" if "target_hidden_size" in fields else "hidden_size"
    of_target = f"the hidden_size of the model it drafts for, {target.hidden_size}"
    (fields if name in fields else layer).require(name, target_size == target.hidden_size, of_target)
    draft_vocab_size = fields.integer("draft_vocab_size", vocab_size)
    fields.require("draft_vocab_size", draft_vocab_size <= vocab_size, f"at most vocab_size = {vocab_size}")
    layers = _layers(fields, target.num_layers)
    model, _ = textbook_model(layer.replaced(num_hidden_layers=1), path, target.dtype)
    head = HeadConfig(
        target_size=target_size,
        num_aux_layers=len(layers),
        vocab_size=draft_vocab_size,
        norm_before_residual=fields.boolean("norm_before_residual", SPECULATORS in fields),
        norm_before_fc=fields.boolean("norm_before_fc", False),
    )
    model = replace(
        model,
        architecture=EAGLE3,
        max_model_len=max_model_len,
        load_format=load_format,
        seed=target.seed,
        head=head,
        length_angles=None,  # a head's angles depend on positions alone, which changes only its drafts
    )
    if load_format != "dummy":
        tensors = map_tensors(path)
        match_tensors(head_tensors(tensors, model), build_model(model), model, None)
        draft_tokens(model, tensors)
    return model, layers


def _layer_fields(fields: JsonFields) -> JsonFields:
    if SPECULATORS in fields:
        fields.require_values(**{SPECULATORS: "eagle3"})
        return fields.section(LAYER)
    of_heads = f"that of a head ({', '.join(NAMES)}); a whole model is a 'draft_model'"
    fields.require("architectures", fields.texts("architectures")[0] in NAMES, of_heads)
    return fields


def is_head(path: Path) -> bool:
    """Return whether the folder holds an EAGLE-3 head; False if its config.json cannot be read."""
    try:
        fields = JsonFields.from_file(path / "config.json")
    except ValueError:
        return False
    names = fields.values.get("architectures")
    return SPECULATORS in fields or (isinstance(names, list) and any(name in NAMES for name in names))


def _layers(fields: JsonFields, num_layers: int) -> list[int]:
    """Return the target model's layers (from 0) whose inputs the head reads.

    These are the layers that the config states, or else [2, num_layers // 2, num_layers - 3]. num_layers: of the target
    model. A SpecForge id n means the output of layer n, which is the input of layer n + 1; in the other formats, as in
    vLLM, n means the input of layer n. Raises ValueError for layers that the model lacks.
    """
    section = fields.section(SPECFORGE)
    section.require_values(use_aux_hidden_state=True)
    in_section = LAYER_IDS in section
    stated = section if in_section else fields
    if LAYER_IDS not in stated:
        found = [2, num_layers // 2, num_layers - 3]
        if min(found) < 0 or max(found) >= num_layers:
            raise ValueError(
                f"{fields.source}: {LAYER_IDS} is missing, and the model of {num_layers} layers has none of the usual "
                f"ones, {found}; allowed: a list of layers from 0 to {num_layers - 1}"
            )
        return found
    ids, first = stated.values[LAYER_IDS], -1 if in_section else 0
    is_list = isinstance(ids, list) and len(ids) > 0 and all(type(each) is int for each in ids)
    if not is_list or any(not first <= each < first + num_layers for each in ids):
        last = first + num_layers - 1
        raise stated.error(LAYER_IDS, f"a list of whole numbers from {first} to {last}, layers of the model")
    return [each - first for each in ids]


def head_tensors(tensors: Mapping[str, torch.Tensor], model: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the tensors of a head's checkpoint, renamed to the parameter names of Eagle3Head.

    model: the head's configuration. If the checkpoint has no embedding, the head shares the target model's embedding: a
    meta tensor takes its place. Raises ValueError if the target model's embedding does not have the head's hidden size.
    """
    assert model.head is not None
    found = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    found = {
        f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name: tensor
        for name, tensor in found.items()
        if name not in UNREAD
    }
    if EMBEDDING not in found:
        if model.hidden_size != model.head.target_size:
            raise ValueError(
                f"{model.path} has no {EMBEDDING}, and the model's, of {model.head.target_size} columns, does not fit; "
                f"allowed: one of {model.hidden_size} columns"
            )
        found[EMBEDDING] = torch.empty(model.vocab_size, model.hidden_size, device="meta")
    return found


def has_embedding(model: ModelConfig) -> bool:
    """Return whether a head's folder holds an embedding; False if the head has random weights ("dummy")."""
    if model.load_format == "dummy":
        return False
    return any(name.removeprefix("model.") == EMBEDDING for name in map_tensors(model.path))


def draft_tokens(model: ModelConfig, tensors: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
    """Return the target model's token id of each draft token, int64 [Vd]. Vd: size of the draft vocabulary.

    model: the head's configuration. tensors: the tensors of the head's folder; None: read them. Without the tensor
    `d2t`, a draft token and its token of the target model have the same id. Raises ValueError if `d2t` is wrong, or
    missing although the draft vocabulary is smaller.
    """
    assert model.head is not None
    count, most = model.head.vocab_size, model.vocab_size
    own = torch.arange(count, device="cpu")
    if model.load_format == "dummy":
        return own
    distances = (map_tensors(model.path) if tensors is None else tensors).get(TOKENS)
    if distances is None:
        if count < most:
            raise ValueError(
                f"{model.path} has no tensor {TOKENS}, but draft_vocab_size is {count}; allowed without: {most}"
            )
        return own
    if distances.dtype not in (torch.int64, torch.int32) or tuple(distances.shape) != (count,):
        raise ValueError(
            f"{model.path}: {TOKENS} is {list(distances.shape)} of {str(distances.dtype).removeprefix('torch.')}; "
            f"allowed: [{count}] of int64, by draft_vocab_size"
        )
    token_ids = own + distances
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= most or len(token_ids.unique()) < count:
        raise ValueError(f"{model.path}: {TOKENS} must give {count} different tokens from 0 to {most - 1}")
    return token_ids

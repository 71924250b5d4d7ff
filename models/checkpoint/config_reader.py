"""Read config.json into a ModelConfig, with field names of transformers 4 or 5, without importing transformers."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from compiled_engine.config import ModelConfig
from compiled_engine.models.checkpoint.config_overrides import with_overrides
from compiled_engine.models.checkpoint.families import FAMILIES
from compiled_engine.models.checkpoint.foreign_config import foreign_model
from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.checkpoint.mtp_layer import without_mtp_layers
from compiled_engine.models.checkpoint.pooling_folder import (
    PoolingOptions,
    causal_name,
    headless_name,
    judged_by_tokens,
    read_pooling,
    stated_length,
    why_pooling,
)
from compiled_engine.models.checkpoint.quantisation_config import SECTION, read_quantisation
from compiled_engine.models.checkpoint.safetensors_files import find_shards, map_tensors
from compiled_engine.models.checkpoint.stored_tensors import stored_tensors
from compiled_engine.models.checkpoint.stored_weights import find_stored_weights
from compiled_engine.models.checkpoint.textbook_config import textbook_model
from compiled_engine.models.checkpoint.wrappers import text_model, text_tensors
from compiled_engine.models.foreign.description import UnknownArchitectureError
from compiled_engine.quantisation import HEAD, ROUTER, Quantisation, online
from compiled_engine.quantisation_names import MXFP4, ONLINE

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
POOLER = "re:pooler.*"  # small, and computed in fp32
# Modules that online quantisation skips by default: output projections and expert routers.
DEFAULT_IGNORE = (HEAD, ROUTER)
SPEECH_HEAD = "proj_out"  # the name of Whisper's head


def read_model_config(
    path: str | Path,
    *,
    dtype: str,
    max_model_len: int | None,
    load_format: str,
    seed: int,
    device_type: str,
    hub_name: str | None = None,
    revision: str | None = None,
    model_impl: str = "auto",
    cache_dir: Path | None = None,
    quantization: str | None = None,
    quantization_ignore: tuple[str, ...] = (),
    pooling: PoolingOptions | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[ModelConfig, dict[str, str]]:
    """Return the configuration of a checkpoint folder's model, and the reasons for chosen values by dotted field name.

    dtype, load_format, model_impl, quantization: as checked by EngineOptions. max_model_len: limit in tokens; None: the
    model's own limit. device_type: cpu or cuda. hub_name, revision: name and commit of a checkpoint from the hub, whose
    weights need not be downloaded yet; None for a local checkpoint. cache_dir: see `find_description`. quantization:
    None: as the checkpoint is quantised. quantization_ignore: names or patterns of linears to leave unquantised.
    pooling: the user's options for a pooling model. overrides: values that replace values of config.json.

    Raises ValueError for an argument or field that is wrong, missing or not supported.
    """
    path = Path(path)
    reasons: dict[str, str] = {}
    if not path.is_dir():
        raise ValueError(
            f"model must be a folder that holds a checkpoint, or org/name of the Hugging Face Hub, got {str(path)!r}, "
            "which is neither"
        )
    whole = with_overrides(JsonFields.from_file(path / "config.json"), overrides or {})
    fields, wrapper = text_model(whole)
    if overrides:
        reasons["model.overrides"] = f"hf_overrides: {', '.join(overrides)}"
    if wrapper is not None:
        reasons["model.wrapper"] = f"the text model of a {wrapper} runs alone; tensors of other parts are not read"
    fields, pooling = judged_by_tokens(fields, pooling or PoolingOptions())
    stated = fields
    architecture = stated.texts("architectures")[0]
    pools = why_pooling(architecture, path, pooling)
    if pools is not None:
        fields = fields.replaced(architectures=[causal_name(architecture)])
    textbook = _is_textbook(fields, model_impl, reasons)
    if pools is not None and fields.values.get("is_causal") is False:
        if model_impl == "textbook":
            raise fields.error("is_causal", "true for models of the textbook")
        textbook, reasons["model.transformers"] = False, "is_causal is false, and the textbook's models are causal"
    quantisation = _quantisation(fields, path, textbook, quantization, quantization_ignore)
    if quantisation is not None:
        fields = JsonFields(fields.source, {name: v for name, v in fields.values.items() if name != SECTION})
        reasons["model.quantisation.method"] = (
            f"quantization is {quantization!r}" if quantisation.is_online else "the checkpoint's"
        )
    if load_format == "auto":
        load_format, reasons["model.load_format"] = "safetensors", "the one checkpoint format that is read"
    if load_format == "safetensors" and hub_name is None:
        find_shards(path)
    if dtype == "auto":
        dtype, reasons["model.dtype"] = _auto_dtype(fields, path, load_format, device_type, hub_name)
    if textbook:
        model, origin = textbook_model(fields, path, DTYPES[dtype])
    else:
        names = fields.texts("architectures")[:1]
        if pools is not None and (architecture not in names or fields.values.get("is_causal") is False):
            names = list(dict.fromkeys((headless_name(architecture, pooling.convert), *names)))
        model, origin = _foreign_model(fields, path, DTYPES[dtype], cache_dir, names, architecture)
        if pools is None and (model.architecture != architecture or not model.causal):
            raise ValueError(f"{fields.source}: {architecture} generates no text; allowed: runner='pooling'")
    supported_length = model.max_model_len
    if pools is not None:
        reasons["model.pooling"] = pools
        found = read_pooling(stated, path, pooling, model.hidden_size, reasons, causal=model.causal)
        model = replace(model, pooling=found, token_types=model.token_types if found.own_head else 0)
        if (shorter := stated_length(path)) is not None and shorter[0] < supported_length:
            supported_length, origin = shorter
    if max_model_len is None:
        max_model_len, reasons["model.max_model_len"] = supported_length, origin
    if max_model_len > supported_length:
        raise ValueError(
            f"max_model_len must be a whole number from 1 to {supported_length} ({origin}), got {max_model_len!r}"
        )
    if quantisation is not None:
        heads = [HEAD] if model.speech is None else [HEAD, SPEECH_HEAD]
        kept = heads * model.tie_word_embeddings  # the head is the embedding, whose rows are looked up
        kept += [POOLER] * (pools is not None)
        quantisation = replace(quantisation, ignore=(*quantisation.ignore, *kept))
    angles = model.length_angles
    model = replace(
        model,
        hub_name=hub_name,
        revision=revision,
        load_format=load_format,
        seed=seed,
        wrapper=wrapper,
        max_model_len=max_model_len,
        length_angles=angles if angles is not None and max_model_len > angles.border else None,
        quantisation=quantisation,
        overrides=json.dumps(overrides, sort_keys=True) if overrides else "",
    )
    return _with_stored_weights(model, cache_dir), reasons


def _with_stored_weights(model: ModelConfig, cache_dir: Path | None) -> ModelConfig:
    """Return the model with rules that know how its checkpoint stores parameters, see `find_stored_weights`.

    Models of the textbook, weights that are quantised while they are loaded, random weights, and experts in MXFP4 have
    rules for the model's own names. If the weights are not downloaded yet, only the headers of their files are read.
    """
    rules = model.quantisation
    if rules is None or rules.is_online or rules.method == MXFP4:
        return model
    if model.transformers is None or model.load_format == "dummy":
        return model
    tensors = stored_tensors(model)
    if model.wrapper is not None:
        tensors, _ = text_tensors(tensors)
    tensors = without_mtp_layers(tensors, model.architecture)
    stored = find_stored_weights(model, rules, tensors, cache_dir)
    return replace(model, quantisation=replace(rules, stored=stored))


def _foreign_model(
    fields: JsonFields, path: Path, dtype: torch.dtype, cache_dir: Path | None, names: list[str], architecture: str
) -> tuple[ModelConfig, str]:
    """Return the configuration of a model that runs transformers' code, and the source of its max_model_len.

    names: architectures to try in order. architecture: the one that config.json states, for errors. Raises ValueError
    as `foreign_model` does; if transformers knows none of the names, the error also names the architectures that have
    textbook code.
    """
    try:
        return foreign_model(fields, path, dtype, cache_dir, names)
    except UnknownArchitectureError as error:
        decoder = f"the decoder of architecture {architecture!r}: " * (causal_name(architecture) != architecture)
        known = _known_to_the_textbook(fields.texts("architectures")[0])
        raise ValueError(f"{fields.source}: {decoder}{error}; {known}") from error


def _quantisation(
    fields: JsonFields, path: Path, textbook: bool, asked: str | None, ignore: tuple[str, ...]
) -> Quantisation | None:
    if textbook and fields.section(SECTION).values.get("quant_method") == MXFP4:
        raise ValueError(
            f"{fields.source}: quantization_config with quant_method 'mxfp4' is supported for models that run through "
            "transformers' code; allowed: model_impl='transformers'"
        )
    stated = read_quantisation(fields, path)
    if asked is None:
        if ignore:
            raise ValueError(f"quantization_ignore is {ignore!r}, but quantization is None; allowed: ()")
        return stated
    if stated is not None:
        if stated.method == asked and not ignore:  # the option repeats the checkpoint's own method
            return stated
        raise ValueError(
            f"quantization is {asked!r}, but {path} is quantised already, with {stated.method}; allowed: None"
        )
    if asked not in ONLINE:
        raise ValueError(
            f"quantization is {asked!r}, but {path} is not quantised; allowed: None, or {_one_of_online()}, which "
            "quantise weights while they are loaded"
        )
    return online(asked, ignore or DEFAULT_IGNORE)


def _one_of_online() -> str:
    *others, last = ONLINE
    return f"{', '.join(others)} or {last}"


def _is_textbook(fields: JsonFields, model_impl: str, reasons: dict[str, str]) -> bool:
    """Return whether to run textbook code, rather than transformers' code.

    If "auto" results in transformers' code, the reason is added to `reasons`. Raises ValueError if model_impl is
    "textbook" and there is no textbook code for the architecture.
    """
    name = fields.texts("architectures")[0]
    if name not in FAMILIES and model_impl == "textbook":
        raise ValueError(f"{fields.source}: architecture {name!r} is not known; {_known_to_the_textbook(name)}")
    if name not in FAMILIES and model_impl == "auto":
        reasons["model.transformers"] = f"the textbook has no {name}"
    return name in FAMILIES and model_impl != "transformers"


def _known_to_the_textbook(name: str) -> str:
    nearest = difflib.get_close_matches(name, FAMILIES, n=1, cutoff=0.0)[0]
    return f"the textbook has {', '.join(FAMILIES)} (the nearest name is {nearest})"


def _auto_dtype(
    fields: JsonFields, path: Path, load_format: str, device_type: str, hub_name: str | None
) -> tuple[str, str]:
    """Choose the dtype of a model for which the user gives none. Returns the dtype's name and the reason.

    Raises ValueError if the checkpoint's dtype is not supported, or not known before the weights are downloaded.
    """
    if device_type == "cpu":
        return "float32", "CPUs compute float32 fastest, and it holds every checkpoint exactly"
    name = "dtype" if "dtype" in fields else "torch_dtype"
    if name in fields:
        stated = fields.text(name).removeprefix("torch.")
        fields.require(name, stated in DTYPES, f"one of {', '.join(DTYPES)}")
        return stated, f"the checkpoint's, from {name} in config.json"
    if load_format == "dummy":
        return "bfloat16", "config.json states no dtype, and there are no weights to take it from"
    if hub_name is not None:
        raise ValueError(
            f"dtype is 'auto', but {fields.source} states none, and the weights of {hub_name} may not be there yet; "
            f"allowed: {', '.join(DTYPES)}"
        )
    tensors = map_tensors(path)
    first = next((name for name, tensor in tensors.items() if tensor.is_floating_point()), next(iter(tensors)))
    stored = str(tensors[first].dtype).removeprefix("torch.")
    if stored not in DTYPES:
        raise ValueError(f"{path}: {first} is stored as {stored}; it must be one of {', '.join(DTYPES)}")
    return stored, f"the checkpoint's, from {first}; config.json states none"

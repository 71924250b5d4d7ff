"""Detect, from a model's configuration and modules, the mechanisms that the model needs and the engine lacks."""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from compiled_engine.models.foreign.recurrence import recurrent_modules

# (pattern of module class names, mechanism that a matching class implements)
_MODULES = (
    ("(^|[^2])MambaMixer$", "the scan of Mamba 1, which has a state for each channel"),
    ("^Zamba2HybridLayer$", "blocks of attention that several layers share"),
    ("LightningAttention", "lightning attention"),
    ("Rglru", "a gated linear recurrence (RG-LRU)"),
    ("^Rwkv", "the recurrence of RWKV"),
    ("^xLSTM", "the recurrence of xLSTM"),
    ("Indexer$", "sparse attention by an index"),
    ("Compressor$", "attention to compressed keys and values"),
    ("BlockSparseAttention", "block-sparse attention"),
    ("LSHSelfAttention|LocalSelfAttention", "attention by hashes of keys"),
    ("CCAProjection", "convolutions of keys and queries"),
    ("HyperConnection$", "hyper-connections"),
    ("MoA$", "experts of attention heads"),
    ("^ProphetNetDecoder$", "attention in several streams of tokens ahead"),
    ("Patcher$", "patches of bytes"),
    ("^DiffLlamaAttention$", "differential attention"),
    ("^DogeAttention$", "masks that depend on values (dynamic mask attention)"),
    ("^T5Attention$|RelativeLogits$|RelativePositionBias$", "biases of attention scores by relative positions"),
    ("^Deberta", "scores of contents and relative positions (disentangled attention)"),
    ("^XLNetRelativeAttention$", "attention to relative positions in two streams"),
    ("^(Dbrx|LongcatFlash)Experts$", "experts outside of transformers' ExpertsInterface"),
    ("^LongcatFlashDecoderLayer$", "layers that attend twice"),
    ("^XmodOutput$", "adapters for each language"),
    ("^Conv1d$", "convolutions over tokens"),
)
# Config fields for the number of times that layers run.
_CYCLES = ("n_recurrent_loops", "H_cycles", "L_cycles")
# A method of embeddings that derive positions from token ids (RoBERTa).
_COUNTS = "create_position_ids_from_input_ids"


def first_position(model: nn.Module) -> int:
    """Return the position that a model gives to the first token of a text.

    It is the position of padding tokens plus 1 if the model has such a position (RoBERTa), otherwise 0.
    """
    for name, module in model.named_modules():
        is_padded = isinstance(module, nn.Embedding) and module.padding_idx is not None
        if is_padded and name.rpartition(".")[2] == "position_embeddings":
            return int(module.padding_idx) + 1  # type: ignore[arg-type]
    return 0


def is_decoder_alone(model: nn.Module | None) -> bool:
    """Return whether the model is the decoder of an encoder-decoder architecture, without the encoder."""
    decoder = getattr(getattr(model, "base_model", None), "decoder", None)
    if model is None or not isinstance(decoder, nn.Module):
        return False
    return not any(name.rpartition(".")[2] == "encoder" for name, _ in model.named_modules())


def num_layers_of(model: Any) -> int:
    """Return the number of decoder layers, as the model's configuration states it."""
    config = model.config.get_text_config(decoder=True)
    layers = vars(config).get("decoder_layers") if is_decoder_alone(model) else None
    return int(config.num_hidden_layers if layers is None else layers)


def missing_mechanisms(config: PreTrainedConfig, model: nn.Module | None, *, encodes: bool = False) -> tuple[str, ...]:
    """Return descriptions of the mechanisms that the model needs and the engine lacks; () if there are none.

    model: None if the model could not be built. encodes: whether the model is an encoder.
    """
    modules = [] if model is None else _outside_recurrences(model)
    classes = {type(module).__name__ for module in modules}
    found = [text for pattern, text in _MODULES if any(re.search(pattern, name) for name in classes)]

    def value(name: str) -> Any:
        return vars(config).get(name)

    stated = {
        "positions that are counted from the token ids": not encodes
        and any(hasattr(m, _COUNTS) for m in modules)
        and not (model is not None and first_position(model)),
        "chunked attention": "chunked_attention" in (value("layer_types") or ()),
        "layers that run several times": any((value(name) or 1) > 1 for name in _CYCLES),
        "the keys and values of another model": "Assistant" in type(config).__name__
        or (value("num_kv_shared_layers") and value("num_kv_shared_layers") == value("num_hidden_layers")),
        "an encoder": (config.is_encoder_decoder or value("encoder_layers")) and not is_decoder_alone(model),
        "encoders of images or sound within the decoder": value("vision_config") or value("audio_config"),
    }
    found += [text for text, needed in stated.items() if needed]
    general = "convolutions over tokens"  # most recurrences contain one
    return tuple(text for text in found if text != general or len(found) == 1)


def _outside_recurrences(model: nn.Module) -> list[nn.Module]:
    """Return the model's modules, except those within recurrent modules that the engine supports."""
    inside = {part for _, module in recurrent_modules(model) for part in module.modules() if part is not module}
    return [module for module in model.modules() if module not in inside]

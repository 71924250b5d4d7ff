"""Find the layer for multi-token prediction (MTP) that a checkpoint holds in addition to its model.

Each model family names the layer's tensors in its own way. Here the tensors are renamed: to the names in a model of the
family with a single layer, and for the projection to those of textbook.mtp.Projection. The MTP layer shares the model's
embedding and output projection; if a checkpoint stores copies for the layer, they are compared with the model's, but
not read. If there are several MTP layers, only the first one is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from compiled_engine.config import HeadConfig, ModelConfig
from compiled_engine.models.checkpoint.config_overrides import with_overrides
from compiled_engine.models.checkpoint.foreign_config import foreign_model
from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.checkpoint.quantisation_config import SECTION
from compiled_engine.models.checkpoint.safetensors_files import STORED_DTYPES
from compiled_engine.models.checkpoint.stored_tensors import stored_tensors
from compiled_engine.models.checkpoint.stored_weights import find_stored_weights
from compiled_engine.models.checkpoint.textbook_config import textbook_model
from compiled_engine.models.checkpoint.wrappers import text_model
from compiled_engine.models.textbook.mtp import NORM, PROJECTION
from compiled_engine.quantisation import HEAD, Quantisation

_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_EMBEDDING_NAME = "embed_tokens.weight"
_ROWS_COMPARED = 64


@dataclass(frozen=True)
class Layout:
    """The names that a model family gives the modules of its MTP layer, and how the layer differs from other layers."""

    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str  # after the decoder layer; empty if the model's last norm takes its place
    decoder_layer: str = ""  # prefix of the names of the decoder layer's tensors
    hidden_first: bool = False  # the projection reads the hidden state before the embedding
    # Fields of config.json to change, so that layer 0 of a model of the family has the structure of the MTP layer. If
    # config.json has a field with the prefix mtp_ and this name, a list of its first item is used instead.
    fields: Mapping[str, Any] = field(default_factory=dict)
    # A regular expression for tensor names, and its replacement, which puts the layer's number before the module name.
    spelling: tuple[str, str] = ("", "")

    def spelled(self, name: str) -> str:
        """Return a tensor's name rewritten by `spelling`, so that all names of an MTP layer have the same prefix."""
        pattern, spelling = self.spelling
        return re.sub(pattern, spelling, name) if pattern else name

    def prefixes(self, names: Collection[str]) -> list[str]:
        """Return, for each MTP layer in order, the prefix that its tensors' names have after `spelled`.

        names: the names of the checkpoint's tensors. Returns [] if the checkpoint has no MTP layer.
        """
        hidden_norm = re.compile(rf"(?P<prefix>(?:.+\.)?){self.hidden_norm}\.weight")
        found = [match["prefix"] for name in names if (match := hidden_norm.fullmatch(self.spelled(name)))]
        return sorted(found, key=lambda prefix: [int(number) for number in re.findall(r"\d+", prefix)])

    def num_layers(self, names: Collection[str]) -> int:
        """Return the number of MTP layers in a checkpoint. names: the names of its tensors.

        Each layer has a prefix of its own or, in Qwen's spelling, a number of its own after a common prefix.
        """
        prefixes = self.prefixes(names)
        if not prefixes:
            return 0
        numbered = re.escape(self.decoder_layer).replace("0", r"\d+")
        of_layer = re.compile(f"({'|'.join(map(re.escape, prefixes))}){numbered}")
        return len({match[0] for name in names if (match := of_layer.match(self.spelled(name)))})

    def own_name(self, name: str) -> str | None:
        """Return a tensor's name in the engine's draft model, whose only decoder layer is the MTP layer.

        Returns None for tensors that are not read: copies of the main model's embedding and output projection, and
        tensors that do not belong to the layer. name: the tensor's name without the layer's prefix.
        """
        modules = {
            self.embedding_norm: f"{PROJECTION}.embedding_norm",
            self.hidden_norm: f"{PROJECTION}.hidden_norm",
            self.projection: f"{PROJECTION}.proj",
            self.norm: NORM,
        }
        module, _, kind = name.rpartition(".")
        if module and module in modules:
            return f"{modules[module]}.{kind}"
        if name.startswith(_COPIES) or not name.startswith(self.decoder_layer):
            return None
        return f"model.layers.0.{name.removeprefix(self.decoder_layer)}"


# Copies of the model's embedding and output projection.
_COPIES = ("embed_tokens.", "shared_head.head.", "shared_head.weight")
_DEEPSEEK = "enorm", "hnorm", "eh_proj"
_ATTENDS = {"layer_types": ["full_attention"]}
_QWEN = Layout("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0.", fields=_ATTENDS)
_SLIDES = {"layer_types": ["sliding_attention"], "mlp_layer_types": ["sparse"]}
_DENSE_BEFORE = Layout(*_DEEPSEEK, "shared_head.norm", fields={"first_k_dense_replace": 0})
LAYOUTS = {
    "DeepseekV3ForCausalLM": _DENSE_BEFORE,
    "Ernie4_5_MoeForCausalLM": Layout(
        *("mtp_emb_norm", "mtp_hidden_norm", "mtp_linear_proj", "", "mtp_block."),
        spelling=(r"^model\.(mtp_\w+)\.(\d+)\.", r"model.mtp.\2.\1."),
    ),
    "Glm4MoeForCausalLM": _DENSE_BEFORE,
    "Glm4MoeLiteForCausalLM": Layout(*_DEEPSEEK, "shared_head.norm", fields={"mlp_layer_types": ["sparse"]}),
    "HYV3ForCausalLM": Layout(*_DEEPSEEK, "final_layernorm", fields={"mlp_layer_types": ["sparse"]}),
    "MellumForCausalLM": replace(_QWEN, fields=_SLIDES),
    "MiMoForCausalLM": Layout(
        *("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        hidden_first=True,
        fields=_ATTENDS,
    ),
    "Qwen3ForCausalLM": _QWEN,
    "Qwen3NextForCausalLM": _QWEN,
    "Qwen3_5ForCausalLM": _QWEN,
    "Qwen3_5MoeForCausalLM": _QWEN,
}


def read_mtp_layer(
    target: ModelConfig, max_model_len: int, cache_dir: Path | None, reasons: dict[str, str]
) -> ModelConfig:
    """Return the configuration of a draft model that consists of the MTP layer in the checkpoint of `target`.

    max_model_len: the layer accepts positions up to this length. cache_dir: see `find_description`. If the weights are
    not downloaded yet, only the headers of their files on the hub are read. If there are several MTP layers, adds to
    `reasons`, under `speculation.method`, that the first one makes all drafts. Raises ValueError if no MTP layer is
    known for the model's family, or if the checkpoint has none that can be read; also raises the errors of
    `describe_weights`.
    """
    layout = LAYOUTS.get(target.architecture)
    if layout is None:
        raise ValueError(f"no MTP layer of {target.architecture} is known; allowed: models of {', '.join(LAYOUTS)}")
    if target.quantisation is not None and (scheme := target.quantisation.scheme_of(_OUTPUT.removesuffix(".weight"))):
        raise ValueError(
            f"the output projection of {target.path}, which the MTP layer shares, is quantised ({scheme}); allowed: "
            "one in 16 or 32 bits"
        )
    whole = JsonFields.from_file(target.path / "config.json")
    fields, _ = text_model(with_overrides(whole, json.loads(target.overrides or "{}")))
    values = {name: value for name, value in fields.values.items() if name != SECTION}
    stated = {name: values[f"mtp_{name}"][:1] for name in layout.fields if values.get(f"mtp_{name}")}
    single = JsonFields(fields.source, values | {"num_hidden_layers": 1, **layout.fields, **stated})
    if target.transformers is None:
        model, _ = textbook_model(single, target.path, target.dtype)
    else:
        model, _ = foreign_model(single, target.path, target.dtype, cache_dir, [target.architecture])
    quantisation = None
    if target.load_format != "dummy":
        stored = stored_tensors(target, partial(_of_layers, layout))
        tensors = _tensors_of_layer(stored, target)
        if (count := layout.num_layers(stored.keys())) > 1:
            reasons["speculation.method"] = f"the first of {count} MTP layers makes all drafts"
        quantisation = _quantisation(tensors, target.quantisation, target.path)
        if quantisation is not None and model.transformers is not None:
            quantisation = replace(quantisation, stored=find_stored_weights(model, quantisation, tensors, cache_dir))
    return replace(
        model,
        hub_name=target.hub_name,
        revision=target.revision,
        max_model_len=max_model_len,
        load_format=target.load_format,
        seed=target.seed,
        wrapper=target.wrapper,
        overrides=target.overrides,
        quantisation=quantisation,
        length_angles=None,  # as in eagle3_folder
        head=HeadConfig(
            model.hidden_size, 0, model.vocab_size, hidden_first=layout.hidden_first, shares_norm=not layout.norm
        ),
    )


def _of_layers(layout: Layout, names: Collection[str]) -> list[str]:
    prefixes = tuple(layout.prefixes(names))
    return [name for name in names if prefixes and layout.spelled(name).startswith(prefixes)]


def _tensors_of_layer(tensors: Mapping[str, torch.Tensor], model: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint's first MTP layer, renamed by `Layout.own_name`.

    tensors: the checkpoint's. model: the configuration of the main model or of the layer. Raises ValueError if there is
    no MTP layer, or if the layer's embedding or output projection differs from the model's, see `_require_copy`.
    """
    layout = LAYOUTS[model.architecture]
    prefixes = layout.prefixes(tensors.keys())
    if not prefixes:
        raise ValueError(
            f"{model.path} has no MTP layer: the tensor {layout.hidden_norm}.weight is missing; allowed: a checkpoint "
            "that holds the layer too"
        )
    spelled = {layout.spelled(name): tensor for name, tensor in tensors.items()}
    stated = {name: tensor for name, tensor in spelled.items() if name.startswith(prefixes[0])}
    own_names = {name: layout.own_name(name.removeprefix(prefixes[0])) for name in stated}
    of_model = {name: tensor for name, tensor in spelled.items() if not name.startswith(tuple(prefixes))}
    for name, own in own_names.items():
        if own is None and name.removeprefix(prefixes[0]).startswith(_COPIES):
            _require_copy(name, stated[name], of_model, model.path)
    return {own: stated[name] for name, own in own_names.items() if own is not None}


def _require_copy(name: str, tensor: torch.Tensor, of_model: Mapping[str, torch.Tensor], path: Path) -> None:
    """Raise ValueError if `tensor`, the embedding or output projection of an MTP layer, is not a copy of the model's.

    Only some rows are compared. If the model has no output projection of its own (tied), its embedding is compared
    instead. Nothing is checked if the model's tensor is missing or on the meta device, or if `tensor` is not floating
    point. name: the name of `tensor`. of_model: the model's tensors by name.
    """
    wanted = (_EMBEDDING_NAME,) if name.endswith(_EMBEDDING_NAME) else (_OUTPUT, _EMBEDDING_NAME)
    found = (original for end in wanted for each, original in of_model.items() if each.endswith(end))
    original = next(found, None)
    if original is None or original.is_meta or not tensor.is_floating_point():
        return
    rows = torch.linspace(0, len(original) - 1, min(len(original), _ROWS_COMPARED)).long()
    if tensor.shape != original.shape or not torch.equal(tensor[rows].float(), original[rows].float()):
        raise ValueError(
            f"{path}: {name} of the MTP layer differs from the model's; allowed: a layer that shares the model's "
            "embedding and output projection"
        )


def _quantisation(
    tensors: Mapping[str, torch.Tensor], of_model: Quantisation | None, path: Path
) -> Quantisation | None:
    """Return the quantisation of an MTP layer; None if all its tensors are stored unquantised.

    The rules are the model's. They apply to the matrices of the layer that are stored as quantised codes; the other
    matrices are listed to be ignored, since the model's rules may not list them. tensors: the layer's. of_model: the
    model's quantisation. Raises ValueError if the layer has codes but the checkpoint is not quantised.
    """
    coded = [name for name, tensor in tensors.items() if tensor.dtype not in STORED_DTYPES]
    if not coded:
        return None
    if of_model is None or of_model.is_online:
        dtypes = sorted({str(tensors[name].dtype).removeprefix("torch.") for name in coded})
        raise ValueError(
            f"{path}: the MTP layer is stored as {', '.join(dtypes)}, and config.json does not say how; allowed: a "
            "layer in 16 or 32 bits"
        )
    matrices = (name for name, tensor in tensors.items() if name.endswith(".weight") and tensor.dim() > 1)
    kept = tuple(name.removesuffix(".weight") for name in matrices if name not in coded)
    return replace(of_model, ignore=(HEAD, *kept), stored=())


def mtp_tensors(tensors: Mapping[str, torch.Tensor], model: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint's MTP layer, by their names in the draft model.

    tensors: the checkpoint's. model: the draft model's configuration, from `read_mtp_layer`. Meta tensors take the
    place of the parameters that the layer shares with the main model. Raises the errors of `_tensors_of_layer`.
    """
    shapes = shared_shapes(model)
    if model.tie_word_embeddings:
        del shapes[_OUTPUT]
    of_model = {name: torch.empty(shape, dtype=model.dtype, device="meta") for name, shape in shapes.items()}
    return _tensors_of_layer(tensors, model) | of_model


def has_mtp_layer(names: Collection[str], architecture: str) -> bool:
    """Return whether a checkpoint with these tensor names has an MTP layer. architecture: the main model's."""
    layout = LAYOUTS.get(architecture)
    return layout is not None and bool(layout.prefixes(names))


def shared_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters that an MTP layer shares with its main model, by name.

    These are the embedding, the output projection and, in some families, the last norm. model: the configuration from
    `read_mtp_layer`.
    """
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys((_EMBEDDING, _OUTPUT), (model.vocab_size, model.hidden_size))
    if model.head is not None and model.head.shares_norm:
        shapes[f"{NORM}.weight"] = (model.hidden_size,)
    return shapes


def without_mtp_layers(tensors: dict[str, torch.Tensor], architecture: str) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors without those of MTP layers. architecture: the main model's."""
    layout = LAYOUTS.get(architecture)
    prefixes = () if layout is None else tuple(layout.prefixes(tensors.keys()))
    if layout is None or not prefixes:
        return tensors
    return {name: tensor for name, tensor in tensors.items() if not layout.spelled(name).startswith(prefixes)}

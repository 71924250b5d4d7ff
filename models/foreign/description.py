"""Describes a transformers model. Descriptions are cached in files, so that later starts need not import transformers.

The file name is a digest of everything that the description depends on: config.json, dtype, the versions of
transformers and torch, and the source code of this package.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from dataclasses import dataclass
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compiled_engine.config import LengthAngles, RowState
from compiled_engine.speech import SpeechDescription

FOLDER = "models"
_SOURCE = Path(__file__).parent
log = logging.getLogger("compiled_engine")

IMPORTING = threading.RLock()
"""Must be held while transformers is imported: its modules import each other in circles, so a second importing thread
could see a half-initialised module."""


class UnknownArchitectureError(ValueError):
    """Raised for an architecture that transformers' own code does not have."""


@dataclass(frozen=True)
class TensorDescription:
    """The description of a model's parameter, or of a buffer together with its values."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    tied: str = ""  # name of the parameter that it shares; empty: none
    persistent: bool = True
    by_columns: bool = False  # the last two dimensions are stored column-major
    values: Any = None


@dataclass(frozen=True)
class LayerShape:
    """The number and size of a layer's heads, and the other settings of its attention; see attention.inputs.Scoring."""

    num_heads: int  # 0: the layer has no attention
    num_kv_heads: int
    head_dim: int  # of keys or of values, whichever are larger
    # Visible keys per query, its own included; None: all. Without causal: keys on each side.
    sliding_window: int | None
    soft_cap: float  # 0: none
    sinks: bool
    causal: bool = True  # a query sees no later keys
    latent_dim: int = 0  # see HeadShape, like key_dim and value_dim
    key_dim: int = 0
    value_dim: int = 0
    kv_layer: int | None = None  # an earlier layer, whose keys and values this one reads; None: it has its own
    linear_bias: bool = False  # keys have their positions as elements, see alibi.py
    num_biases: int = 0  # of scores, by relative position, see attention.op.packed_attention; 0: none


@dataclass(frozen=True)
class Description:
    """The description of a model: its sizes, each layer's attention, all tensors, and the states of its recurrences.

    length_angles: how rotary angles depend on a request's length; None: they do not. For a speech model, layers and
    sizes are those of the decoder, and `speech` describes the encoder.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_position_embeddings: int  # longest text, in tokens
    layers: tuple[LayerShape, ...]
    parameters: tuple[TensorDescription, ...]
    buffers: tuple[TensorDescription, ...]
    token_types: int = 0  # number of token types; 0: the code reads none
    states: tuple[RowState, ...] = ()
    length_angles: LengthAngles | None = None
    speech: SpeechDescription | None = None
    padding_id: int | None = None  # a token for which a decoder counts no position; None: there is none

    @staticmethod
    def from_json(text: str) -> Description:
        data = json.loads(text)
        tensors: Any = {
            kind: tuple(TensorDescription(**item | {"shape": tuple(item["shape"])}) for item in data.pop(kind))
            for kind in ("parameters", "buffers")
        }
        layers = tuple(LayerShape(**layer) for layer in data.pop("layers"))
        states = tuple(RowState(**state | {"shape": tuple(state["shape"])}) for state in data.pop("states"))
        angles = data.pop("length_angles")
        by_length = None if angles is None else LengthAngles(**angles)
        encoder = data.pop("speech")
        speech = None if encoder is None else SpeechDescription(**encoder)
        return Description(layers=layers, states=states, length_angles=by_length, speech=speech, **tensors, **data)


class Skeleton(nn.Module):
    """A module without code, which only holds tensors with a model's names and shapes, to be allocated and loaded."""


def description_file(config_json: str, dtype: torch.dtype, cache_dir: Path | None) -> Path | None:
    """Return the path of the file for the model's description; None if there is no cache folder."""
    if cache_dir is None:
        return None
    source = [path.read_bytes() for path in sorted(_SOURCE.glob("*.py"))]
    facts = [config_json, str(dtype), transformers_version(), torch.__version__]
    digest = hashlib.sha256(b"\0".join([*(fact.encode() for fact in facts), *source])).hexdigest()[:32]
    return cache_dir / FOLDER / f"{digest}.json"


def transformers_version() -> str:
    """Return the installed version of transformers, without importing the package."""
    return version_of("transformers")


def read_file(path: Path) -> str:
    """Return the text of a file that `write_file` wrote. Raises ValueError if the text does not match its digest."""
    digest, _, text = path.read_text(encoding="utf-8").partition("\n")
    if digest != _digest(text):
        raise ValueError("its digest does not match")
    return text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_file(path: Path | None, text: str) -> None:
    """Write a file with the text and its digest, atomically. If `path` is None, do nothing.

    An OSError is only logged; the text is then computed again in the next start.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(f"{_digest(text)}\n{text}", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        log.debug("%s is not written (%s)", path, error)


def skeleton(description: Description) -> Skeleton:
    """Build the skeleton of a described model.

    Its parameters are on the meta device, tied as described. Its buffers have their values, on the CPU.
    """
    model = Skeleton()
    made: dict[str, nn.Parameter] = {}
    for item in description.parameters:
        if not item.tied:
            empty = torch.empty(item.shape, dtype=getattr(torch, item.dtype), device="meta")
            if item.by_columns:
                empty = empty.mT.contiguous().mT
            made[item.name] = nn.Parameter(empty, requires_grad=False)
        owner, _, attribute = item.name.rpartition(".")
        _submodule(model, owner).register_parameter(attribute, made[item.tied or item.name])
    for item in description.buffers:
        owner, _, attribute = item.name.rpartition(".")
        values = torch.tensor(item.values, dtype=getattr(torch, item.dtype)).reshape(item.shape)
        _submodule(model, owner).register_buffer(attribute, values, persistent=item.persistent)
    return model


def _submodule(model: nn.Module, path: str) -> nn.Module:
    for name in path.split(".") if path else []:
        if name not in model._modules:
            model.add_module(name, Skeleton())
        model = model.get_submodule(name)
    return model

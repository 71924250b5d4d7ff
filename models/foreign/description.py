"""The description of a foreign model, kept as a file: later starts do not import transformers.

The file's name is a digest of everything that it depends on: config.json, dtype, versions, and the source of this
package.
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

from compiled_engine.config import RowState

FOLDER = "models"
_SOURCE = Path(__file__).parent
log = logging.getLogger("compiled_engine")

IMPORTING = threading.RLock()
"""Held by a thread that may import modules of transformers, which import one another in circles: another thread that
imports some of them at the same time may find one without its names."""


class UnknownArchitectureError(ValueError):
    """transformers has no model of that name in its own code."""


@dataclass(frozen=True)
class TensorDescription:
    """A parameter, or a buffer with its `values`. `tied`: the name of the parameter that it is, or empty. `by_columns`:
    of its last two dimensions the first has its elements in a row."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    tied: str = ""
    persistent: bool = True
    by_columns: bool = False
    values: Any = None


@dataclass(frozen=True)
class LayerShape:
    """Attention of one layer: heads (0: it does not attend), visible keys per query (None: all), and soft cap and sinks
    as in attention.inputs.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None
    soft_cap: float
    sinks: bool
    causal: bool = True


@dataclass(frozen=True)
class Description:
    """Sizes, what each layer's attention is like, all tensors, and the states of recurrences.

    max_position_embeddings: tokens of a text. token_types: how many types tokens may have; 0 if the code reads none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_position_embeddings: int
    layers: tuple[LayerShape, ...]
    parameters: tuple[TensorDescription, ...]
    buffers: tuple[TensorDescription, ...]
    token_types: int = 0
    states: tuple[RowState, ...] = ()

    @staticmethod
    def from_json(text: str) -> Description:
        data = json.loads(text)
        tensors: Any = {
            kind: tuple(TensorDescription(**item | {"shape": tuple(item["shape"])}) for item in data.pop(kind))
            for kind in ("parameters", "buffers")
        }
        layers = tuple(LayerShape(**layer) for layer in data.pop("layers"))
        states = tuple(RowState(**state | {"shape": tuple(state["shape"])}) for state in data.pop("states"))
        return Description(layers=layers, states=states, **tensors, **data)


class Skeleton(nn.Module):
    """The names and shapes of a model's tensors as modules, without its code: to be given memory and weights."""


def description_file(config_json: str, dtype: torch.dtype, cache_dir: Path | None) -> Path | None:
    """The path of the description; None if none is kept."""
    if cache_dir is None:
        return None
    source = [path.read_bytes() for path in sorted(_SOURCE.glob("*.py"))]
    facts = [config_json, str(dtype), transformers_version(), torch.__version__]
    digest = hashlib.sha256(b"\0".join([*(fact.encode() for fact in facts), *source])).hexdigest()[:32]
    return cache_dir / FOLDER / f"{digest}.json"


def transformers_version() -> str:
    """The version of the installed package, which is not imported."""
    return version_of("transformers")


def read_file(path: Path) -> str:
    """Return the text that write_file has written. Raises ValueError if its digest does not match."""
    digest, _, text = path.read_text(encoding="utf-8").partition("\n")
    if digest != _digest(text):
        raise ValueError("its digest does not match")
    return text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_file(path: Path | None, text: str) -> None:
    """Write a file atomically, after its digest; a file that cannot be written is made again next time."""
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
    """Parameters on the meta device, tied where they are tied, buffers with their values on the CPU."""
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

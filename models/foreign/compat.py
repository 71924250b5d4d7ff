"""Contains all uses of transformers beyond its public interface, and states the tested versions of transformers."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

# Tested versions of transformers: [OLDEST, NEWEST). pyproject.toml has the same upper bound.
OLDEST, NEWEST = (5, 17), (5, 25)


def supported_version() -> str:
    """Return the installed version of transformers. Raises ValueError if it is not supported."""
    found = version("transformers")
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if not OLDEST <= numbers < NEWEST:
        span = f">={'.'.join(map(str, OLDEST))},<{'.'.join(map(str, NEWEST))}"
        raise ValueError(f"model_impl 'transformers' needs transformers {span}, found {found}")
    return found


def causal_lm_name(config: PreTrainedConfig) -> str | None:
    """Return the name of transformers' causal language model for a configuration; None if there is none."""
    found = causal_lm_class(config)
    return None if found is None else found.__name__


def causal_lm_class(config: PreTrainedConfig) -> Any:
    """Return transformers' class of the causal language model for a configuration; None if there is none.

    For the text model of some multimodal models (Mllama, Emu3), transformers lists the class under the type of the
    multimodal model.
    """
    mapping: Any = AutoModelForCausalLM._model_mapping
    if type(config) in mapping:
        return mapping[type(config)]
    for whole in vars(sys.modules[type(config).__module__]).values():
        parts = getattr(whole, "sub_configs", None) or {}
        if (
            parts.get("text_config") is type(config)
            and whole in mapping
            and mapping[whole].config_class is type(config)
        ):
            return mapping[whole]
    return None


def encoder_names(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the Auto classes that build a configuration's model without a head, and its classifier, if they exist.

    The keys are the names of the model classes that they build.
    """
    found: dict[str, Any] = {}
    for auto in (AutoModel, AutoModelForSequenceClassification):
        mapping: Any = auto._model_mapping
        if type(config) in mapping:
            made = mapping[type(config)]
            found[(made[0] if isinstance(made, tuple) else made).__name__] = auto
    return found


def mixed(ours: type, theirs: type) -> type:
    """Return a subclass of `ours` and `theirs`, in this order, with the name and __module__ of `theirs`.

    An object of class `theirs` keeps its parameters' names if its class is replaced by the subclass. The same arguments
    give the same class, so that identical layers of a model stay identical, and only few of them are traced. The
    __module__ matters, because transformers treats a class outside of its own modules as custom code, and does not
    convert the weights.
    """
    made: type = _mixed(ours, theirs)
    return made


@cache
def _mixed(ours: Any, theirs: Any) -> Any:
    return type(theirs.__name__, (ours, theirs), {"__module__": theirs.__module__})


def fill_buffers(model: PreTrainedModel) -> None:
    """Move the model's buffers from the meta device to the CPU, and compute their values.

    As transformers does, the values are computed by `_init_weights` of the innermost PreTrainedModel that contains the
    module with the buffer. They are, for example, rotary frequencies, and multipliers within layers (Falcon H1).
    """
    owners = {m: inner for inner in model.modules() if isinstance(inner, PreTrainedModel) for m in inner.modules()}
    having = [module for module in model.modules() if any(True for _ in module.buffers())]
    for module in having:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    for module in having:
        with torch.no_grad():
            owners[module]._init_weights(module)


def ignored_tensors(model: PreTrainedModel) -> re.Pattern[str]:
    """Return a pattern for the names of checkpoint tensors that the model does not use.

    It matches the names that transformers declares as ignored, and buffers in old checkpoints that the model computes
    itself.
    """
    declared = sorted(model._keys_to_ignore_on_load_unexpected or ())
    return re.compile("|".join(f"(?:{pattern})" for pattern in (*declared, r"(^|\.)(inv_freq|position_ids)$")))


class Conversions:
    """The conversions by which transformers turns a checkpoint's names and tensors into those of `model`.

    names: the names of the model's parameters.
    """

    def __init__(self, model: PreTrainedModel, names: Iterable[str]) -> None:
        transforms = get_model_conversion_mapping(model)
        self._model = model
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._by_pattern = {pattern: c for c in self._converters for pattern in c.source_patterns}
        self._known = dict.fromkeys(names, True)

    def target(self, name: str) -> tuple[str, WeightConverter | None, str]:
        """Return (name in the model, converter, source pattern) for the checkpoint tensor `name`.

        If the tensor is not converted, the converter is None and the pattern is "". Tensors with the same name in the
        model and the same converter are converted together. The source pattern is the converter's pattern that matches
        the tensor; it tells the tensors apart.
        """
        prefix = self._model.base_model_prefix
        renamed, pattern = rename_source_key(name, self._renamings, self._converters, prefix, self._known)
        return (renamed, None, "") if pattern is None else (renamed, self._by_pattern[pattern], pattern)


def in_natural_order(names: Iterable[str]) -> list[str]:
    """Return the names sorted, with the numbers in them compared as numbers, so that expert 2 precedes expert 10."""
    return sorted(names, key=dot_natural_key)


def operations_of(converter: Any) -> list[Any]:
    """Return the operations of a weight converter, in order."""
    return list(converter.operations)

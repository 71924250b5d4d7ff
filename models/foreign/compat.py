"""Uses of transformers beyond its public interface, and the versions that have it, in one place."""

from __future__ import annotations

import re
from collections.abc import Iterable
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

# The versions of transformers that were tried: [OLDEST, NEWEST). pyproject.toml has the same upper bound.
OLDEST, NEWEST = (5, 17), (5, 25)


def supported_version() -> str:
    """Return the installed version of transformers. Raises ValueError for one outside the supported range."""
    found = version("transformers")
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if not OLDEST <= numbers < NEWEST:
        span = f">={'.'.join(map(str, OLDEST))},<{'.'.join(map(str, NEWEST))}"
        raise ValueError(f"model_impl 'transformers' needs transformers {span}, found {found}")
    return found


def causal_lm_name(config: PreTrainedConfig) -> str | None:
    """The class that transformers has for a configuration as a causal language model; None if it has none."""
    mapping: Any = AutoModelForCausalLM._model_mapping
    return mapping[type(config)].__name__ if type(config) in mapping else None


def encoder_names(config: PreTrainedConfig) -> dict[str, Any]:
    """The classes that transformers has for a configuration as a model without a head and as a classifier: the Auto
    class that makes each, by its name.
    """
    found: dict[str, Any] = {}
    for auto in (AutoModel, AutoModelForSequenceClassification):
        mapping: Any = auto._model_mapping
        if type(config) in mapping:
            made = mapping[type(config)]
            found[(made[0] if isinstance(made, tuple) else made).__name__] = auto
    return found


def fill_buffers(model: PreTrainedModel) -> None:
    """Give buffers that were made on the meta device their values, on the CPU.

    transformers does this after each construction on the meta device: `_init_weights` computes rotary frequencies
    again.
    """
    for module in model.modules():
        if not module._buffers:
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
        with torch.no_grad():
            model._init_weights(module)


def ignored_tensors(model: PreTrainedModel) -> re.Pattern[str]:
    """Return a pattern of the names of unused tensors in checkpoints: names that transformers declares, and buffers of
    old checkpoints that the model computes itself."""
    declared = sorted(model._keys_to_ignore_on_load_unexpected or ())
    return re.compile("|".join(f"(?:{pattern})" for pattern in (*declared, r"(^|\.)(inv_freq|position_ids)$")))


class Conversions:
    """transformers' conversion of the names and tensors of a checkpoint to those of a model."""

    def __init__(self, model: PreTrainedModel, names: Iterable[str]) -> None:
        transforms = get_model_conversion_mapping(model)
        self._model = model
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._by_pattern = {pattern: c for c in self._converters for pattern in c.source_patterns}
        self._known = dict.fromkeys(names, True)

    def target(self, name: str) -> tuple[str, WeightConverter | None, str]:
        """Look up a tensor of the checkpoint: its name in the model, and its converter, if any.

        Tensors with the same name and converter are converted together; the last of the three identifies the tensor
        among the converter's sources.
        """
        prefix = self._model.base_model_prefix
        renamed, pattern = rename_source_key(name, self._renamings, self._converters, prefix, self._known)
        return (renamed, None, "") if pattern is None else (renamed, self._by_pattern[pattern], pattern)


def in_natural_order(names: Iterable[str]) -> list[str]:
    """Names with numbers in the order of the numbers: experts in their order."""
    return sorted(names, key=dot_natural_key)


def operations_of(converter: Any) -> list[Any]:
    """The operations of a converter, in order."""
    return list(converter.operations)

"""Read a LoRA adapter as PEFT writes it: adapter_config.json and adapter_model.safetensors.

The names of the tensors say which modules are adapted; `target_modules` is not read, as it may be a regular expression.
A linear W [N, K] becomes W + scale * B A, with A [r, K] and B [N, r] (Hu et al., arXiv:2106.09685). The scale is
lora_alpha / r, or with rslora lora_alpha / sqrt(r) (Kalajdzievski, arXiv:2312.03732).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from compiled_engine.models.checkpoint.adapter_files import (
    LOW_RANK,
    PREFIX,
    WEIGHTS_FILE,
    digest_of,
    open_weights,
    read_adapter_config,
)
from compiled_engine.models.checkpoint.file_names import name_some
from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.checkpoint.safetensors_files import STORED_DTYPES

# The modules that may be tied, as textbook models and most of transformers' name them.
OUTPUT, EMBEDDING = "lm_head", "embed_tokens"
_MAGNITUDE = re.compile(r"(?P<module>.+)\.lora_magnitude_vector(\.weight)?")
# Whether a bias was trained, the config says.
_BASE, _BASE_BIAS = ".base_layer.weight", ".base_layer.bias"


@dataclass(frozen=True)
class LowRank:
    """The change of a linear, scale * B A: a_RK, b_NR as stored. Of an embedding [V, D]: its transpose, [D, V].

    magnitude_N: with DoRA, the norm of each row of the changed weight (Liu et al., arXiv:2402.09353); None without.
    """

    a_RK: torch.Tensor
    b_NR: torch.Tensor
    scale: float
    magnitude_N: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        return self.a_RK.shape[0]


@dataclass(frozen=True)
class Adapter:
    """The content of an adapter's folder, memory-mapped; modules by the name that the base model has for them.

    whole: tensors that replace those of the base model, by their names (modules_to_save). bases: by module, the weight
    that the matrices of an embedding or of the output projection were trained on, which PEFT saves with them. digest:
    of both files. transposed: the base model stores these linears as [K, N] (fan_in_fan_out).
    """

    path: Path
    digest: str
    linears: Mapping[str, LowRank]
    embeddings: Mapping[str, LowRank] = field(default_factory=dict)
    whole: Mapping[str, torch.Tensor] = field(default_factory=dict)
    bases: Mapping[str, torch.Tensor] = field(default_factory=dict)
    transposed: bool = False

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max((each.rank for each in self.linears.values()), default=0)

    @property
    def parts_tied_weights(self) -> bool:
        """Return whether an output projection that was tied to the embedding differs from it with the adapter."""
        names = (*self.linears, *self.embeddings, *(name.removesuffix(".weight") for name in self.whole))
        return any(name.rpartition(".")[2] in (OUTPUT, EMBEDDING) for name in names)

    def merged_only(self) -> str | None:
        """Return why the adapter can only be merged into the base model; None if it can be applied to requests."""
        if dora := [name for name, each in self.linears.items() if each.magnitude_N is not None]:
            return f"it uses DoRA ({name_some(dora, 3)})"
        if self.whole:
            return f"it replaces whole tensors, modules_to_save ({name_some(list(self.whole), 3)})"
        if self.embeddings:
            return f"it changes embeddings ({name_some(list(self.embeddings), 3)})"
        return None


def read_adapter(folder: Path) -> Adapter:
    """Read a folder. Raises ValueError, one line with the folder, for what is missing, damaged or not supported."""
    fields = read_adapter_config(folder)
    tensors = _tensors(folder)
    low_rank: dict[tuple[str, bool], dict[str, torch.Tensor]] = {}
    magnitudes: dict[str, torch.Tensor] = {}
    whole: dict[str, torch.Tensor] = {}
    bases: dict[str, torch.Tensor] = {}
    for full_name, tensor in tensors.items():
        name = full_name.removeprefix(PREFIX)
        if (match := LOW_RANK.fullmatch(name)) is not None:
            key = match["module"], match["embedding"] is not None
            low_rank.setdefault(key, {})[match["matrix"]] = tensor
        elif (match := _MAGNITUDE.fullmatch(name)) is not None:
            magnitudes[match["module"]] = tensor
        elif name.endswith(_BASE):
            bases[name.removesuffix(_BASE)] = tensor
        elif name.endswith(_BASE_BIAS):
            continue
        elif ".lora_" in name or name.endswith(".bias"):
            raise ValueError(f"{folder}: {full_name} is not supported; allowed: matrices lora_A and lora_B, bias none")
        else:
            whole[name.replace(".modules_to_save.", ".")] = tensor
    found: tuple[dict[str, LowRank], dict[str, LowRank]] = {}, {}
    for (module, is_embedding), matrices in low_rank.items():
        made = _low_rank(folder, fields, module, matrices, magnitudes.pop(module, None))
        found[is_embedding][module] = made
    if magnitudes:
        raise ValueError(f"{folder}: {next(iter(magnitudes))} has a magnitude, but no lora_A and lora_B")
    if not low_rank and not whole:
        raise ValueError(f"{folder / WEIGHTS_FILE} holds no tensors of an adapter")
    linears, embeddings = found
    for module, base in bases.items():
        _check_base(f"{folder}: {module}", base, linears.get(module), embeddings.get(module))
    transposed = fields.boolean("fan_in_fan_out", False)
    return Adapter(folder, digest_of(folder), linears, embeddings, whole, bases, transposed)


def match_modules(adapter: Adapter, known: Collection[str]) -> dict[str, str]:
    """Return the base model's name of each adapted module: the adapter's own, or for checkpoints of multimodal models
    the one without `language_model`. Raises ValueError for a module that is not among the known ones, and for several
    names of one."""
    found, unknown = {}, []
    for module in (*adapter.linears, *adapter.embeddings):
        short = module.replace("language_model.", "")
        names = [name for name in (module, short, f"model.{short}", short.removeprefix("model.")) if name in known]
        if names:
            found[module] = names[0]
        else:
            unknown.append(module)
    if unknown:
        raise ValueError(f"{adapter.path}: the base model has no linear {name_some(unknown, 3)}")
    linears = [found[module] for module in adapter.linears]
    if twice := [name for name, count in Counter(linears).items() if count > 1]:
        raise ValueError(f"{adapter.path}: its names of {twice[0]} are several; allowed: one for each linear")
    return found


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    with open_weights(folder, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    for name, tensor in tensors.items():
        if tensor.dtype not in STORED_DTYPES:
            allowed = ", ".join(map(str, STORED_DTYPES))
            raise ValueError(f"{folder / WEIGHTS_FILE}: {name} has the dtype {tensor.dtype}; allowed: {allowed}")
    return tensors


def _low_rank(
    folder: Path,
    fields: JsonFields,
    module: str,
    matrices: Mapping[str, torch.Tensor],
    magnitude_N: torch.Tensor | None,
) -> LowRank:
    if missing := [name for name in ("A", "B") if name not in matrices]:
        raise ValueError(f"{folder}: {module} has no lora_{missing[0]}; allowed: both matrices, A and B")
    a_RK, b_NR = matrices["A"], matrices["B"]
    if a_RK.dim() != 2 or b_NR.dim() != 2 or a_RK.shape[0] != b_NR.shape[1] or a_RK.shape[0] == 0:
        raise ValueError(
            f"{folder}: {module} has lora_A {list(a_RK.shape)} and lora_B {list(b_NR.shape)}; "
            "allowed: [r, K] and [N, r]"
        )
    if magnitude_N is not None and magnitude_N.numel() != b_NR.shape[0]:
        raise ValueError(f"{folder}: {module} has a magnitude {list(magnitude_N.shape)}; allowed: [{b_NR.shape[0]}]")
    rank = a_RK.shape[0]
    alpha = _by_pattern(fields.section("alpha_pattern"), module)
    alpha = fields.number("lora_alpha", 8) if alpha is None else alpha
    scale = alpha / (math.sqrt(rank) if fields.boolean("use_rslora", False) else rank)
    return LowRank(a_RK, b_NR, scale, None if magnitude_N is None else magnitude_N.reshape(-1))


def _check_base(place: str, base: torch.Tensor, linear: LowRank | None, embedding: LowRank | None) -> None:
    changed = linear or embedding
    if changed is None:
        raise ValueError(f"{place} has a base layer, but no lora_A and lora_B")
    shape = [changed.b_NR.shape[0], changed.a_RK.shape[1]]
    if list(base.shape) != (shape if linear else shape[::-1]):
        raise ValueError(f"{place} was trained on a weight {list(base.shape)}, but its matrices are of {shape}")


def _by_pattern(patterns: JsonFields, module: str) -> float | None:
    """The value of the first pattern that matches the end of a module's name, as PEFT finds it."""
    for pattern in patterns.values:
        try:
            matched = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            why = f"must have regular expressions as its names, got {pattern!r}: {error.msg}"
            raise ValueError(f"{patterns.source} {why}") from error
        if matched:
            return patterns.number(pattern)
    return None

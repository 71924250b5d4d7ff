"""Read a LoRA adapter in PEFT's format: adapter_config.json and adapter_model.safetensors.

The tensors' names tell which modules are adapted. `target_modules` is not read, since it may be a regular expression. A
linear W [N, K] becomes W + scale * B A, with A [r, K] and B [N, r] (Hu et al., arXiv:2106.09685). The scale is
lora_alpha / r, or with rslora lora_alpha / sqrt(r) (Kalajdzievski, arXiv:2312.03732).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from compiled_engine.models.checkpoint.adapter_files import (
    LOW_RANK,
    MOST_BYTES,
    PREFIX,
    WEIGHTS_FILE,
    AdapterFiles,
    read_adapter_files,
)
from compiled_engine.models.checkpoint.file_names import name_some
from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.checkpoint.name_patterns import NamePatterns

# Names of the modules whose weights may be tied, in textbook models and most models of transformers.
OUTPUT, EMBEDDING = "lm_head", "embed_tokens"
_MAGNITUDE = re.compile(r"(?P<module>.+)\.lora_magnitude_vector(\.weight)?")
# Weights and biases of the base model that PEFT saves beside an adapter. A base bias is skipped: the config tells
# whether biases were trained.
_BASE, _BASE_BIAS = ".base_layer.weight", ".base_layer.bias"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class LowRank:
    """A low-rank change, scale * B A, of a module's weight: of a linear [N, K], or of an embedding [V, D] transposed.

    For an embedding, N is D and K is V.
    """

    a_RK: torch.Tensor
    b_NR: torch.Tensor
    scale: float
    # DoRA: norm of each row of the changed weight (Liu et al., arXiv:2402.09353)
    magnitude_N: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        return self.a_RK.shape[0]


@dataclass(frozen=True)
class Adapter:
    """The content of a LoRA adapter's folder.

    Modules are named as in the adapter's files, without PEFT's prefix. `match_modules` maps these names to the base
    model's.
    """

    path: Path
    digest: str  # SHA-256 of both files
    linears: Mapping[str, LowRank]
    embeddings: Mapping[str, LowRank] = field(default_factory=dict)
    # tensors that replace the base model's, by name (modules_to_save)
    whole: Mapping[str, torch.Tensor] = field(default_factory=dict)
    # By module, the base weight that PEFT saves with an adapted embedding or output projection.
    bases: Mapping[str, torch.Tensor] = field(default_factory=dict)
    transposed: bool = False  # The base model stores the adapted linears as [K, N] (fan_in_fan_out).

    @property
    def rank(self) -> int:
        """The largest rank of the adapted linears; 0 if no linear is adapted."""
        return max((each.rank for each in self.linears.values()), default=0)

    @property
    def parts_tied_weights(self) -> bool:
        """Whether the adapter changes an output projection or embedding.

        If the base model ties the two, their weights become different.
        """
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


def read_adapter(
    folder: Path,
    *,
    values: bool = True,
    within: Sequence[Path] = (),
    digest: str | None = None,
    most_bytes: int = MOST_BYTES,
) -> Adapter:
    """Read an adapter's folder.

    values: whether to read the tensors' values, all of which must be finite; if False, the tensors are on the device
    "meta". Other arguments: see `read_adapter_files`. Raises ValueError, with one line that names the folder, for files
    that are missing, damaged, contradictory or not supported.
    """
    files = read_adapter_files(folder, values=values, within=within, digest=digest, most_bytes=most_bytes)
    fields, tensors = files.fields, _tensors(folder, files)
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
    scales = _Scales(fields)
    for (module, is_embedding), matrices in low_rank.items():
        made = _low_rank(folder, scales, module, matrices, magnitudes.pop(module, None))
        found[is_embedding][module] = made
    if magnitudes:
        raise ValueError(f"{folder}: {next(iter(magnitudes))} has a magnitude, but no lora_A and lora_B")
    if not low_rank and not whole:
        raise ValueError(f"{folder / WEIGHTS_FILE} holds no tensors of an adapter")
    linears, embeddings = found
    for module, base in bases.items():
        _check_base(f"{folder}: {module}", base, linears.get(module), embeddings.get(module))
    _check_whole(fields, whole)
    transposed = fields.boolean("fan_in_fan_out", False)
    return Adapter(folder, files.digest, linears, embeddings, whole, bases, transposed)


def match_modules(adapter: Adapter, known: Collection[str]) -> dict[str, str]:
    """Return the name of each adapted module in the base model, by its name in the adapter.

    known: the names of the base model's modules. An adapter's name that is not known is tried without `language_model`,
    which multimodal checkpoints add, and with the prefix `model` added or removed. Raises ValueError for a module that
    the base model lacks, and for two linears or two embeddings with the same name in the base model.
    """
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
    for modules in (adapter.linears, adapter.embeddings):
        counts = Counter(found[module] for module in modules)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"{adapter.path}: its names of {twice[0]} are several; allowed: one for each module")
    return found


def is_finite(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether all values of the tensor are finite after a cast to `dtype`; True for an empty or meta tensor."""
    if tensor.numel() == 0 or tensor.is_meta:
        return True
    return bool(torch.stack(tensor.aminmax()).to(dtype).isfinite().all())


def _tensors(folder: Path, files: AdapterFiles) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, each in files.tensors.items():
        dtype, count = _DTYPES[each.dtype], math.prod(each.shape)
        if files.data is None or count == 0:
            tensors[name] = torch.empty(each.shape, dtype=dtype, device="meta" if files.data is None else "cpu")
            continue
        begin, _ = each.data_offsets
        tensors[name] = torch.frombuffer(files.data, dtype=dtype, count=count, offset=begin).view(each.shape)
        if not is_finite(tensors[name], dtype):
            raise ValueError(f"{folder / WEIGHTS_FILE}: {name} has values that are not finite; allowed: finite ones")
    return tensors


class _Scales:
    """Computes the scale of each module's change B A from the fields of adapter_config.json."""

    def __init__(self, fields: JsonFields) -> None:
        self._fields = fields
        self._ranks, self._alphas = (NamePatterns(fields, name) for name in ("rank_pattern", "alpha_pattern"))
        self._rslora, self._dora = fields.boolean("use_rslora", False), fields.boolean("use_dora", False)

    def scale(self, place: str, module: str, rank: int, has_magnitude: bool) -> float:
        """Return the factor by which a module's change B A is multiplied.

        place: names the folder and the module in errors. has_magnitude: whether the module has DoRA's magnitude vector.
        Raises ValueError if `rank` or `has_magnitude` contradicts the config.
        """
        named = self._ranks.number(module)
        if named is None and "r" in self._fields:
            named = self._fields.integer("r")
        if named not in (None, rank):
            raise ValueError(f"{place} has rank {rank}, but adapter_config.json says {named:g}; allowed: the same")
        if has_magnitude != self._dora:
            has = "a magnitude" if has_magnitude else "no magnitude"
            raise ValueError(f"{place} has {has}, but use_dora is {str(self._dora).lower()}; allowed: both or neither")
        alpha = self._alphas.number(module)
        alpha = self._fields.number("lora_alpha", 8) if alpha is None else alpha
        return alpha / (math.sqrt(rank) if self._rslora else rank)


def _low_rank(
    folder: Path,
    scales: _Scales,
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
    scale = scales.scale(f"{folder}: {module}", module, a_RK.shape[0], magnitude_N is not None)
    return LowRank(a_RK, b_NR, scale, None if magnitude_N is None else magnitude_N.reshape(-1))


def _check_whole(fields: JsonFields, whole: Iterable[str]) -> None:
    """Raise ValueError unless the config's modules_to_save lists exactly the modules of the tensors named in `whole`.

    These tensors replace the base model's. Embeddings and output projections need not be listed: PEFT saves them when
    tokens were added.
    """
    listed = fields.texts("modules_to_save") if fields.values.get("modules_to_save") else []
    left = set(listed)
    for name in whole:
        owners = {each for each in listed if f"{each}." in name}  # PEFT compares the ends of modules' names
        left -= owners
        if not owners and name.removesuffix(".weight").rpartition(".")[2] not in (OUTPUT, EMBEDDING):
            raise fields.error("modules_to_save", f"names of all modules that are there as a whole, such as {name}")
    if left:
        raise fields.error(
            "modules_to_save", f"names of modules that are there, and {name_some(sorted(left), 3)} is not"
        )


def _check_base(place: str, base: torch.Tensor, linear: LowRank | None, embedding: LowRank | None) -> None:
    changed = linear or embedding
    if changed is None:
        raise ValueError(f"{place} has a base layer, but no lora_A and lora_B")
    shape = [changed.b_NR.shape[0], changed.a_RK.shape[1]]
    if list(base.shape) != (shape if linear else shape[::-1]):
        raise ValueError(f"{place} was trained on a weight {list(base.shape)}, but its matrices are of {shape}")

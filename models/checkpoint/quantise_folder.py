"""Quantise a checkpoint into a new folder in the format of compressed-tensors, which transformers and others load.

The result equals that of the option `quantization`, which quantises linears and expert matrices at load time, with two
exceptions. A matrix stays unquantised if the files do not hold it as a whole and under its own name, or if the format
cannot hold it. Values and scales differ if the number of rows is no multiple of a tile's rows.

Files are processed one tensor at a time; the new folder has the same shards. It gets its final name when it is
complete.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn

from compiled_engine.config import ModelConfig
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.models.checkpoint.file_names import PICKLE_PATTERNS, name_some
from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.checkpoint.linear_names import require_linears
from compiled_engine.models.checkpoint.match_tensors import match_tensors
from compiled_engine.models.checkpoint.mtp_layer import without_mtp_layers
from compiled_engine.models.checkpoint.packed_weights import WORD
from compiled_engine.models.checkpoint.pooling_folder import pooling_tensors
from compiled_engine.models.checkpoint.quantisation_config import SECTION, as_compressed_tensors, find_settings
from compiled_engine.models.checkpoint.safetensors_files import (
    INDEX,
    find_shards,
    map_tensors,
)
from compiled_engine.models.checkpoint.safetensors_writer import Described, SafetensorsWriter
from compiled_engine.models.checkpoint.wrappers import text_tensors
from compiled_engine.models.foreign.placement import Placement
from compiled_engine.passes.framework.rounding import codes_of, scales_of
from compiled_engine.process.progress import Advance, Progress
from compiled_engine.quantisation import LinearScheme, Quantisation, matches

# Matches all expert matrices, whether a checkpoint holds them one by one or stacked.
EXPERTS = r"re:.*\.experts\..*"
_WEIGHT, _SCALES = ".weight", "_scale"
_MODULE_FOLDER = re.compile(r"\d+_\w+")  # a module of sentence-transformers
_NOT_COPIED = ("*.safetensors", INDEX, "config.json", *PICKLE_PATTERNS, "*.gguf", "*.h5", "*.msgpack")
_CHUNK_ROWS = 1024
_IN_PARTS = "the checkpoint holds it in parts, or together with others"


@dataclass(frozen=True)
class QuantisePlan:
    """The plan for quantising a checkpoint: which linears are quantised, which are kept, and the sizes in bytes."""

    path: Path
    rules: Quantisation
    schemes: Mapping[str, LinearScheme]  # scheme of each tensor to quantise, by its name in the files
    kept: Mapping[str, str]  # linears and expert matrices left unquantised, with the reason
    ignore: tuple[str, ...]  # targets that match `kept`, as written to the folder's config
    bytes_before: int
    bytes_after: int


def require_unquantised(path: Path) -> None:
    """Raise ValueError if the folder's weights are quantised already, or if it has no config.json."""
    fields = JsonFields.from_file(path / "config.json")
    stated = find_settings(fields, path)
    if stated is not None:
        method = stated.values.get("quant_method")
        raise ValueError(
            f"model is {str(path)!r}, which is quantised already, with {method}; allowed: a checkpoint in float32, "
            "bfloat16 or float16"
        )


def plan_folder(config: ModelConfig, cache_dir: Path | None, asked: tuple[str, ...] = ()) -> QuantisePlan:
    """Return the plan for quantising a checkpoint, all of whose files must be present.

    config: the model's configuration, with the quantisation rules of the option `quantization`. cache_dir: see
    `match_tensors`. asked: the targets (see quantisation.Rule) that the user wants to leave unquantised; each must
    match a linear. Raises ValueError if the tensors do not fit the model, if a target matches no linear, or if no
    linear is left to quantise.
    """
    rules = config.quantisation
    assert rules is not None
    files = map_tensors(config.path)
    model = build_model(config)
    tensors = text_tensors(files)[0] if config.wrapper is not None else files
    tensors = without_mtp_layers(tensors, config.architecture)
    if config.pooling is not None:
        tensors = pooling_tensors(tensors, dict(model.named_parameters(remove_duplicate=False)), config)
    read = match_tensors(tensors, model, config, cache_dir).read
    file_names = {id(tensor): name for name, tensor in files.items()}

    reasons = {
        name: _why_not(read.get(f"{name}{_WEIGHT}", ()), layer.weight)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    }
    reasons |= _experts(tensors, dict(model.named_parameters(remove_duplicate=False)), read)
    require_linears("ignore", asked, reasons)

    schemes: dict[str, LinearScheme] = {}
    kept: dict[str, str] = {}
    for module, reason in reasons.items():
        scheme = rules.scheme_of(module)
        if scheme is None:
            kept[module] = rules.why_not(module)
        elif reason is not None:
            kept[module] = reason
        elif (obstacle := _obstacle(tensors[f"{module}{_WEIGHT}"], scheme)) is not None:
            kept[module] = obstacle
        else:
            schemes[file_names[id(tensors[f"{module}{_WEIGHT}"])]] = scheme
    if not schemes:
        found = name_some([f"{module} ({reason})" for module, reason in kept.items()], most=3)
        raise ValueError(f"{config.path}: there is no linear to quantise: {found or 'the model has none'}")
    own_names = {id(tensor): name for name, tensor in tensors.items()}
    embeddings = {f"{name}{_WEIGHT}" for name, layer in model.named_modules() if isinstance(layer, nn.Embedding)}
    plain = [
        name.removesuffix(_WEIGHT)
        for name, tensor in files.items()
        if tensor.dim() == 2 and name.endswith(_WEIGHT) and name not in schemes
        if own_names.get(id(tensor)) not in embeddings
    ]
    sizes = [_described(name, tensor, schemes.get(name)) for name, tensor in files.items()]
    return QuantisePlan(
        config.path,
        rules,
        schemes,
        kept,
        _ignore(rules, [*plain, *kept], quantised=[name.removesuffix(_WEIGHT) for name in schemes]),
        sum(tensor.nbytes for tensor in files.values()),
        sum(each.nbytes for described in sizes for each in described.values()),
    )


def write_folder(plan: QuantisePlan, out: Path, progress: Progress) -> None:
    """Write the quantised checkpoint to the new folder `out`.

    The folder gets the name `out` when it is complete; after an error it is removed. Raises ValueError for weights that
    are not finite, and OSError if the disk is full or `out` exists and is not an empty folder.
    """
    with _complete_folder(out) as folder:
        shards: dict[str, str] = {}
        with progress.stage("quantise", plan.bytes_before, in_bytes=True) as advance:
            for shard in find_shards(plan.path):
                for name in _write_shard(plan, shard, folder / shard.name, advance):
                    shards[name] = shard.name
        if (plan.path / INDEX).is_file() or len(set(shards.values())) > 1:
            index = {"metadata": {"total_size": plan.bytes_after}, "weight_map": shards}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        _copy_others(plan.path, folder)
        values = json.loads((plan.path / "config.json").read_text(encoding="utf-8"))
        values[SECTION] = as_compressed_tensors(replace(plan.rules, ignore=plan.ignore))
        (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _obstacle(weight: torch.Tensor, scheme: LinearScheme) -> str | None:
    """Return the reason why the format cannot hold `weight` quantised by `scheme`; None if it can."""
    columns = scheme.weight.columns
    if not scheme.weight.is_integer:
        return None
    return f"its {weight.shape[1]} columns are no multiple of {columns}" if weight.shape[1] % columns else None


def quantise_weight(weight_NK: torch.Tensor, scheme: LinearScheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight. Returns codes, [N, K] or packed (see Rounding.stored), and fp32 scales [R, C] of R x C tiles.

    The codes are computed for some rows at a time, which saves memory.
    """
    rounding = scheme.weight
    codes_NK = torch.empty(rounding.stored(*weight_NK.shape), dtype=rounding.dtype)
    scales_RC = torch.empty(rounding.grid(*weight_NK.shape))
    tile = rounding.rows or len(weight_NK)
    rows = max(1, _CHUNK_ROWS // tile) * tile
    for start in range(0, len(weight_NK), rows):
        part = weight_NK[start : start + rows]
        scales = scales_of(part, rounding)
        scales_RC[start // tile : start // tile + len(scales)] = scales
        codes_NK[start : start + rows] = codes_of(part, scales, rounding)
    return codes_NK, scales_RC


def _why_not(placements: Sequence[Placement], weight: torch.Tensor) -> str | None:
    """Return the reason why a linear cannot be quantised in the files; None if it can.

    It can if a tensor of the checkpoint is exactly the linear's weight and has the same name. placements: those of the
    weight.
    """
    all_of_it = tuple((0, size) for size in weight.shape)
    if [(each.taken, each.placed, each.transposed) for each in placements] != [(all_of_it, all_of_it, False)]:
        return _IN_PARTS
    (placement,) = placements
    same = placement.target == placement.source
    return None if same else f"the checkpoint has it under another name, {placement.source}"


def _experts(
    tensors: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], read: Mapping[str, Sequence[Placement]]
) -> dict[str, str | None]:
    """Return, for each expert matrix by its name in the checkpoint, the reason why it cannot be quantised in the files.

    The reason is None if the checkpoint's tensor is exactly one matrix, not transposed; such a matrix can be quantised.
    tensors: the checkpoint's. own: the model's parameters by name; those of experts have three dimensions. read: the
    placements of the checkpoint's tensors by parameter name.
    """
    found: dict[str, str | None] = {}
    for name, placements in read.items():
        for placement in placements if name in own and own[name].dim() == 3 else ():
            if matches(EXPERTS, placement.source):
                shape = tuple(tensors[placement.source].shape)
                sizes = tuple(end - start for start, end in placement.placed)
                is_one = len(shape) == 2 and sizes == (1, *shape) and not placement.transposed
                is_one = is_one and placement.source.endswith(_WEIGHT)
                found[placement.source.removesuffix(_WEIGHT)] = None if is_one else _IN_PARTS
    return found


def _ignore(rules: Quantisation, modules: list[str], quantised: list[str]) -> tuple[str, ...]:
    """Return targets (see quantisation.Rule) that match all of `modules` and none of `quantised`.

    These are the targets that the rules ignore, and the names of the remaining modules. If no expert is quantised
    although the rules would quantise some, one target for all experts (EXPERTS) takes the place of their names.
    """
    targets = list(rules.ignore)
    stay = any(matches(EXPERTS, module) and rules.scheme_of(module) is not None for module in modules)
    if stay and not any(matches(EXPERTS, module) for module in quantised):
        targets.append(EXPERTS)
    matching = replace(rules, ignore=tuple(targets))
    return tuple(dict.fromkeys([*targets, *(name for name in modules if matching.scheme_of(name) is not None)]))


def _described(name: str, tensor: torch.Tensor, scheme: LinearScheme | None) -> dict[str, Described]:
    """Return descriptions, by name, of the tensors to write for one tensor of the source.

    scheme: None if the tensor is not quantised; the description then lacks the dtype.
    """
    shape = tuple(tensor.shape)
    if scheme is None:
        return {name: Described("", shape, tensor.nbytes)}
    num_rows, num_columns = shape
    grid = scheme.weight.grid(num_rows, num_columns)
    if scheme.weight.is_integer:
        words = num_rows, -(-num_columns * scheme.weight.format.bits // WORD)
        return {
            f"{name}_packed": Described("I32", words, 4 * math.prod(words)),
            f"{name}{_SCALES}": Described("BF16", grid, 2 * math.prod(grid)),
            f"{name}_shape": Described("I64", (2,), 16),
        }
    return {
        name: Described("F8_E4M3", shape, tensor.numel()),
        f"{name}{_SCALES}": Described("F32", grid, 4 * math.prod(grid)),
    }


def _quantised(name: str, weight_NK: torch.Tensor, scheme: LinearScheme) -> dict[str, torch.Tensor]:
    """Quantise a weight, and return the tensors that `_described` describes. Raises ValueError if it is not finite."""
    codes, scales = quantise_weight(weight_NK, scheme)
    if not scales.isfinite().all():
        raise ValueError(f"{name} has values that are not finite, which no scale covers")
    if scheme.weight.is_integer:
        # Scales of integers are searched among bfloat16 values, so bfloat16 holds them exactly. Zeros fill the last
        # word of a row.
        words = F.pad(codes, (0, -codes.shape[1] % 4)).view(torch.int32)
        shape = torch.tensor(weight_NK.shape)
        return {f"{name}_packed": words, f"{name}{_SCALES}": scales.bfloat16(), f"{name}_shape": shape}
    return {name: codes, f"{name}{_SCALES}": scales}


def _write_shard(plan: QuantisePlan, source: Path, target: Path, advance: Advance) -> list[str]:
    """Write one safetensors file with its linears quantised. Returns the names of the tensors in the new file."""
    with safe_open(source, framework="pt") as file:
        described: dict[str, Described] = {}
        for name in file.keys():  # noqa: SIM118 (no mapping)
            found = _described(name, file.get_tensor(name), plan.schemes.get(name))
            if name not in plan.schemes:
                found = {name: found[name]._replace(dtype=file.get_slice(name).get_dtype())}
            described |= found
        with SafetensorsWriter(target, described) as writer:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                tensor = file.get_tensor(name)
                if name not in plan.schemes:
                    writer.write(name, tensor)
                else:
                    try:
                        quantised = _quantised(name, tensor, plan.schemes[name])
                    except ValueError as error:
                        raise ValueError(f"{source}: {error}") from error
                    for own, values in quantised.items():
                        writer.write(own, values)
                advance(tensor.nbytes)
    return list(described)


def _copy_others(source: Path, folder: Path) -> None:
    """Copy files without weights, such as the tokenizer's, and module folders of sentence-transformers to `folder`."""
    for path in sorted(source.iterdir()):
        if path.is_dir() and _MODULE_FOLDER.fullmatch(path.name):
            shutil.copytree(path, folder / path.name)
        elif path.is_file() and not any(path.match(pattern) for pattern in _NOT_COPIED):
            shutil.copyfile(path, folder / path.name)


@contextmanager
def _complete_folder(out: Path) -> Iterator[Path]:
    """Yield a new temporary folder next to `out`. At the end it is renamed to `out`; after an error it is removed."""
    folder = out.with_name(f".{out.name}.{os.getpid()}.incomplete")
    folder.mkdir()
    try:
        yield folder
        os.rename(folder, out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise

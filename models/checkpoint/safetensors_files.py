"""Find and memory-map the safetensors files of a checkpoint folder. A mapped tensor is not read before it is used."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from compiled_engine.models.checkpoint.file_names import name_some, pickle_names
from compiled_engine.models.checkpoint.json_fields import JsonFields, describe_lfs_pointer, is_lfs_pointer

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
STORED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Dtypes by their names in the header of a file.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def find_shards(folder: Path) -> list[Path]:
    """Return the paths of the checkpoint's safetensors files.

    These are the files that the index names; without an index, model.safetensors or, if it is missing, all safetensors
    files of the folder. Raises ValueError if there are none, if a file of the index is missing, or if a file is a Git
    LFS pointer. The error names pickle files that the folder holds instead.
    """
    shards = _shards(folder)
    for shard in shards:
        if is_lfs_pointer(shard):
            raise ValueError(describe_lfs_pointer(shard))
    return shards


def _shards(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        names = indexed_files(folder)
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"{folder / INDEX} names files that are missing: {name_some(missing)}")
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        pickles = pickle_names(folder)
        found = f"only pickle files, which can run code: {name_some(pickles)}" if pickles else "none"
        raise ValueError(f"{folder} must hold weights as *.safetensors files, found {found}")
    return shards


def map_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder by name, as views of the memory-mapped files, in the order of the files' bytes.

    Raises ValueError if files are missing or damaged, if there are no tensors, if two files have a tensor of the same
    name, or if the index names a tensor that no file has.
    """
    tensors: dict[str, torch.Tensor] = {}
    problems: list[str] = []
    for shard in find_shards(folder):
        try:
            with safe_open(shard, framework="pt") as file:
                mapped = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except (SafetensorError, OSError) as error:
            problems.append(f"{shard.name} is damaged: {error}")
            continue
        repeated = [name for name in mapped if name in tensors]
        if repeated:
            problems.append(f"{shard.name} repeats tensors of other files: {name_some(repeated)}")
        tensors |= dict(sorted(mapped.items(), key=lambda item: item[1].data_ptr()))
    if not problems and (folder / INDEX).is_file():
        absent = [name for name in weight_map(folder) if name not in tensors]
        if absent:
            problems.append(f"{INDEX} names tensors that no file holds: {name_some(absent)}")
    if not problems and not tensors:
        problems.append("the safetensors files hold no tensors")
    if problems:
        raise ValueError(f"{folder}: " + "; ".join(problems))
    return tensors


def tensor_names(folder: Path) -> list[str]:
    """Return the sorted names of the folder's tensors, from the index or, without an index, from its readable files.

    Raises ValueError for a damaged index.
    """
    if (folder / INDEX).is_file():
        return sorted(weight_map(folder))
    names: list[str] = []
    for shard in folder.glob("*.safetensors"):
        with suppress(SafetensorError, OSError), safe_open(shard, framework="pt") as file:
            names += file.keys()
    return sorted(names)


def indexed_files(folder: Path) -> list[str]:
    """Return the sorted names of the files that the folder's index names. Raises ValueError for a damaged index."""
    return sorted(set(weight_map(folder).values()))


def weight_map(folder: Path) -> dict[str, str]:
    """Return the folder's index: tensor name -> name of the file that holds the tensor.

    Raises ValueError if the index is missing or damaged, or names a file outside of the folder.
    """
    section = JsonFields.from_file(folder / INDEX).section("weight_map")
    for name in section.values:
        file_name = section.text(name)
        if Path(file_name).name != file_name:
            raise section.error(name, "the name of a file in the folder")
    return section.values

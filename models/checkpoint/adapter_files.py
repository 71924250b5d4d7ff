"""The two files of a LoRA adapter, as far as they can be read without torch: adapter_config.json, and the header of
adapter_model.safetensors."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from compiled_engine.models.checkpoint.file_names import name_some, pickle_names
from compiled_engine.models.checkpoint.json_fields import JsonFields, describe_lfs_pointer, is_lfs_pointer

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Kinds of initialisation that change the weights of the base model, which the folder does not have.
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Fields of adapter_config.json that must have none of these values, since they change what an adapter computes.
_UNSUPPORTED = ("layer_replication", "alora_invocation_tokens", "trainable_token_indices", "megatron_config")
LOW_RANK = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<matrix>[AB])(\.weight)?")


def stamp(folder: Path) -> tuple[tuple[int, ...], ...]:
    """Return what tells a replaced file from the one that was read, without reading it. Raises ValueError if a file is
    missing."""
    found = []
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        try:
            status = (folder / name).stat()
        except OSError:
            raise _missing(folder, name) from None
        found.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(found)


def digest_of(folder: Path) -> str:
    """Return the SHA-256 of both files, as hexadecimal digits."""
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def read_adapter_config(folder: Path) -> JsonFields:
    """Return adapter_config.json. Raises ValueError if a file is missing, and for an adapter that is not supported."""
    stamp(folder)
    fields = JsonFields.from_file(folder / CONFIG_FILE)
    if (kind := fields.text("peft_type", "LORA")) != "LORA":
        raise fields.error("peft_type", f"LORA; {kind} is not supported")
    _check_config(fields)
    return fields


@contextmanager
def open_weights(folder: Path, framework: str) -> Iterator[Any]:
    """The open file of tensors. framework: of the tensors; with "np" the header is read without torch. Raises
    ValueError for a damaged file."""
    path = folder / WEIGHTS_FILE
    if is_lfs_pointer(path):
        raise ValueError(describe_lfs_pointer(path))
    try:
        with safe_open(path, framework=framework) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def require_adapter(folder: Path, max_lora_rank: int) -> None:
    """Raise ValueError for a folder that is no adapter, without reading its tensors."""
    read_adapter_config(folder)
    with open_weights(folder, "np") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (no mapping)
    matched = ((LOW_RANK.fullmatch(name.removeprefix(PREFIX)), shape) for name, shape in shapes.items())
    matrices = [shape for found, shape in matched if found and found["matrix"] == "A" and not found["embedding"]]
    require_rank(folder, max((shape[0] for shape in matrices if shape), default=0), max_lora_rank)


def require_rank(folder: Path, rank: int, max_lora_rank: int) -> None:
    """Raise ValueError for an adapter of a larger rank."""
    if rank > max_lora_rank:
        raise ValueError(f"{folder} has rank {rank}; allowed: up to max_lora_rank, {max_lora_rank}")


def _check_config(fields: JsonFields) -> None:
    initial = fields.values.get("init_lora_weights")
    if isinstance(initial, str) and initial.lower().startswith(_CHANGED_BASES):
        raise fields.error("init_lora_weights", "one that keeps the base weights; PEFT can convert it while saving")
    for name in _UNSUPPORTED:
        if fields.values.get(name):
            raise fields.error(name, "null")
    if fields.values.get("bias", "none") != "none":
        raise fields.error("bias", "'none'")
    if fields.boolean("lora_bias", False):
        raise fields.error("lora_bias", "false")


def _missing(folder: Path, name: str) -> ValueError:
    if not folder.is_dir():
        return ValueError(f"{folder} is no folder; allowed: a folder with {CONFIG_FILE} and {WEIGHTS_FILE}")
    pickles = pickle_names(folder)
    instead = f"; {name_some(pickles)} is a pickle file, which can run code: save the adapter as safetensors"
    return ValueError(f"{folder / name} is missing{instead if pickles and name == WEIGHTS_FILE else ''}")

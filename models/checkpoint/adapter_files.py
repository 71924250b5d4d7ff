"""Read the two files of a LoRA adapter without torch: adapter_config.json and adapter_model.safetensors.

The files are untrusted, and may be replaced at any time. Therefore each file is opened once, must be a regular file,
and is read instead of memory-mapped: the digest covers exactly the bytes that are parsed. Sizes and counts are checked
against limits before memory is allocated.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from compiled_engine.models.checkpoint.file_names import name_some, pickle_names
from compiled_engine.models.checkpoint.json_fields import JsonFields, describe_lfs_pointer, is_lfs_text

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Limits: bytes of config, header and whole weights file; number of tensors; characters of a tensor's name.
LONGEST_CONFIG, LONGEST_HEADER, MOST_BYTES = 1 << 20, 16 << 20, 16 << 30
MOST_TENSORS, LONGEST_NAME = 65_536, 512
# Bytes per element, by safetensors' name of the dtype.
_DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_BLOCK = 1 << 20
# Initialisations that also change the base model's weights; the folder does not contain these changes.
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Fields of adapter_config.json that must be absent or empty, since they change what an adapter computes.
_UNSUPPORTED = ("layer_replication", "alora_invocation_tokens", "trainable_token_indices", "megatron_config")
LOW_RANK = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<matrix>[AB])(\.weight)?")


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor's entry in the header of a safetensors file."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)  # (begin, end) in bytes, after the header


@dataclass(frozen=True)
class AdapterFiles:
    """The contents of the two files of a LoRA adapter."""

    fields: JsonFields
    tensors: Mapping[str, StoredTensor]
    digest: str  # SHA-256 of both files' bytes, in hexadecimal
    data: bytearray | None  # bytes of all tensors; None if they were only hashed


def stamp(folder: Path) -> tuple[tuple[int, ...], ...]:
    """Return the modification time, size and inode of each of the adapter's two files.

    If the result changes, a file was replaced or changed. Raises ValueError if a file is missing.
    """
    found = []
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        try:
            status = (folder / name).stat()
        except OSError:
            raise _missing(folder, name) from None
        found.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(found)


def read_adapter_files(
    folder: Path,
    *,
    values: bool = True,
    within: Sequence[Path] = (),
    digest: str | None = None,
    most_bytes: int = MOST_BYTES,
) -> AdapterFiles:
    """Read the two files of a LoRA adapter.

    values: whether to keep the tensors' bytes. within: each file, after links are resolved, must be in one of these
    folders; if empty, any folder is allowed. digest: the digest that the files must have; None: any. most_bytes: limit
    for the weights file.

    Raises ValueError, with a message of one line, if a file is missing, damaged, not supported or outside of `within`,
    exceeds a limit, or does not have the digest.
    """
    whole, weights = hashlib.sha256(), hashlib.sha256()
    config = _read_config(folder, within)
    whole.update(hashlib.sha256(config).digest())
    with _open(folder, WEIGHTS_FILE, within) as file:
        header, size = _read_header(file, folder / WEIGHTS_FILE, most_bytes)
        weights.update(len(header).to_bytes(8, "little") + header)
        if digest is None:  # refuse a file that is no adapter before reading all of it
            _parse(folder, config, header, size)
        data = bytearray(size if values else min(size, _BLOCK))
        view = memoryview(data)
        for begin in range(0, size, _BLOCK):
            part = view[begin if values else 0 :][: min(_BLOCK, size - begin)]
            if file.readinto(part) != len(part):  # type: ignore[attr-defined]
                raise ValueError(f"{folder / WEIGHTS_FILE} was cut while it was read")
            weights.update(part)
    whole.update(weights.digest())
    if digest not in (None, whole.hexdigest()):
        raise ValueError(f"{folder} has changed since its adapter was named; name it again")
    fields, tensors = _parse(folder, config, header, size)
    return AdapterFiles(fields, tensors, whole.hexdigest(), data if values else None)


def require_adapter(folder: Path, max_lora_rank: int) -> None:
    """Raise ValueError unless the folder holds a valid LoRA adapter whose rank is at most `max_lora_rank`.

    The tensors' values are not read.
    """
    config = _read_config(folder, ())
    with _open(folder, WEIGHTS_FILE, ()) as file:
        header, size = _read_header(file, folder / WEIGHTS_FILE, MOST_BYTES)
    _, tensors = _parse(folder, config, header, size)
    matched = ((LOW_RANK.fullmatch(name.removeprefix(PREFIX)), each.shape) for name, each in tensors.items())
    matrices = [shape for found, shape in matched if found and found["matrix"] == "A" and not found["embedding"]]
    require_rank(folder, max((shape[0] for shape in matrices if shape), default=0), max_lora_rank)


def require_rank(folder: Path, rank: int, max_lora_rank: int) -> None:
    """Raise ValueError if `rank`, the rank of the adapter in `folder`, exceeds `max_lora_rank`."""
    if rank > max_lora_rank:
        raise ValueError(f"{folder} has rank {rank}; allowed: up to max_lora_rank, {max_lora_rank}")


@contextmanager
def _open(folder: Path, name: str, within: Sequence[Path]) -> Iterator[BinaryIO]:
    """Open the file `name` of the folder for reading, as a context manager. Opening a FIFO or device does not block.

    within: unless empty, the file, after links are resolved, must be in one of these folders. Raises ValueError if the
    file is elsewhere, missing, not readable, or not a regular file.
    """
    path = folder / name
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb") as file:
            status, real = os.fstat(file.fileno()), Path(os.path.realpath(path))
            if within and not any(real.is_relative_to(each) for each in within):
                raise ValueError(
                    f"{path} is a link to another folder; allowed: files within {name_some([*map(str, within)])}"
                )
            if not stat.S_ISREG(status.st_mode) or (within and not os.path.samestat(status, real.lstat())):
                raise ValueError(f"{path} must be a regular file")
            yield file
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(folder, name) from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def _read_config(folder: Path, within: Sequence[Path]) -> bytes:
    with _open(folder, CONFIG_FILE, within) as file:
        stamp(folder)  # raises if the other file is missing
        config = file.read(LONGEST_CONFIG + 1)
    if len(config) > LONGEST_CONFIG:
        raise ValueError(f"{folder / CONFIG_FILE} must have at most {LONGEST_CONFIG:,} bytes")
    return config


def _read_header(file: BinaryIO, path: Path, most_bytes: int) -> tuple[bytes, int]:
    """Return the header of a safetensors file, and the number of bytes after the header.

    path: names the file in errors. Raises ValueError if the header is damaged, or if the file or the header exceeds a
    limit.
    """
    total = os.fstat(file.fileno()).st_size
    if total > most_bytes:
        raise ValueError(f"{path} must have at most {most_bytes:,} bytes, got {total:,}")
    first = file.read(8)
    if is_lfs_text(first):
        raise ValueError(describe_lfs_pointer(path))
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > total - 8:
        raise ValueError(f"{path} is damaged: it ends within its header")
    if length > LONGEST_HEADER:
        raise ValueError(f"{path} must have a header of at most {LONGEST_HEADER:,} bytes, got {length:,}")
    header = file.read(length)
    if header.count(b"{") > 2 * MOST_TENSORS:  # twice, as metadata may contain braces too
        raise _too_many(path)
    return header, total - 8 - len(header)


def _parse(folder: Path, config: bytes, header: bytes, size: int) -> tuple[JsonFields, dict[str, StoredTensor]]:
    fields, path = JsonFields.from_text(folder / CONFIG_FILE, config), folder / WEIGHTS_FILE
    fields.require_values(", the only method that is supported", peft_type="LORA")
    _check_config(fields)
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)  # whose fields may have any names
        tensors = {name: msgspec.json.decode(entry, type=StoredTensor) for name, entry in entries.items()}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if len(tensors) > MOST_TENSORS:
        raise _too_many(path)
    end = 0
    for name, each in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        if len(name) > LONGEST_NAME or not name.isprintable():
            raise ValueError(
                f"{path} has a name of {len(name)} characters, {name[:40]!r}; "
                f"allowed: up to {LONGEST_NAME}, all printable"
            )
        if each.dtype not in _DTYPE_BYTES:
            allowed = ", ".join(_DTYPE_BYTES)
            raise ValueError(f"{path}: {name} has the dtype {each.dtype[:20]!r}; allowed: {allowed}")
        begin, begins, end = end, *each.data_offsets
        if begins != begin or end > size or min(each.shape, default=1) < 0:
            raise ValueError(f"{path} is damaged: {name} has the bytes {begins} to {end} of {size}")
        if math.prod(each.shape) * _DTYPE_BYTES[each.dtype] != end - begin:
            shape = list(each.shape[:8])
            raise ValueError(f"{path} is damaged: {name} has the shape {shape}, but {end - begin} bytes")
    if end != size:
        raise ValueError(f"{path} is damaged: tensors have {end} bytes, but the file has {size}")
    return fields, tensors


def _too_many(path: Path) -> ValueError:
    return ValueError(f"{path} must have at most {MOST_TENSORS:,} tensors")


def _check_config(fields: JsonFields) -> None:
    initial = fields.values.get("init_lora_weights")
    keeps = not isinstance(initial, str) or not initial.lower().startswith(_CHANGED_BASES)
    fields.require("init_lora_weights", keeps, "one that keeps the base weights; PEFT can convert it while saving")
    for name in _UNSUPPORTED:
        fields.require(name, not fields.values.get(name), "null")
    fields.require_values(bias="none", lora_bias=False)


def _missing(folder: Path, name: str) -> ValueError:
    if not folder.is_dir():
        return ValueError(f"{folder} is no folder; allowed: a folder with {CONFIG_FILE} and {WEIGHTS_FILE}")
    pickles = pickle_names(folder)
    instead = f"; {name_some(pickles)} is a pickle file, which can run code: save the adapter as safetensors"
    return ValueError(f"{folder / name} is missing{instead if pickles and name == WEIGHTS_FILE else ''}")

"""Read the adapters in the server's options.

This module imports nothing heavy, because options are checked before the engine starts.
"""

from __future__ import annotations

import json

from compiled_engine.features.adapters.lora_request import LoRARequest
from compiled_engine.models.checkpoint.adapter_files import require_adapter
from compiled_engine.resolve.folders import local_adapter_folder
from compiled_engine.schema import require_defaults
from compiled_engine.server.options import ServerOptions


def adapters_of(options: ServerOptions) -> list[LoRARequest]:
    """Return the adapters in `lora_modules`. Raises ValueError for an invalid entry."""
    found: dict[str, LoRARequest] = {}
    for number, entry in enumerate(options.lora_modules, 1):
        name, path = _name_and_path(entry)
        if name in found:
            raise ValueError(f"lora_modules names {name!r} twice; allowed: each name once")
        found[name] = LoRARequest(name, number, path)
    return list(found.values())


def check_adapter_options(options: ServerOptions, enable_lora: bool) -> None:
    """Raise ValueError for invalid adapter options, or for any adapter options if `enable_lora` is False."""
    if not enable_lora:
        require_defaults(options, "enable_lora is False", "lora_modules", "allowed_lora_folder")
    adapters_of(options)


def check_adapter_folders(options: ServerOptions, max_lora_rank: int) -> None:
    """Raise ValueError for a folder in `lora_modules` without an adapter, or with a rank that is too large.

    Tensors are not read, and names on the hub are not looked up.
    """
    for request in adapters_of(options):
        if (folder := local_adapter_folder(request.lora_path)) is not None:
            try:
                require_adapter(folder, max_lora_rank)
            except ValueError as error:
                raise ValueError(f"lora_modules has {request.lora_name!r}: {error}") from error


def _name_and_path(entry: str) -> tuple[str, str]:
    allowed = 'name=path, or JSON such as {"name": "sql", "path": "path/to/sql"}'
    if entry.startswith("{"):
        try:
            fields = json.loads(entry)
        except ValueError as error:
            raise ValueError(f"lora_modules has {entry!r}, which is no JSON ({error}); allowed: {allowed}") from error
        name, path = fields.get("name"), fields.get("path")
    else:
        name, _, path = entry.partition("=")
    if not (isinstance(name, str) and isinstance(path, str) and name and path):
        raise ValueError(f"lora_modules has {entry!r}; allowed: {allowed}")
    return name, path

"""Load and unload adapters at run time.

A request selects an adapter by giving its name as `model`. The routes exist only if the option allowed_lora_folder is
set.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from compiled_engine.features.adapters.lora_request import LoRARequest
from compiled_engine.server.admin import require_admin
from compiled_engine.server.errors import ApiError, bad_request, blamed_on_request, require, shown
from compiled_engine.server.replies import read_body
from compiled_engine.server.serving import serving_of

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """The body of a request to /v1/load_lora_adapter. `load_inplace` allows a name in use; its adapter is replaced."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """The body of a request to /v1/unload_lora_adapter. `lora_int_id` has no effect."""

    lora_name: str
    lora_int_id: int | None = None


async def load_adapter(request: Request) -> Response:
    """Handle POST /v1/load_lora_adapter."""
    serving = serving_of(request)
    require_admin(request, "lora_name", "loading an adapter")
    fields, _ = await read_body(request, serving, LoadAdapterRequest)
    name, folders = fields.lora_name, tuple(Path(each).resolve() for each in serving.options.allowed_lora_folder)
    try:
        LoRARequest(name, 1, fields.lora_path)  # checks the bounds of both
    except ValueError as error:
        raise blamed_on_request(error) from error
    path = Path(fields.lora_path)
    is_new = bool(name) and name not in serving.names
    require(is_new, "lora_name", "a name that the model does not have", name)
    allowed = f"a folder within {', '.join(serving.options.allowed_lora_folder)}"
    require(_is_allowed(path, folders), "lora_path", allowed, fields.lora_path)
    try:
        # The path is absolute, so it cannot be a name on the hub.
        await serving.adapters.load(
            serving.engine, name, path.resolve(), in_place=bool(fields.load_inplace), within=folders
        )
    except (TypeError, ValueError, OSError) as error:
        raise bad_request("lora_path", str(error)) from error
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_adapter(request: Request) -> Response:
    """Handle POST /v1/unload_lora_adapter."""
    serving = serving_of(request)
    require_admin(request, "lora_name", "unloading an adapter")
    fields, _ = await read_body(request, serving, UnloadAdapterRequest)
    if serving.adapters.get(fields.lora_name) is None:
        loaded = ", ".join(serving.adapters) or "none"
        text = f"the adapter {shown(fields.lora_name)} does not exist; loaded: {loaded}"
        raise ApiError(404, text, param="lora_name", code="adapter_not_found")
    await serving.adapters.unload(serving.engine, fields.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{fields.lora_name}' removed successfully.")


def _is_allowed(path: Path, folders: Iterable[Path]) -> bool:
    """Return whether a path, with its symbolic links resolved, is within an allowed folder.

    Links in the adapter's folder are checked when its files are opened.
    """
    try:
        resolved = path.resolve()
    except (ValueError, OSError, RuntimeError):  # a null character, or circular links
        return False
    return any(resolved.is_relative_to(folder) for folder in folders)

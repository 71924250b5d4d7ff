"""How msgspec writes and reads the few types of plain data that it does not know: paths, devices, dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def encode_other(value: Any) -> str:
    """For msgspec's enc_hook. Raises TypeError for what no message may hold."""
    if isinstance(value, Path | torch.device):
        return str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    raise TypeError(f"no message holds a {type(value).__name__}")


def decode_other(kind: type, value: Any) -> Any:
    """For msgspec's dec_hook."""
    if kind is torch.dtype:
        return getattr(torch, value)
    if kind in (Path, torch.device):
        return kind(value)
    raise TypeError(f"no message holds a {kind.__name__}")

"""`LoRARequest`, by which users name an adapter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LONGEST_NAME, LONGEST_PATH = 256, 4096  # characters


@dataclass(frozen=True)
class LoRARequest:
    """Names the adapter of a request. Raises TypeError or ValueError for an invalid field, with what is allowed."""

    lora_name: str  # for metrics and the server
    lora_int_id: int  # at least 1; only checked, since the adapter's content identifies it
    lora_path: str | Path  # a folder in PEFT's layout, or org/name or org/name@revision of the Hugging Face Hub
    # Resolved folders that must contain the adapter's files after following links; none for any.
    within: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not isinstance(self.lora_path, str | Path):
            raise TypeError(f"lora_name and lora_path must be text, got {self.lora_name!r} and {self.lora_path!r}")
        if not self.lora_name:
            raise ValueError("lora_name must not be empty")
        if len(self.lora_name) > LONGEST_NAME or not self.lora_name.isprintable():
            got = f"{len(self.lora_name)}, {self.lora_name[:40]!r}"
            raise ValueError(f"lora_name must have at most {LONGEST_NAME} characters, all printable, got {got}")
        if len(str(self.lora_path)) > LONGEST_PATH:
            length = len(str(self.lora_path))
            raise ValueError(f"lora_path must have at most {LONGEST_PATH:,} characters, got {length:,}")
        if not str(self.lora_path):
            raise ValueError("lora_path must not be empty")
        if "\0" in str(self.lora_path):
            raise ValueError(f"lora_path must have no null character, got {str(self.lora_path)!r}")
        if not isinstance(self.lora_int_id, int) or isinstance(self.lora_int_id, bool) or self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be an integer of at least 1, got {self.lora_int_id!r}")

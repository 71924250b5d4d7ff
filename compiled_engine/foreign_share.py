"""The config.json of one rank's share of a model of transformers' code: the same model with divided sizes."""

from __future__ import annotations

import json
from typing import Any

# Rows of MLPs and of experts, under the names that the families which can be divided have for them.
_WIDTHS = ("intermediate_size", "moe_intermediate_size")


def divided_config(config_json: str, num_ranks: int, heads: tuple[int, int, int], vocab_size: int) -> str:
    """heads: query and K/V heads of a rank, and the elements of each; vocab_size: of a rank."""
    values: dict[str, Any] = json.loads(config_json)
    num_heads, num_kv_heads, head_dim = heads
    values |= {"num_attention_heads": num_heads, "head_dim": head_dim, "vocab_size": vocab_size}
    if values.get("num_key_value_heads") is not None:
        values["num_key_value_heads"] = num_kv_heads
    values |= {name: values[name] // num_ranks for name in _WIDTHS if isinstance(values.get(name), int)}
    values["pad_token_id"] = None  # it may not be among a rank's tokens, and nothing is padded
    return json.dumps(values, sort_keys=True)

"""Options of adapters: what they come to, and what they do not go with."""

from __future__ import annotations

from typing import Any

import pytest

from compiled_engine.config import AdapterConfig
from compiled_engine.features.adapters.lora_request import LoRARequest
from compiled_engine.options import EngineOptions
from compiled_engine.resolve.engine import resolve

ENGINE: dict[str, Any] = {"device": "cpu", "mode": "compiled"}


def test_options_become_the_configuration() -> None:
    assert resolve(EngineOptions(**ENGINE)).adapters is None
    config = resolve(EngineOptions(enable_lora=True, max_loras=3, max_lora_rank=8, **ENGINE))
    assert config.adapters == AdapterConfig(3, 8, 3)
    assert config.reasons["adapters.max_cpu_loras"] == "as many as there are slots"
    more = resolve(EngineOptions(enable_lora=True, max_loras=3, max_cpu_loras=7, **ENGINE))
    assert more.adapters == AdapterConfig(3, 16, 7)
    assert resolve(EngineOptions(enable_lora=True, device="cpu", mode="eager")).adapters == AdapterConfig(1, 16, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_loras": 4}, "max_loras is 4, but enable_lora is False; allowed: 1"),
        ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 2}, r"max_cpu_loras is 2; allowed: at least max_loras"),
        ({"enable_lora": True, "max_lora_rank": 0}, "max_lora_rank is 0; allowed: an integer from 1 to 512"),
        ({"merge_adapter": "x/y/z"}, "x/y/z is no folder; allowed: a folder with adapter_config.json"),
        ({"merge_adapter": ".", "load_format": "dummy"}, "load_format is 'dummy', but merge_adapter is given"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(EngineOptions(**ENGINE | options))


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        (("", 1, "x"), ValueError),
        (("a", 0, "x"), ValueError),
        (("a", True, "x"), ValueError),
        (("a", 1, None), TypeError),
    ],
)
def test_a_request_of_an_adapter_is_checked(fields: tuple[Any, ...], error: type[Exception]) -> None:
    with pytest.raises(error, match="lora_"):
        LoRARequest(*fields)

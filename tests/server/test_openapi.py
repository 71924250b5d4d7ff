"""The OpenAPI document says what there is: paths, types, and the bounds of this server and this model."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from running_server import MODEL, RunningServer

from compiled_engine.sampling.params import SamplingParams
from compiled_engine.server.app import GET, POST
from compiled_engine.server.openapi import up_to
from compiled_engine.server.sampling_fields import SamplingFields


@pytest.fixture(scope="module")
def document(server: RunningServer) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.url}/openapi.json", timeout=60).json()
    return found


def test_every_path_is_described(document: dict[str, Any]) -> None:
    described = {(path, method) for path, methods in document["paths"].items() for method in methods}
    served = {(path, "get") for path in GET} | {(path, "post") for path in POST}
    served = {(path.replace(":path", ""), method) for path, method in served} - {("/openapi.json", "get")}
    assert described == served


def test_references_lead_somewhere(document: dict[str, Any]) -> None:
    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
            return own.union(*map(references, value.values()))
        return set().union(*map(references, value)) if isinstance(value, list) else set()

    schemas = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert references(document) <= schemas


def test_every_sampling_parameter_can_be_asked_for() -> None:
    names = {*SamplingParams.__dataclass_fields__} - {"token_mask", "logprobs"}
    assert names <= set(SamplingFields.__struct_fields__)


@pytest.mark.parametrize("most", [0, 1, 7, 9, 10, 19, 99, 100, 305, 1000, 4095])
def test_numbers_up_to_one_as_an_expression(most: int) -> None:
    expression = re.compile(up_to(most))
    assert [number for number in range(5000) if expression.fullmatch(str(number))] == list(range(most + 1))
    assert not expression.fullmatch("00")


def test_bounds_are_those_of_the_model(document: dict[str, Any]) -> None:
    fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert fields["model"] == {"enum": [MODEL, None]}
    assert fields["max_tokens"]["anyOf"][0]["maximum"] == 256
    assert fields["allowed_token_ids"]["anyOf"][0]["items"]["maximum"] == 4095
    assert fields["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 128}

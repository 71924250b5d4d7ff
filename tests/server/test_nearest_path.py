from __future__ import annotations

import httpx
import pytest
from running_server import RunningServer, error_of

from compiled_engine.server.app import GET, POST
from compiled_engine.server.nearest_path import OF_OTHER_SERVERS


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),  # a base URL without /v1
        ("/v1/v1/completions", "/v1/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/openai/v1/rerank", "/v1/rerank"),
        ("/generate", "/v1/completions"),
        ("/embed", "/v1/embeddings"),
        ("/anthropic/v1/messages", "/v1/messages"),
        ("/v1/audio/speech", None),
    ],
)
def test_an_unknown_path_is_told_which_one_may_be_meant(server: RunningServer, path: str, meant: str | None) -> None:
    response = httpx.post(server.url + path, json={}, timeout=60)
    assert response.status_code == 404
    advice = f"; did you mean {meant}?" if meant else ""
    assert error_of(response)["message"] == f"there is nothing at {path}{advice}"


def test_paths_of_other_servers_lead_to_paths_that_are_there() -> None:
    assert set(OF_OTHER_SERVERS.values()) <= {*GET, *POST}
    assert not {*OF_OTHER_SERVERS} & {*GET, *POST}


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
def test_a_path_that_needs_options_names_them(server: RunningServer, path: str) -> None:
    response = httpx.post(server.url + path, json={}, timeout=60)
    assert response.status_code == 404
    assert error_of(response)["message"].endswith("a server has it with --enable-lora and --allowed-lora-folder")

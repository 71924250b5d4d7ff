"""Who may use a server: keys, administrators, proxies, and web pages."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from running_server import COMPLETION, KEY, RunningServer, ScriptedEngine, error_of, running

from compiled_engine.server.middleware import visitor_check
from compiled_engine.server.options import ServerOptions
from compiled_engine.server.run import bind
from compiled_engine.server.web_origins import AllowedPages


def test_every_path_but_health_asks_for_the_key(narrow: RunningServer) -> None:
    wrong = (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {KEY}"},
        {"authorization": f"Bearer {KEY}x"},
    )
    for path in ("/v1/models", "/v1/completions", "/metrics", "/openapi.json", "/version", "/nothing"):
        for headers in wrong:
            response = httpx.get(narrow.url + path, headers=headers, timeout=60)
            assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
        assert httpx.get(narrow.url + path, headers={"authorization": f"bearer {KEY}"}, timeout=60).status_code != 401
    for path in ("/health", "/ping", "/ready"):
        assert httpx.get(narrow.url + path, timeout=60).status_code == 200
    assert httpx.get(f"{narrow.url}/load", headers={"authorization": f"Bearer {KEY}"}, timeout=60).json() == {
        "server_load": 0
    }


def test_what_needs_a_key_for_administrators(server: RunningServer) -> None:
    """Which is a key for everything else too; of others some may wait for all, and none may go before all."""
    engine = ScriptedEngine(server.engine, ["a"])
    with running(engine, api_key=(KEY,), admin_api_key=("admin",)) as asking:

        def status(key: str, priority: int) -> int:
            headers = {"authorization": f"Bearer {key}"}
            body = {**COMPLETION, "priority": priority}
            del body["model"]
            return httpx.post(f"{asking.url}/v1/completions", json=body, headers=headers, timeout=30).status_code

        for key, priority, expected in (
            (KEY, 0, 200), (KEY, 5, 200), (KEY, -1, 403), ("admin", -1, 200), ("admin", 5, 200), ("x", 0, 401),
        ):  # fmt: skip
            assert status(key, priority) == expected
    with running(ScriptedEngine(server.engine, ["a"]), admin_api_key=("admin",)) as open_to_all:
        for key, priority, expected in (("x", 0, 200), ("x", -1, 403), ("admin", -1, 200)):
            headers = {"authorization": f"Bearer {key}"}
            body = {"prompt": "x", "priority": priority}
            url = f"{open_to_all.url}/v1/completions"
            assert httpx.post(url, json=body, headers=headers, timeout=30).status_code == expected


@pytest.mark.parametrize("root_path", ["/llm", "/llm/"])
@pytest.mark.parametrize("prefix", ["", "/llm"])  # the proxy removes it, or leaves it
def test_a_proxys_prefix_is_no_part_of_a_path(server: RunningServer, prefix: str, root_path: str) -> None:
    with running(ScriptedEngine(server.engine), api_key=(KEY,), root_path=root_path) as behind_proxy:
        url = behind_proxy.url + prefix
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        assert httpx.get(f"{url}/v1/models", timeout=60).status_code == 401
        headers = {"authorization": f"Bearer {KEY}"}
        assert httpx.get(f"{url}/v1/models", headers=headers, timeout=60).status_code == 200
        assert httpx.get(f"{behind_proxy.url}/llm/llm/v1/models", headers=headers, timeout=60).status_code == 404
        counted = {
            sample.labels["route"]
            for family in behind_proxy.serving.metrics.collect({})
            for sample in family.samples
            if "route" in sample.labels
        }
        assert counted == {"/health", "/v1/models", "other"}


@pytest.mark.parametrize("prefix", ["", "/v1"])  # the proxy removes it, or leaves it
def test_a_proxys_prefix_may_be_the_beginning_of_known_paths(server: RunningServer, prefix: str) -> None:
    key = {"authorization": f"Bearer {KEY}"}
    with running(ScriptedEngine(server.engine, ["a"]), api_key=(KEY,), root_path="/v1") as behind_proxy:
        url = behind_proxy.url + prefix
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        name = httpx.get(f"{url}/v1/models", headers=key, timeout=60).json()["data"][0]["id"]
        assert httpx.get(f"{url}/v1/models/{name}", headers=key, timeout=60).json()["id"] == name
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, headers=key, timeout=30).status_code == 200
        assert httpx.get(f"{url}/v1/completions", headers=key, timeout=60).status_code == 405
        assert httpx.get(f"{url}/v1/nothing", headers=key, timeout=60).status_code == 404
    with running(ScriptedEngine(server.engine), root_path="/v1/models") as behind_proxy:
        url = behind_proxy.url + prefix.replace("/v1", "/v1/models")
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        assert httpx.get(f"{url}/v1/models/{name}", timeout=60).json()["id"] == name


@pytest.mark.parametrize("root_path", ["/llm", "/v1"])
def test_the_log_of_requests_has_a_proxys_prefix_once(
    server: RunningServer, root_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(ScriptedEngine(server.engine), root_path=root_path, uvicorn_log_level="info") as behind_proxy:
        for prefix in ("", root_path):
            httpx.get(f"{behind_proxy.url}{prefix}/v1/models", timeout=60)
    assert re.findall("GET ([^ ]*models)", capsys.readouterr().out) == [f"{root_path}/v1/models"] * 2


def test_an_origin_without_a_host_is_nobodys_own() -> None:
    error = visitor_check(ServerOptions(host="0.0.0.0"))({"host": ":8000", "origin": "http://:8000"})
    assert error is not None
    assert error.code == "origin_not_allowed"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"host": "localhost:8000"}, None),
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}, None),
        ({"host": "[::1]:8000"}, None),
        ({"host": "192.168.0.7:8000"}, None),
        ({"host": "gpu-box:8000"}, None),
        ({"host": "chat.example", "origin": "https://chat.example"}, None),
        ({"host": "app.localhost:8000", "origin": "http://app.localhost:8000"}, None),
        ({"host": "localhost:8000", "origin": "https://chat.example"}, None),
        ({}, None),
        ({"host": "rebound.example:8000"}, "host_not_allowed"),
        ({"host": "rebound.example:8000", "origin": "http://rebound.example:8000"}, "host_not_allowed"),
        ({"host": "127.0.0.1.rebound.example"}, "host_not_allowed"),
        ({"host": "["}, "host_not_allowed"),
        ({"host": "localhost:8000", "origin": "http://localhost:3000"}, "origin_not_allowed"),
        ({"host": "localhost:8000", "origin": "https://evil.example"}, "origin_not_allowed"),
        ({"host": "localhost:8000", "origin": "http://chat.example"}, "origin_not_allowed"),
        ({"host": "localhost:8000", "origin": "null"}, "origin_not_allowed"),
        ({"origin": "null"}, "origin_not_allowed"),
        ({"origin": "http://localhost:70000"}, "origin_not_allowed"),
        ({"origin": "https://user@chat.example"}, "origin_not_allowed"),
        ({"origin": "https://chat.example/x"}, "origin_not_allowed"),
        ({"origin": "https://chat.example:0"}, "origin_not_allowed"),
        ({"host": "localhost:8000", "origin": "http://localhost:8000/x"}, "origin_not_allowed"),
    ],
)
def test_web_pages_that_may_use_a_server_without_a_key(headers: dict[str, str], code: str | None) -> None:
    error = visitor_check(ServerOptions(allowed_origin=("https://chat.example",)))(headers)
    assert (error.code if error else None) == code
    assert visitor_check(ServerOptions(api_key=(KEY,)))(headers) is None
    elsewhere = visitor_check(ServerOptions(host="0.0.0.0", allowed_origin=("https://chat.example",)))(headers)
    assert (elsewhere.code if elsewhere else None) == (code if code == "origin_not_allowed" else None)


@pytest.mark.parametrize(
    "origin",
    ["https://chat.example:65536", "https://chat.example:0", "https://[1:2]", "https://user@a.example", "null"],
)
def test_what_is_no_origin_cannot_be_allowed(origin: str) -> None:
    """Else every page without an origin might use the server."""
    with pytest.raises(ValueError, match=r"^allowed_origin has .*; allowed: scheme, host and perhaps a port from 1 to"):
        ServerOptions(allowed_origin=(origin,))


@pytest.mark.parametrize(
    ("allowed", "same", "other"),
    [
        ("https://chat.example", "https://chat.example:443", "https://chat.example:0"),
        ("http://chat.example:80", "http://chat.example", "https://chat.example:80"),
        ("https://[2001:db8:0::1]:8443", "https://[2001:db8::1]:8443", "https://[2001:db8::1]"),
        ("https://chat.example", "https://CHAT.example", "https://chat.example:65536"),
    ],
)
def test_origins_are_the_same_however_they_are_written(allowed: str, same: str, other: str) -> None:
    pages = AllowedPages((allowed,))
    assert same in pages
    for origin in (other, "", "null", f"{allowed}/", "https://[1:2]"):
        assert origin not in pages


def test_a_page_of_another_site_gets_nothing(server: RunningServer) -> None:
    for headers in ({"host": "rebound.example"}, {"origin": "https://evil.example"}):
        for method, path in (("GET", "/metrics"), ("POST", "/v1/completions")):
            response = httpx.request(method, server.url + path, json={"prompt": "x"}, headers=headers, timeout=60)
            assert (response.status_code, next(iter(headers)) in error_of(response)["message"]) == (403, True)
    response = httpx.post(
        f"{server.url}/v1/completions", content=b'{"prompt": "x"}', timeout=60
    )  # as a page may send unasked
    assert response.status_code == 415


def test_loopback_is_the_default() -> None:
    assert ServerOptions().host == "127.0.0.1"


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({}, ""),
        ({"host": "0.0.0.0"}, "any client that can reach 0.0.0.0"),
        ({"allowed_origin": ("*",)}, "any web page"),
        ({"allowed_origin": ("https://chat.example",)}, ""),
        ({"allowed_origin": ("*",), "host": "0.0.0.0", "api_key": (KEY,)}, ""),
    ],
    ids=str,
)
def test_a_server_that_all_may_use_without_a_key_says_so(
    options: dict[str, Any], warned: str, caplog: pytest.LogCaptureFixture
) -> None:
    bind(ServerOptions(port=0, **options)).close()
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [message[: len(warned)] for message in messages] == ([warned] if warned else [])


def test_browsers_give_answers_to_pages_of_an_allowed_origin(server: RunningServer) -> None:
    page, other = {"origin": "https://chat.example"}, {"origin": "https://evil.example"}
    preflight = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    key = {"authorization": f"Bearer {KEY}"}
    engine = ScriptedEngine(server.engine, ["a", "b"])
    with running(engine, allowed_origin=("https://chat.example",), api_key=(KEY,)) as own:
        path = f"{own.url}/v1/completions"
        asked = httpx.options(path, headers=page | preflight, timeout=60)
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (204, page["origin"])
        assert asked.headers["access-control-allow-headers"] == preflight["access-control-request-headers"]
        assert "POST" in asked.headers["access-control-allow-methods"]
        for stream in (False, True):
            answer = httpx.post(path, json={"prompt": "x", "stream": stream}, headers=page | key, timeout=30)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, page["origin"])
            assert answer.headers["vary"] == "origin"
        refused = httpx.post(path, json={"prompt": "x"}, headers=page, timeout=60)  # the page can read why
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, page["origin"])
        for response in (
            httpx.options(path, headers=other | preflight, timeout=60),
            httpx.get(f"{own.url}/v1/models", headers=other | key, timeout=60),
            httpx.get(f"{own.url}/v1/models", headers=key, timeout=60),
        ):
            assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("api_key", [(), (KEY,)])
@pytest.mark.parametrize("page", [{"origin": "https://chat.example"}, {"origin": "null", "host": "rebound.example"}])
def test_every_page_may_use_a_server_that_allows_every_origin(
    server: RunningServer, page: dict[str, str], api_key: tuple[str, ...]
) -> None:
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    key = {"authorization": f"Bearer {KEY}"}
    with running(ScriptedEngine(server.engine, ["a"]), allowed_origin=("*",), api_key=api_key) as own:
        path = f"{own.url}/v1/completions"
        asked = httpx.options(path, headers=page | preflight, timeout=60)
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (204, "*")
        assert asked.headers["access-control-allow-headers"] == "authorization"
        answer = httpx.post(path, json={"prompt": "x"}, headers=page | key, timeout=30)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        refused = httpx.post(path, json={"prompt": "x"}, headers=page, timeout=30)
        assert refused.status_code == (401 if api_key else 200)

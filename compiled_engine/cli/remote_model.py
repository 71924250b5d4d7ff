"""A model behind an OpenAI-compatible server, for the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from compiled_engine.cli.errors import BadInputError

TIMEOUT_S = 600.0


class RemoteModel:
    """num_tokens: of the newest answer, once it has ended.

    url: with or without the ending /v1. model: None for the server's first. sampling: fields of each request.
    Raises BadInputError for what is no such server, and for what the server refuses.
    """

    def __init__(self, url: str, model: str | None, api_key: str | None, sampling: Mapping[str, Any]) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadInputError(f"url is {url!r}; allowed: http://HOST:PORT or https://HOST:PORT")
        self.num_tokens = 0
        self._parts = parts
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._sampling = dict(sampling)
        self._model = model or self._first_model()

    def complete(self, prompt: str) -> Iterator[str]:
        """The text that follows the prompt, as it comes."""
        for chunk in self._stream("/completions", {"prompt": prompt}):
            yield from (choice["text"] for choice in chunk["choices"])

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
        """The answer to a conversation, as it comes."""
        for chunk in self._stream("/chat/completions", {"messages": list(messages)}):
            for choice in chunk["choices"]:
                yield choice["delta"].get("reasoning_content") or ""
                yield choice["delta"].get("content") or ""

    def close(self) -> None:
        """Nothing is held between requests."""

    def _first_model(self) -> str:
        for line in self._lines("GET", "/models", None):
            models = [model["id"] for model in json.loads(line)["data"]]
            if models:
                return str(models[0])
        raise BadInputError("the server has no model")

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        more = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}}
        for line in self._lines("POST", path, {**self._sampling, **body, **more}):
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise BadInputError(f"the server says: {chunk['error'].get('message')}")
            if chunk.get("usage"):
                self.num_tokens = chunk["usage"]["completion_tokens"]
            yield chunk

    def _lines(self, method: str, path: str, body: dict[str, Any] | None) -> Iterator[str]:
        """The lines of a response. An iterator that is closed early closes the connection, which ends the request."""
        connect = HTTPSConnection if self._parts.scheme == "https" else HTTPConnection
        connection = connect(str(self._parts.hostname), self._parts.port, timeout=TIMEOUT_S)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, self._path + path, content, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise BadInputError(f"the server says {response.status}: {_message(response.read())}")
            while line := response.readline():
                yield line.decode()
        except (OSError, HTTPException, ValueError) as error:
            raise BadInputError(f"the server at {self._parts.netloc} fails: {error or type(error).__name__}") from error
        finally:
            connection.close()


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")

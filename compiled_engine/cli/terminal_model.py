"""A model for the terminal: in this process, or behind an OpenAI-compatible server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import SplitResult, urlsplit

from compiled_engine.cli.errors import BadInputError, bad_input_is_reported

TIMEOUT_S = 600.0
ALLOWED_URL = "http://HOST:PORT or https://HOST:PORT"


class LocalModel:
    """A model that runs in this process.

    Its constructor raises BadInputError for invalid options, its methods for invalid input.
    """

    def __init__(self, engine: Mapping[str, Any], sampling: Mapping[str, Any], *, quiet: bool) -> None:
        with bad_input_is_reported():
            from compiled_engine.frontend.tokenizer import find_tokenizer_folder, load_tokenizer
            from compiled_engine.llm import LLM
            from compiled_engine.process.memory import freeze_heap

            self._llm = LLM(**engine, progress=not quiet)
            try:
                default = self._llm.get_default_sampling_params()
                config = self._llm.config
                folder = find_tokenizer_folder(config.tokenizer, config.model.path)
                self._tokenizer = None if folder is None else load_tokenizer(folder)
                self._params = replace(default, **{"max_tokens": None, **sampling})
                freeze_heap()
            except BaseException:
                self._llm.close()
                raise
        self.num_tokens = 0  # of the newest answer

    def complete(self, prompt: str) -> Iterator[str]:
        """Yield the prompt's completion in pieces."""
        return self._stream(prompt)

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
        """Yield the answer to a conversation in pieces."""
        from compiled_engine.frontend.chat import render_chat

        if self._tokenizer is None:
            raise BadInputError("this model has no tokenizer: it cannot chat")
        with bad_input_is_reported():
            prompt = render_chat(self._tokenizer, messages)
        return self._stream({"prompt": prompt.text, "prompt_token_ids": prompt.token_ids})

    def close(self) -> None:
        """Shut down the engine."""
        self._llm.close()

    def _stream(self, prompt: Any) -> Iterator[str]:
        length = 0
        with bad_input_is_reported(), closing(self._llm.stream(prompt, self._params)) as stream:  # type: ignore[type-var]
            for output in stream:
                completion = output.outputs[0]
                self.num_tokens = len(completion.token_ids)
                yield completion.text[length:]
                length = len(completion.text)


class RemoteModel:
    """A model behind an OpenAI-compatible server.

    `url` may end with /v1. `model` None selects the server's first. `sampling` has fields for each request. Raises
    BadInputError if the server does not have this API, and for refused requests.
    """

    def __init__(self, url: str, model: str | None, api_key: str | None, sampling: Mapping[str, Any]) -> None:
        parts = _parts(url)
        self.num_tokens: int | None = None  # of the newest answer, once the server has sent it
        self._parts = parts
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._sampling = dict(sampling)
        self._model = model or self._first_model()

    def complete(self, prompt: str) -> Iterator[str]:
        """Yield the prompt's completion in pieces."""
        return self._stream("/completions", {"prompt": prompt}, _completed)

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
        """Yield the answer to a conversation in pieces."""
        return self._stream("/chat/completions", {"messages": list(messages)}, _answered)

    def close(self) -> None:
        """Do nothing: no connection is kept between requests."""

    def _first_model(self) -> str:
        content = "".join(self._lines("GET", "/models", None))
        with self._of_the_right_form():
            models = [str(model["id"]) for model in json.loads(content)["data"]]
        if not models:
            raise BadInputError("the server has no model")
        return models[0]

    def _stream(self, path: str, body: dict[str, Any], texts: Callable[[Any], list[str]]) -> Iterator[str]:
        """Yield the texts of an answer, which `texts` extracts from each chunk."""
        self.num_tokens = None
        more = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}}
        for line in self._lines("POST", path, {**self._sampling, **body, **more}):
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or data == "[DONE]":
                continue
            with self._of_the_right_form():
                chunk = json.loads(data)
                if "error" in chunk:
                    raise BadInputError(f"the server says: {chunk['error'].get('message')}")
                if chunk.get("usage"):
                    self.num_tokens = int(chunk["usage"]["completion_tokens"])
                found = texts(chunk)
            yield from found

    def _lines(self, method: str, path: str, body: dict[str, Any] | None) -> Iterator[str]:
        """Yield the lines of a response. Closing the iterator early closes the connection, which ends the request."""
        connect = HTTPSConnection if self._parts.scheme == "https" else HTTPConnection
        try:
            with closing(connect(str(self._parts.hostname), self._parts.port, timeout=TIMEOUT_S)) as connection:
                content = None if body is None else json.dumps(body)
                connection.request(method, self._path + path, content, self._headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise BadInputError(f"the server says {response.status}: {_message(response.read())}")
                while line := response.readline():
                    yield line.decode()
        except (OSError, HTTPException, ValueError) as error:
            raise BadInputError(f"the server at {self._parts.netloc} fails: {error or type(error).__name__}") from error

    @contextmanager
    def _of_the_right_form(self) -> Iterator[None]:
        """Convert errors in reading a response to BadInputError, since `url` may name a server with another API."""
        try:
            yield
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise BadInputError(f"the server at {self._parts.netloc} is no OpenAI-compatible one: {reason}") from error


def _parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:  # invalid brackets or port
        raise BadInputError(f"url is {url!r}: {error}; allowed: {ALLOWED_URL}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise BadInputError(f"url is {url!r}; allowed: {ALLOWED_URL}")
    return parts


def _completed(chunk: Any) -> list[str]:
    return [str(choice["text"] or "") for choice in chunk["choices"]]


def _answered(chunk: Any) -> list[str]:
    deltas = [choice["delta"] for choice in chunk["choices"]]
    return [str(delta.get(name) or "") for delta in deltas for name in ("reasoning_content", "content")]


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")

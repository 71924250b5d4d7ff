"""What a user may ask of the server, and what a request may ask of it at most."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field, fields
from typing import Any

MOST_API_SERVERS = 64
_ORIGIN = re.compile(r"https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


@dataclass(frozen=True)
class Limits:
    """Bounds on requests; beyond one of them a request is refused before it costs anything.

    max_body_bytes, max_header_bytes: of a request. max_json_depth: of arrays and objects within each other.
    receive_timeout: seconds from a request's first byte to its last. write_timeout: seconds for which a client may
    read nothing of what waits for it. keep_alive_timeout: seconds of an idle connection.
    max_completions: prompts times n of a request. max_in_flight: completions of all requests that run or wait; beyond
    it the server is busy (503).
    max_answer_tokens: of a completion; -1 for as many as the model's length allows.
    max_json_values: of a body. max_logprob_entries: log-probabilities of an answer, each with its token: those of the
    prompt in each of its completions, and those of the tokens of several completions.
    max_logprobs: alternatives for a token; -1 for any number. max_stop, max_stop_length: stop strings and their
    characters. max_token_list: entries of stop_token_ids, logit_bias, bad_words and bad_words_token_ids each.
    max_messages, max_tools: of a conversation. render_timeout: seconds for template and tokenizer.
    """

    max_body_bytes: int = 16 << 20
    max_header_bytes: int = 32 << 10
    max_json_depth: int = 64
    max_json_values: int = 1 << 20
    receive_timeout: float = 60.0
    write_timeout: float = 60.0
    keep_alive_timeout: float = 5.0
    max_completions: int = 128
    max_in_flight: int = 4096
    max_answer_tokens: int = -1
    max_logprobs: int = 20
    max_logprob_entries: int = 1 << 20
    max_stop: int = 64
    max_stop_length: int = 1024
    max_token_list: int = 1024
    max_messages: int = 4096
    max_tools: int = 256
    render_timeout: float = 10.0


@dataclass(frozen=True)
class ServerOptions:
    """The server's options beside the engine's.

    host, port: where it listens; port 0 takes a free one. api_server_count: processes that answer requests; there is
    one engine core in any case.
    api_key: any of these is asked of every request but /health, /ping and /ready; none: no key is asked for.
    allowed_origin: of web pages elsewhere (https://chat.example) that may use a server without a key.
    served_model_name: the names under which requests may ask for the model, the first of which answers carry; none:
    what `model` was given as.
    chat_template: a file or a Jinja template, instead of the checkpoint's. tool_call_parser, reasoning_parser: the
    name of one, "auto" for what the template asks for, "none". chat_template_kwargs: the names of
    `chat_template_kwargs` that requests may give.
    prefix_cache_salt_per_key: requests of different API keys share nothing in the prefix cache, so that nobody can
    find out by the clock how another key's prompts begin.
    web_page: there is a page at /, to chat with the model and to watch the engine.
    debug_inspect: there is /debug/inspect, the report of `compiled-engine inspect`, which names folders of the server.
    vllm_metric_names: /metrics has the figures that vLLM has under its names too.
    strict: a field that nobody knows is an error, not a warning. shutdown_timeout: seconds for which requests under
    way may go on after SIGTERM.
    ssl_keyfile, ssl_certfile: serve HTTPS with these. root_path: what a proxy has cut off paths.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_server_count: int = 1
    api_key: tuple[str, ...] = ()
    allowed_origin: tuple[str, ...] = ()
    served_model_name: tuple[str, ...] = ()
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    chat_template_kwargs: tuple[str, ...] = ("enable_thinking", "thinking")
    prefix_cache_salt_per_key: bool = False
    web_page: bool = True
    debug_inspect: bool = False
    vllm_metric_names: bool = False
    strict: bool = False
    shutdown_timeout: float = 30.0
    uvicorn_log_level: str = "info"
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    root_path: str = ""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        """Raises ValueError naming the option, its value and what is allowed."""
        from compiled_engine.server.parsers.registry import REASONING_FORMATS, TOOL_FORMATS

        _require_one_of("tool_call_parser", self.tool_call_parser, ("auto", "none", *TOOL_FORMATS))
        _require_one_of("reasoning_parser", self.reasoning_parser, ("auto", "none", *REASONING_FORMATS))
        _require_one_of("uvicorn_log_level", self.uvicorn_log_level, LOG_LEVELS)
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; allowed: 0 to 65535")
        if not 1 <= self.api_server_count <= MOST_API_SERVERS:
            raise ValueError(f"api_server_count is {self.api_server_count}; allowed: 1 to {MOST_API_SERVERS}")
        if not 0 <= self.shutdown_timeout < math.inf:
            raise ValueError(f"shutdown_timeout is {self.shutdown_timeout}; allowed: seconds, at least 0")
        for name, value in (("api_key", self.api_key), ("served_model_name", self.served_model_name)):
            if "" in value:
                raise ValueError(f"{name} has an empty entry; allowed: text")
        if any(not key.isascii() or not key.isprintable() for key in self.api_key):
            raise ValueError("api_key holds a character that no header can; allowed: printable ASCII")
        for origin in self.allowed_origin:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"allowed_origin is {origin!r}; allowed: scheme and host, such as https://chat.example:8080"
                )
        given = self.chat_template
        if given is not None and "{" not in given and os.sep in given and not os.path.isfile(given):
            raise ValueError(f"chat_template is {given!r}, which is no Jinja template, and there is no such file")
        if self.prefix_cache_salt_per_key and not self.api_key:
            raise ValueError("prefix_cache_salt_per_key needs an api_key; without one all requests are alike")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("ssl_keyfile and ssl_certfile must be given together")
        for limit in fields(Limits):
            _check_limit(limit.name, getattr(self.limits, limit.name))


def _check_limit(name: str, value: Any) -> None:
    lowest = -1 if name in ("max_logprobs", "max_answer_tokens") else 1
    if not lowest <= value < math.inf and not (name.endswith("timeout") and 0 < value < math.inf):
        raise ValueError(f"{name} is {value}; allowed: at least {lowest}")


def _require_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")

"""The options of the server, and the limits of requests."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from compiled_engine.frontend.chat import SETTINGS
from compiled_engine.schema import (
    SWITCH,
    TEXTS,
    Kind,
    a_list,
    check_all,
    declare,
    documented,
    integer,
    number,
    one_of,
    path,
    read_mapping,
    require_defaults,
    text,
)
from compiled_engine.server.origin import read_origin

MOST_API_SERVERS = 64
ANY_ORIGIN = "*"
# How a trainer sends weights.
GLOO, NCCL, IPC = BACKENDS = ("gloo", "nccl", "ipc")

COUNT = integer()
UNBOUNDED_COUNT = integer(-1)
SECONDS = number("above 0", lambda seconds: seconds > 0)


def template_variables(name: str, value: Any) -> dict[str, Any]:
    """Return the variables of the chat template that an option sets. `value`: a mapping, or a JSON object as text.

    Raises TypeError or ValueError, with the option's `name`, for an invalid value, or for a variable that the server
    sets itself, such as the tools.
    """
    variables = read_mapping(name, value)
    if taken := sorted(SETTINGS & variables.keys()):
        raise ValueError(f"{name} has {', '.join(taken)}; allowed: other names")
    return dict(variables)


# Only characters that HTTP headers can carry.
KEYS = a_list(
    {"type": "string"},
    "printable ASCII, at least one character",
    lambda key: key != "" and key.isascii() and key.isprintable(),
    secret=True,
)
NAMES = a_list({"type": "string"}, "strings that are not empty", lambda name: name != "")
ORIGINS = a_list(
    {"type": "string"},
    "scheme, host and perhaps a port from 1 to 65535, such as https://chat.example:8080, or "
    f"{ANY_ORIGIN} for every origin",
    lambda origin: origin == ANY_ORIGIN or read_origin(origin) is not None,
)


def transfer_config(name: str, value: Any) -> dict[str, Any]:
    """Return the configuration of weight transfers, as a dict whose only key is "backend".

    `value` is a mapping, or a JSON object as text. Raises TypeError or ValueError, with the option's `name`, for an
    invalid value.
    """
    config = dict(read_mapping(name, value))
    if config.get("backend") not in BACKENDS or len(config) > 1:
        raise ValueError(f'{name} is {config!r}; allowed: {{"backend": BACKEND}}, with {", ".join(BACKENDS)}')
    return config


TRANSFER = Kind(transfer_config, {"anyOf": [{"type": "string"}, {"type": "object"}]})
VARIABLES = Kind(template_variables, {"anyOf": [{"type": "string"}, {"type": "object"}]})


@dataclass(frozen=True)
class Limits:
    """Bounds on requests and connections."""

    max_body_bytes: int = declare(16 << 20, COUNT, "bytes of a request's body")
    max_header_bytes: int = declare(32 << 10, COUNT, "bytes of a request's line and headers")
    max_json_depth: int = declare(64, COUNT, "nested arrays and objects in a body")
    max_json_values: int = declare(1 << 20, COUNT, "values in a body: numbers, strings, arrays, and so on")
    receive_timeout: float = declare(60.0, SECONDS, "seconds from a request's first byte to its last")
    write_timeout: float = declare(60.0, SECONDS, "seconds for which a client may leave its answer unread")
    keep_alive_timeout: float = declare(5.0, SECONDS, "seconds for which a connection may be idle between requests")
    health_timeout: float = declare(
        60.0, SECONDS, "seconds for which the engine core may answer nothing before /health and /ready say 503"
    )
    max_connections: int = declare(
        8192,
        COUNT,
        "open connections",
        "a new one beyond that replaces the one that has waited longest for a request; fewer where the system allows "
        "fewer open files",
    )
    max_completions: int = declare(128, COUNT, "prompts times n of a request")
    max_inputs: int = declare(2048, COUNT, "inputs of a request for embeddings, classes or scores")
    max_in_flight: int = declare(
        4096, COUNT, "running and waiting completions of all requests; beyond it the server is busy (503)"
    )
    max_answer_tokens: int = declare(-1, UNBOUNDED_COUNT, "tokens of a completion; -1: limited by the context length")
    max_logprobs: int = declare(20, UNBOUNDED_COUNT, "alternatives for a token; -1: no limit")
    max_logprob_entries: int = declare(
        1 << 20,
        COUNT,
        "log-probabilities of an answer, over all its completions and tokens",
        "each with its token, including those of the prompt in each completion",
    )
    max_pooled_values: int = declare(
        1 << 23,
        COUNT,
        "values of the results of a request that pools, over all its texts",
        "with a task for tokens, over all their tokens",
    )
    max_stop: int = declare(64, COUNT, "stop strings of a request")
    max_stop_length: int = declare(1024, COUNT, "characters of a stop string")
    max_token_list: int = declare(
        1024, COUNT, "entries of stop_token_ids, logit_bias, bad_words and bad_words_token_ids each"
    )
    max_messages: int = declare(4096, COUNT, "messages of a conversation")
    max_tools: int = declare(256, COUNT, "tools of a request")
    render_timeout: float = declare(10.0, SECONDS, "seconds for the chat template and the tokenizer")


@dataclass(frozen=True)
class ServerOptions:
    """The server's options, besides the engine's."""

    host: str = declare("127.0.0.1", text(), "address to listen on; 0.0.0.0 for all")
    port: int = declare(8000, integer(0, 65535), "port to listen on; 0 for a free one")
    api_server_count: int = declare(
        1,
        integer(1, MOST_API_SERVERS),
        "processes that answer requests, if one cannot keep up",
        "all share one engine core",
    )
    api_key: tuple[str, ...] = declare(
        (),
        KEYS,
        "key that every request must have",
        "except /health, /ping and /ready; without this option no key is needed",
    )
    admin_api_key: tuple[str, ...] = declare(
        (),
        KEYS,
        "key that requests must have to load and unload adapters, and to give a priority below 0",
        "it is also a key as `--api-key` is; without this option every request may",
    )
    allowed_origin: tuple[str, ...] = declare(
        (),
        ORIGINS,
        "origin of web pages that may use the server in a browser, for example https://chat.example, or * for all",
    )
    served_model_name: tuple[str, ...] = declare(
        (),
        NAMES,
        "name of the model in requests",
        "answers have the first one",
        default_is="the model's own",
    )
    lora_modules: tuple[str, ...] = declare(
        (),
        TEXTS,
        "[LoRA adapter](adapters.md#the-server) that requests name as their model: `name=path`, or JSON with `name` "
        "and `path`",
        "needs `enable_lora`",
    )
    allowed_lora_folder: tuple[str, ...] = declare(
        (),
        TEXTS,
        "folder from which clients may load LoRA adapters while the server runs",
        "without this option they cannot; needs `enable_lora` and a single API server",
    )
    chat_template: str | None = declare(None, text(), "Jinja template, or a file with one, instead of the checkpoint's")
    tool_call_parser: str = declare(
        "auto",
        one_of(
            *("auto", "none", "hermes", "llama3_json", "mistral", "qwen3_coder", "seed_oss", "glm45", "minimax_m2"),
            *("kimi_k2", "deepseek_v3", "deepseek_v31", "gemma4", "functiongemma", "granite", "granite_20b_fc"),
            *("internlm", "jamba", "longcat", "phi4_mini_json", "xlam", "lfm2", "olmo3", "llama4_pythonic"),
            *("pythonic", "openai"),
        ),
        "`auto` (by the chat template), `none`, `hermes`, `llama3_json`, `mistral`, `qwen3_coder`, `seed_oss`, "
        "`glm45`, `minimax_m2`, `kimi_k2`, `deepseek_v3`, `deepseek_v31`, `gemma4`, `functiongemma`, `granite`, "
        "`granite_20b_fc`, `internlm`, `jamba`, `longcat`, `phi4_mini_json`, `xlam`, `lfm2`, `olmo3`, "
        "`llama4_pythonic`, `pythonic` or `openai`",
    )
    reasoning_parser: str = declare(
        "auto",
        one_of(
            *("auto", "none", "openai_gptoss", "kimi_k2", "gemma4", "mistral", "granite", "seed_oss", "hunyuan_a13b"),
            *("ernie45", "qwen3", "deepseek_r1"),
        ),
        "`auto` (by the chat template), `none`, `openai_gptoss`, `kimi_k2`, `gemma4`, `mistral`, `granite`, "
        "`seed_oss`, `hunyuan_a13b`, `ernie45`, `qwen3` or `deepseek_r1`",
    )
    allow_chat_template_kwarg: tuple[str, ...] = declare(
        ("enable_thinking", "thinking"),
        TEXTS,
        "name of a chat_template_kwargs entry that requests may set",
    )
    default_chat_template_kwargs: Mapping[str, Any] | str | None = declare(
        None,
        VARIABLES,
        'variables of the chat template in every request, such as `{"enable_thinking": false}`',
        "those of a request's `chat_template_kwargs` come before them",
    )
    prefix_cache_salt_per_key: bool = declare(
        False,
        SWITCH,
        "requests with different API keys share nothing in the prefix cache",
        "so that the time of a request reveals nothing about prompts of other keys",
    )
    web_page: bool = declare(True, SWITCH, "serve a page at / to chat with the model and to watch the engine")
    debug_inspect: bool = declare(
        False,
        SWITCH,
        "serve the report of `compiled-engine inspect` at /debug/inspect",
        "it names folders of the server",
    )
    rollouts: bool = declare(
        False,
        SWITCH,
        "serve the routes with which [trainers](rollouts.md#over-http) pause the engine and change its weights",
        "those of vLLM's development mode; with `--admin-api-key` they need one of its keys",
    )
    weight_transfer_config: Mapping[str, Any] | str | None = declare(
        None,
        TRANSFER,
        'how a trainer sends weights: `{"backend": "gloo"}`, broadcasts on the host; `nccl`, broadcasts between GPUs; '
        "`ipc`, in the memory of the engine's GPU",
        "needs `rollouts`",
    )
    allowed_weights_folder: tuple[str, ...] = declare(
        (),
        TEXTS,
        "folder from which clients may load weights while the server runs",
        "without this option they cannot; needs `rollouts`",
    )
    tokenizer_info: bool = declare(
        False, SWITCH, "serve the tokenizer's configuration and the chat template at /tokenizer_info"
    )
    vllm_metric_names: bool = declare(
        False, SWITCH, "export metrics that vLLM has under its names too, for its dashboards"
    )
    strict: bool = declare(False, SWITCH, "refuse unknown fields of requests instead of ignoring them")
    shutdown_timeout: float = declare(
        30.0,
        number("seconds, at least 0", lambda seconds: seconds >= 0),
        "seconds for which running requests may continue after SIGTERM",
    )
    uvicorn_log_level: str = declare(
        "info",
        one_of("critical", "error", "warning", "info", "debug", "trace"),
        "`critical`, `error`, `warning`, `info`, `debug` or `trace`",
    )
    ssl_keyfile: str | None = declare(None, path("a file"), "private key, for HTTPS")
    ssl_certfile: str | None = declare(None, path("a file"), "certificate, for HTTPS")
    root_path: str = declare(
        "",
        text(may_be_empty=True),
        "prefix of paths by which clients of a proxy reach the server; the proxy may remove it or leave it",
    )
    limits: Limits = field(default_factory=Limits)

    @property
    def logs_requests(self) -> bool:
        """Whether the log level includes a line for each response."""
        return self.uvicorn_log_level in ("info", "debug", "trace")

    def __post_init__(self) -> None:
        """Check all options. Raises TypeError or ValueError with the option, its value and what is allowed."""
        check_all(self)
        check_all(self.limits)
        given = self.chat_template
        if given is not None and "{" not in given and os.sep in given and not os.path.isfile(given):
            raise ValueError(f"chat_template is {given!r}, which is neither a Jinja template nor an existing file")
        if not self.api_key:
            reason = "there is no api_key: all requests would have the same salt"
            require_defaults(self, reason, "prefix_cache_salt_per_key", allowed="or api_key")
        if not self.rollouts:
            require_defaults(self, "rollouts is False", "weight_transfer_config", "allowed_weights_folder")
        if self.api_server_count > 1:
            reason = f"api_server_count is {self.api_server_count}, and only one process would know the adapter"
            require_defaults(self, reason, "allowed_lora_folder", allowed="or api_server_count 1")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("ssl_keyfile and ssl_certfile must be given together")


Limits.__doc__, ServerOptions.__doc__ = documented(Limits), documented(ServerOptions)

"""The options of `compiled-engine serve` beside the engine's."""

from __future__ import annotations

import operator
from pathlib import Path

from compiled_engine.cli.arguments import Argument

SERVER_ARGUMENTS = (
    Argument("host", str, "Address to listen at; 0.0.0.0 for all."),
    Argument("port", int, "Port to listen at; 0 for a free one."),
    Argument("api_server_count", int, "Processes that answer requests; more than one where one cannot keep up."),
    Argument("api_key", list[str], "Key that every request must have; may be repeated.", convert=tuple),
    Argument(
        "allowed_origin",
        list[str],
        "Origin of web pages that may use a server without a key, such as https://chat.example; may be repeated.",
        convert=tuple,
    ),
    Argument(
        "served_model_name",
        list[str],
        "Name under which requests ask for the model; may be repeated. Default: the model's own.",
        convert=tuple,
    ),
    Argument("chat_template", str, "Jinja template, or a file with one, instead of the checkpoint's."),
    Argument("tool_call_parser", str, "auto (by the chat template), none, hermes, llama3_json or mistral."),
    Argument("reasoning_parser", str, "auto (by the chat template), none, qwen3 or deepseek_r1."),
    Argument(
        "chat_template_kwargs",
        list[str],
        "Name of a chat_template_kwargs entry that requests may give; may be repeated.",
        flag="--allow-chat-template-kwarg",
        convert=tuple,
    ),
    Argument(
        "prefix_cache_salt_per_key",
        bool,
        "Requests of different API keys share nothing in the prefix cache.",
        flag="--prefix-cache-salt-per-key",
    ),
    Argument("web_page", bool, "Have no page at /.", flag="--no-web-page", convert=operator.not_),
    Argument(
        "debug_inspect", bool, "Show at /debug/inspect what the compiler did to the model.", flag="--debug-inspect"
    ),
    Argument(
        "vllm_metric_names",
        bool,
        "Show the figures that vLLM has under its names too, for dashboards made for it.",
        flag="--vllm-metric-names",
    ),
    Argument("strict", bool, "Refuse unknown fields of requests instead of ignoring them.", flag="--strict"),
    Argument("shutdown_timeout", float, "Seconds for which requests under way may go on after SIGTERM."),
    Argument("uvicorn_log_level", str, "critical, error, warning, info, debug or trace."),
    Argument("ssl_keyfile", Path, "Private key, for HTTPS.", convert=str),
    Argument("ssl_certfile", Path, "Certificate, for HTTPS.", convert=str),
    Argument("root_path", str, "What a proxy has cut off the paths of requests."),
)

LIMIT_ARGUMENTS = (
    Argument("max_body_bytes", int, "Bytes of a request's body."),
    Argument("max_header_bytes", int, "Bytes of a request's line and headers."),
    Argument("max_json_depth", int, "Arrays and objects within each other in a body."),
    Argument("max_json_values", int, "Values in a body: numbers, texts, arrays, and so on."),
    Argument("receive_timeout", float, "Seconds from a request's first byte to its last."),
    Argument("write_timeout", float, "Seconds for which a client may read nothing of what waits for it."),
    Argument("keep_alive_timeout", float, "Seconds for which a connection may be idle between requests."),
    Argument("max_completions", int, "Prompts times n of a request."),
    Argument("max_in_flight", int, "Completions that run or wait; beyond it the server is busy (503)."),
    Argument("max_answer_tokens", int, "Tokens of a completion; -1 for as many as the model's length allows."),
    Argument("max_logprobs", int, "Alternatives for a token; -1 for any number."),
    Argument("max_logprob_entries", int, "Log-probabilities of an answer, over all its completions and tokens."),
    Argument("max_stop", int, "Stop strings of a request."),
    Argument("max_stop_length", int, "Characters of a stop string."),
    Argument("max_token_list", int, "Entries of stop_token_ids, logit_bias and bad_words each."),
    Argument("max_messages", int, "Messages of a conversation."),
    Argument("max_tools", int, "Tools of a request."),
    Argument("render_timeout", float, "Seconds for chat template and tokenizer."),
)

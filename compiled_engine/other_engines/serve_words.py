"""Tables that translate the server options of `vllm serve`. Its engine options are in keywords.py."""

from __future__ import annotations

from collections.abc import Mapping

from compiled_engine.other_engines.keywords import LEAVE_OUT, Honoured, Rows, WithoutEffect, only, without_effect

# Other engines' parser names -> the parser here for the same markup.
TOOL_PARSERS = {
    **dict.fromkeys(("llama3", "llama4_json"), "llama3_json"),
    **dict.fromkeys(("qwen", "qwen25", "granite4", "ernie45"), "hermes"),
    "hunyuan_a13b": "jamba",
    "granite-20b-fc": "granite_20b_fc",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    **dict.fromkeys(("qwen3_xml", "step3p5", "mimo"), "qwen3_coder"),
    **dict.fromkeys(("glm47", "poolside_v1"), "glm45"),
    "minimax-m2": "minimax_m2",
    "gpt-oss": "openai",
}
REASONING_PARSERS = {
    **dict.fromkeys(("glm45", "glm47", "deepseek_v3", "deepseek_v31", "deepseek-v3", "nemotron_v3"), "qwen3"),
    **dict.fromkeys(("step3p5", "minimax_m2", "olmo3", "mimo", "holo2", "poolside_v1"), "qwen3"),
    **dict.fromkeys(("step3", "deepseek-r1", "qwen3-thinking"), "deepseek_r1"),
    **dict.fromkeys(("gpt-oss", "GptOss"), "openai_gptoss"),
}

SERVER: Rows = {
    "tool_call_parser": Honoured("`tool_call_parser`", "tool_call_parser", TOOL_PARSERS, nothing=("",)),
    "reasoning_parser": Honoured("`reasoning_parser`", "reasoning_parser", REASONING_PARSERS, nothing=("",)),
    "allowed_origins": Honoured("`allowed_origin`; by default no other site is allowed", "allowed_origin"),
    "default_chat_template_kwargs": Honoured("`default_chat_template_kwargs`", "default_chat_template_kwargs"),
    "disable_uvicorn_access_log": Honoured(
        "`uvicorn_log_level`: warning", choices={True: {"uvicorn_log_level": "warning"}, False: {}}, switch=True
    ),
    "enable_auto_tool_choice": Honoured(
        "models choose tools wherever `tool_call_parser` has a format, by default that of the chat template",
        switch=True,
    ),
    "exclude_tools_when_tool_choice_none": Honoured("tool_choice none always leaves tools out of prompts", switch=True),
    "enable_tokenizer_info_endpoint": Honoured(
        "`tokenizer_info`", choices={True: {"tokenizer_info": True}, False: {}}, switch=True
    ),
    "enable_server_load_tracking": Honoured("/load always has it", switch=True),
    "enable_request_id_headers": Honoured("answers always have x-request-id", switch=True),
    "enable_prompt_tokens_details": Honoured("usage always has prompt_tokens_details", switch=True),
    "chat_template_content_format": WithoutEffect(
        "a template gets contents in the form that it reads", anyway=("auto",)
    ),
    **only("start the server once, on one host or with --distributed-executor ray", headless=False),
    **only("give --host and --port", uds=()),
    **only("use a proxy", ssl_ca_certs=(), ssl_cert_reqs=0, ssl_ciphers=(), enable_ssl_refresh=False, middleware=([],)),
    **only(
        "give --tool-call-parser and --reasoning-parser one of their names, or none",
        tool_parser_plugin="",
        tool_call_parser_plugin="",
        reasoning_parser_plugin="",
    ),
    **only("call tools in the client", tool_server=()),
    **only("leave it out: trainers update the weights over the server's own routes", worker_extension_cls=("",)),
    **only("give --chat-template", trust_request_chat_template=False),
    **only(
        "let requests give return_tokens_as_token_ids, or stream_options with include_usage",
        return_tokens_as_token_ids=False,
        enable_force_include_usage=False,
    ),
    **only(LEAVE_OUT, response_role="assistant", grpc=False, allowed_methods=(["*"],), allowed_headers=(["*"],)),
    **without_effect(
        """
        enable_log_requests? disable_log_requests? enable_log_outputs? enable_log_deltas? max_log_len log_error_stack?
        disable_access_log_for_endpoints
        """,
        "requests and answers are never logged",
    ),
    **without_effect("disable_frontend_multiprocessing?", "processes are divided by --api-server-count"),
    **without_effect(
        "h11_max_incomplete_event_size h11_max_header_count",
        "bounds of requests are options of their own, such as --max-header-bytes",
    ),
    **without_effect(
        """
        allow_credentials? allowed_credentials? disable_fastapi_docs? enable_offline_docs? stream_interval tokens_only?
        renderer_num_workers tokenizer_pool_size
        """
    ),
}

# Environment variables of vLLM that are read for an option of this server, by the option's name.
VARIABLES = {"api_key": ("VLLM_API_KEY",), "batch_invariant": ("VLLM_BATCH_INVARIANT",)}
PREFIX = "VLLM_"
LOADING = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"


def read_environment(variables: Mapping[str, str], *, may_load: bool) -> list[str]:
    """Return the names of vLLM's environment variables in `variables` that have no effect here.

    may_load: whether the options let clients load adapters. Raises ValueError if a variable lets clients load adapters
    but the options do not, since an option must name the folder.
    """
    read = {name for names in VARIABLES.values() for name in names}
    if variables.get(LOADING, "").strip().lower() in ("1", "true") and not may_load:
        raise ValueError(
            f"{LOADING} is {variables[LOADING]!r}, but allowed_lora_folder is not given; allowed: "
            "--allowed-lora-folder, the folder from which clients may load adapters, or the variable unset"
        )
    return sorted(name for name in variables if name.startswith(PREFIX) and name not in (*read, LOADING))

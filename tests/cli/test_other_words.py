"""Words of other engines on the command line, in YAML files and in the environment mean what they mean in Python."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from compiled_engine.cli.app import app
from compiled_engine.cli.arguments import arguments_of
from compiled_engine.cli.serve import ServeCommand, checked_options
from compiled_engine.cli.word_division import divide
from compiled_engine.options import EngineOptions
from compiled_engine.other_engines.serve_words import SERVER
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.server.options import Limits, ServerOptions

SERVE: Any = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]


class Started(Exception):
    """The options with which the server would start: its own, and the engine's."""


@pytest.fixture(autouse=True)
def _stops(monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(*given: Any) -> ServerOptions:
        raise Started(checked_options(*given), given[2])

    monkeypatch.setattr("compiled_engine.cli.serve.checked_options", checked)


def started(*words: str, **variables: str) -> tuple[ServerOptions, dict[str, Any], str]:
    """The server's options, the engine's, and what is printed."""
    result = CliRunner().invoke(app, ["serve", *words], env=variables)
    assert isinstance(result.exception, Started), result.output
    EngineOptions(**result.exception.args[1])
    return *result.exception.args, result.stderr


def refused(*words: str, **variables: str) -> str:
    result = CliRunner().invoke(app, ["serve", *words], env=variables)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    return line


ENGINE: list[tuple[str, dict[str, Any]]] = [
    ("--enforce-eager", {"mode": "eager"}),
    ("--no-enforce-eager", {}),
    ("--enforce_eager", {"mode": "eager"}),
    ("-O0", {"mode": "eager"}),
    ("-O 0", {"mode": "eager"}),
    ("-O3", {}),
    ("-O.mode=0", {"mode": "eager"}),
    ("--optimization-level=0", {"mode": "eager"}),
    ("-cc.mode 0", {"mode": "eager"}),
    ('--compilation-config {"mode":0}', {"mode": "eager"}),
    ("--enable-prefix-caching", {}),
    ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
    ("--no-prefix-caching", {"enable_prefix_caching": False}),
    ("-tp 2 -pp=2 -dp 3", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 3}),
    ("--tensor_parallel_size 2", {"tensor_parallel_size": 2}),
    ("--max-model-len 4k", {"max_model_len": 4000}),
    ("--max_model_len=4K", {"max_model_len": 4096}),
    ("--max-model-len auto", {}),
    ("--max-model-len -1", {}),
    ("--max-num-batched-tokens 8K --max-num-seqs 1k", {"max_num_batched_tokens": 8192, "max_num_seqs": 1000}),
    ("--num-gpu-blocks-override 64", {"num_blocks": 64}),
    ("--distributed-executor-backend mp", {"distributed_executor": "multiprocess"}),
    ("--kv-cache-dtype int8_per_token_head", {"kv_cache_dtype": "int8"}),
    ("--attention-backend FLASH_ATTN", {"attention_backend": "flash_attn"}),
    ("--attention-backend FLASHINFER", {}),
    ("--attention-config.backend TRITON_ATTN", {"attention_backend": "triton"}),
    ("--generation-config vllm", {"generation_config": "none"}),
    ("--quantization fp8_per_block", {"quantization": "fp8_block"}),
    ("--model-impl vllm", {}),
    ("--enable-lora --no-async-scheduling", {"enable_lora": True, "async_scheduling": False}),
    ("--no-enable-lora", {}),
    ("--logits-processors a:B c:D", {"logits_processors": ("a:B", "c:D")}),
    (
        "--hf-overrides.text_config.rope_theta 5 --hf_overrides.eos_token_id 7",
        {"hf_overrides": '{"text_config": {"rope_theta": 5}, "eos_token_id": 7}'},
    ),
    ("--pooler-config.pooling_type MEAN", {"pooler_config": '{"pooling_type": "MEAN"}'}),
    ('--override-pooler-config {"normalize":false}', {"pooler_config": '{"normalize": false}'}),
    (
        "--speculative-config.method ngram --speculative_config.num-speculative-tokens 3",
        {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'},
    ),
    (
        '--speculative-config {"method":"ngram"} --speculative-config.num_speculative_tokens 3',
        {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'},
    ),
    ("--capture-size 1 2 --capture-size 4", {"capture_sizes": (1, 2, 4)}),
    ("--seed -3 --language-model-only", {"seed": -3, "language_model_only": True}),
    ("--limit-mm-per-prompt.image 2", {"limit_mm_per_prompt": '{"image": 2}'}),
]
SERVER_WORDS: list[tuple[str, dict[str, Any]]] = [
    ("--enable-tokenizer-info-endpoint", {"tokenizer_info": True}),
    ("--served-model-name a b", {"served_model_name": ("a", "b")}),
    ("--served-model-name a --served-model-name b", {"served_model_name": ("a", "b")}),
    ("--api-key a b", {"api_key": ("a", "b")}),
    ('--allowed-origins ["*"]', {"allowed_origin": ("*",)}),
    ('--allowed-methods ["*"] --allowed-headers ["*"]', {}),
    ("--disable-uvicorn-access-log", {"uvicorn_log_level": "warning"}),
    ("--enable-auto-tool-choice --tool-call-parser llama4_json", {"tool_call_parser": "llama3_json"}),
    ("--reasoning-parser glm45", {"reasoning_parser": "qwen3"}),
    ("--reasoning-parser gpt-oss", {"reasoning_parser": "openai_gptoss"}),
    ("--tool-call-parser gpt-oss", {"tool_call_parser": "openai"}),
    ("-asc 2", {"api_server_count": 2}),
    ('--default-chat-template-kwargs {"a":1}', {"default_chat_template_kwargs": '{"a":1}'}),
    ("--default-chat-template-kwargs.a.b 1", {"default_chat_template_kwargs": '{"a": {"b": 1}}'}),
    ("--port 9000 --root-path /a", {"port": 9000, "root_path": "/a"}),
]


def test_a_word_of_another_engine_is_an_option_of_this_one() -> None:
    for line, options in ENGINE:
        words = line.split()
        for order in (["model", *words], [*words, "--model", "model"]):
            assert EngineOptions(**started(*order)[1]) == EngineOptions(model="model", **options), line


def test_a_word_of_another_server_is_an_option_of_this_one() -> None:
    for line, options in SERVER_WORDS:
        server, engine, _ = started("model", *line.split())
        assert (server, engine) == (ServerOptions(**options), {"model": "model"}), line


def test_what_has_no_effect_is_named_in_one_line() -> None:
    """Words for what is the case anyway are not."""
    held = ["--enable-auto-tool-choice", "--enable-prefix-caching", "--enable-chunked-prefill"]
    assert started("model", *held)[2] == ""
    words = "--trust-remote-code --swap-space 16 --disable-log-requests -ep"
    _, engine, said = started("model", *words.split(), *held)
    assert EngineOptions(**engine) == EngineOptions(model="model")
    (line,) = said.splitlines()
    assert line.startswith("compiled-engine: without effect: trust_remote_code (no code of a checkpoint is ever run")
    for name in ("swap_space", "disable_log_requests", "enable_expert_parallel"):
        assert name in line


def test_a_switch_does_not_take_the_model_for_its_value() -> None:
    assert started("--trust-remote-code", "model")[1] == {"model": "model"}
    assert started("--api-key", "secret", "model")[:2] == (ServerOptions(api_key=("secret",)), {"model": "model"})
    assert started("--cudagraph-capture-sizes", "1", "2", "--model", "model")[1] == {"model": "model"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--mode compiled --enforce-eager", "enforce_eager makes mode 'eager', but mode is 'compiled'"),
        (
            "--num-blocks 4 --num-gpu-blocks-override 5",
            "num_gpu_blocks_override makes num_blocks 5, but num_blocks is 4",
        ),
        ("--cpu-offload-gb 4", "cpu_offload_gb is 4, which is not supported; use a smaller model"),
        ('--kv-transfer-config {"a":1}', "kv_transfer_config is {'a': 1}, which is not supported; leave it out"),
        ("--uds /tmp/x", "uds is '/tmp/x', which is not supported; give --host and --port"),
        ("--headless", "headless is True, which is not supported; start the server once"),
        ("--tool-call-parser gemma5", "tool_call_parser is 'gemma5'; allowed: auto, none, hermes, "),
        ("--chat-template-content-format", "--chat-template-content-format has no value"),
        ("--max-model-len 4kb", "max_model_len is '4kb'; allowed: an integer from 1"),
        ("--enforce-eagr", "No such option: --enforce-eagr"),
        ("--speculative-config.method", "requires an argument"),
        ("--port.x 3", "No such option: --port.x"),
        ("--no-swap-space", "No such option: --no-swap-space"),
        ("-xyz", "No such option: -x"),
    ],
)
def test_what_cannot_be_had_is_one_line_before_the_start(line: str, said: str) -> None:
    assert said in refused("model", *line.split())


def test_a_file_has_the_same_words(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(
        "enforce-eager: true\nno-enable-prefix-caching: true\nmax_model_len: 4k\nswap-space: 4\n"
        'compilation-config: \'{"cudagraph_mode": "NONE"}\'\nnum-gpu-blocks-override: 9\n'
        "default-chat-template-kwargs: {a: 1}\nallowed-origins: ['*']\n"
    )
    server, engine, said = started("model", "--config", str(path), "--num-blocks", "12")
    assert engine == {
        "model": "model",
        "mode": "eager",
        "enable_prefix_caching": False,
        "max_model_len": 4000,
        "num_blocks": 12,
    }
    assert server == ServerOptions(allowed_origin=("*",), default_chat_template_kwargs='{"a": 1}')
    assert "swap_space" in said
    path.write_text("cpu-offload-gb: 4")
    assert "cpu_offload_gb is 4, which" in refused("model", "--config", str(path))
    path.write_text("enforce-eagr: true")
    assert "did you mean 'enforce_eager'?" in refused("model", "--config", str(path))


def test_the_environment_of_another_server_is_honoured_or_named() -> None:
    """A server that somebody moves is not open by it."""
    assert started("model", VLLM_API_KEY="secret")[0].api_key == ("secret",)
    assert started("model", "--api-key", "own", VLLM_API_KEY="secret")[0].api_key == ("own",)
    both = started("model", COMPILED_ENGINE_API_KEY="own", VLLM_API_KEY="secret")
    assert (both[0].api_key, both[2]) == (("own",), "")
    assert started("model", VLLM_BATCH_INVARIANT="1")[1] == {"model": "model", "batch_invariant": True}
    said = started("model", VLLM_USE_V1="1", VLLM_LOGGING_LEVEL="DEBUG")[2]
    assert said == "compiled-engine: environment variables without effect: VLLM_LOGGING_LEVEL, VLLM_USE_V1\n"
    for value in ("1", "True"):
        line = refused("model", VLLM_ALLOW_RUNTIME_LORA_UPDATING=value)
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING is " in line
        assert "--allowed-lora-folder" in line
    folder = ("--enable-lora", "--allowed-lora-folder", "/tmp")
    assert started("model", *folder, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")[0].allowed_lora_folder == ("/tmp",)
    assert started("model", VLLM_ALLOW_RUNTIME_LORA_UPDATING="0")[2] == ""


# Of published commands for vLLM's load test: the options that they stand for.
LOADS: list[tuple[str, dict[str, Any]]] = [
    (
        "--model org/name --dataset-name random --random-input-len 8000 --random-output-len 1000 --request-rate 10000 "
        "--num-prompts 16 --ignore-eos --trust-remote-code",
        {"model": "org/name", "input_len": "8000", "output_len": "1000", "request_rate": ["10000"], "num_requests": 16},
    ),
    (
        "--random-input 800 --random-output 100 --num-prompt 9",
        {"input_len": "800", "output_len": "100", "num_requests": 9},
    ),
    ("--backend vllm --host 10.0.0.1 --port 9000", {"url": "http://10.0.0.1:9000"}),
    ("--host ::1", {"url": "http://[::1]:8000"}),
    ("--backend openai-chat --endpoint /v1/chat/completions", {"endpoint": "chat"}),
    ("--backend openai --endpoint /v1/completions", {"endpoint": "/v1/completions"}),
    (
        "--dataset-name custom --dataset-path data.jsonl --custom-output-len 9",
        {"dataset": Path("data.jsonl"), "output_len": "9"},
    ),
    ("--save-result --result-dir log --result-filename a.json", {"output": Path("log/a.json")}),
    ("--result-dir log", {}),
    ("--served-model-name short --model org/name", {"model": "short"}),
    ("--top-p 0.75 --top-k 10 --temperature 0.3", {"extra_body": '{"top_p": 0.75, "top_k": 10}', "temperature": 0.3}),
    ("--percentile-metrics ttft,tpot --disable-tqdm --tokenizer a", {"quiet": True}),
    (
        "--max-concurrency 8 --burstiness 100 --seed 42 --random-range-ratio 0",
        {"concurrency": 8, "burstiness": 100.0, "seed": 42},
    ),
]
BENCH: Any = typer.main.get_command(app).commands["bench"].commands["serve"]  # type: ignore[attr-defined]


def test_commands_of_another_load_test_are_read() -> None:
    plain = BENCH.make_context("serve", []).params
    for line, options in LOADS:
        found = BENCH.make_context("serve", line.split()).params
        assert {name: value for name, value in found.items() if value != plain[name]} == options, line


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--dataset-name sharegpt", "dataset_name is 'sharegpt'; allowed: 'random', 'custom'"),
        ("--random-range-ratio 0.2", "give --input-len and --output-len uniform:LEAST:MOST"),
        ("--backend tgi", "backend is 'tgi'; allowed: 'vllm', 'openai', 'openai-chat'"),
        (
            "--backend openai-chat --endpoint-type vllm --profile",
            "profile is True, which is not supported; run compiled-engine bench step",
        ),
    ],
)
def test_another_load_is_an_error(line: str, said: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", *line.split()])
    assert (result.exit_code, said in result.stderr) == (2, True), result.output


def test_help_shows_none_of_them() -> None:
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["serve", "--help"]).stdout
    assert "--trust-remote-code" not in shown
    assert "--enable-auto-tool-choice" not in shown


def test_no_word_of_another_server_hides_an_option_of_this_one() -> None:
    """A row with the name of an option is about its values."""
    own = {param.name for param in SERVE.params}
    assert own & SERVER.keys() == {"tool_call_parser", "reasoning_parser", "default_chat_template_kwargs"}


def test_an_option_is_spelled_like_its_field_and_like_no_other() -> None:
    """Errors name the field."""
    for options in (EngineOptions, SamplingParams, ServerOptions, Limits):
        arguments = arguments_of(options)
        names = {each.name for each in arguments}
        for each in arguments:
            word = each.written.split("/")[0].removeprefix("--").removeprefix("no-").replace("-", "_")
            assert word in each.name
            assert word == each.name or word not in names


WORDS = st.one_of(
    st.text(string.printable, max_size=8),
    st.sampled_from(
        [
            "--",
            "-",
            "-1",
            "--max-model-len",
            "-tp",
            "-cc.a",
            "--speculative-config.x=",
            "-O",
            "--no-",
            "--=",
            "-.",
            "{",
            "[1]",
            "--swap-space",
            "--api-key",
            "--model=",
            "--no-enable-lora=x",
        ]
    ),
)


@settings(deadline=None)
@given(st.lists(WORDS, max_size=8))
def test_any_words_are_divided_without_loss(words: list[str]) -> None:
    """Into the command's own words, and values of others; at worst the command's parser gets them all."""
    try:
        found = divide(words, SERVE.params, ServeCommand.rows)
    except ValueError:  # a word without its value
        return
    assert all(isinstance(word, str) for word in found.own)
    assert found.others.keys() <= ServeCommand.rows.keys()
    if not any(word.startswith("-") for word in words):
        assert found.own == words

"""`compiled-engine serve` as a process of its own: options, readiness, and how it ends."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import pytest
import torch
import typer
from adapter_folders import make_adapter
from serve_process import SMALL, Served, served
from typer.testing import CliRunner

import compiled_engine.cli.serve as cli_serve
from compiled_engine.cli.app import app
from compiled_engine.cli.arguments import read_config_file
from compiled_engine.server.lora_modules import check_adapter_folders
from compiled_engine.server.options import ServerOptions


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "server.yaml"
    lines = (f"{key.replace('_', '-')}: {value}" for key, value in SMALL.items())
    path.write_text("\n".join([*lines, "served_model_name: [of-the-file, second]", "strict: true"]))
    return path


def test_options_come_from_everywhere_and_a_signal_lets_requests_end(config: Path) -> None:
    """Options come from the command line, the environment and a file, in this order."""
    variables = {"COMPILED_ENGINE_MAX_MODEL_LEN": "100", "COMPILED_ENGINE_API_KEY": "one"}
    headers = {"authorization": "Bearer one"}
    with served("--config", str(config), "--max-model-len", "140", **variables) as server:
        assert httpx.get(f"{server.url}/v1/models", timeout=60).status_code == 401
        models = httpx.get(f"{server.url}/v1/models", headers=headers, timeout=60).json()["data"]
        assert [(model["id"], model["max_model_len"]) for model in models] == [("of-the-file", 140), ("second", 140)]
        response = httpx.post(
            f"{server.url}/v1/completions", headers=headers, json={"prompt": "x", "strange": 1}, timeout=60
        )
        assert response.status_code == 400
        answers: list[httpx.Response] = []
        reader = threading.Thread(target=lambda: answers.append(server.stream(headers=headers)))
        reader.start()
        wait_for_tokens(server, headers)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        reader.join(60)
        assert answers[0].text.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"length"' in answers[0].text


def test_a_second_signal_ends_requests(config: Path) -> None:
    answers: list[Any] = []
    with served("--config", str(config), "--max-model-len", "2048", "--num-blocks", "1024") as server:
        reader = threading.Thread(target=lambda: answers.append(attempt(server)))
        reader.start()
        wait_for_tokens(server)
        server.process.send_signal(signal.SIGTERM)
        wait_for_no_listener(server)  # signals that come at once are one signal
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)
        reader.join(60)
        assert not isinstance(answers[0], httpx.Response) or "[DONE]" not in answers[0].text


def attempt(server: Served) -> Any:
    try:
        return server.stream(2000)
    except httpx.HTTPError as error:
        return error


def wait_for_tokens(server: Served, headers: dict[str, str] | None = None) -> None:
    deadline = time.monotonic() + 30
    while "num_requests_running{" not in (
        text := httpx.get(f"{server.url}/metrics", headers=headers, timeout=60).text
    ) or re.search(r"num_requests_running\{.*\} 0", text):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_no_listener(server: Served) -> None:
    deadline = time.monotonic() + 30
    with contextlib.suppress(httpx.TransportError):
        while httpx.get(f"{server.url}/health", timeout=60):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_the_death_of_the_core_ends_the_server(config: Path) -> None:
    with served("--config", str(config), "--max-model-len", "2048", "--num-blocks", "1024") as server:
        answers: list[Any] = []
        reader = threading.Thread(target=lambda: answers.append(attempt(server)))
        reader.start()
        wait_for_tokens(server)
        (core, *_) = psutil.Process(server.process.pid).children()
        core.kill()
        reader.join(60)
        assert '"error"' in answers[0].text
        health = httpx.get(f"{server.url}/health", timeout=60)
        assert health.status_code == 503
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=60).status_code == 500
        assert server.process.wait(60) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tensor-parallel-size", "3"], "tensor_parallel_size is 3, which does not divide"),
        (["--data-parallel-size", "0"], "data_parallel_size"),
        (["--tool-call-parser", "none-such"], "tool_call_parser"),
        (["--max-completions", "0"], "max_completions"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["one", "--model", "another"], "given twice"),
        (["--host", "256.1.1.1"], "cannot listen at 256.1.1.1"),
        (["--chat-template", "/no/such.jinja"], "chat_template is '/no/such.jinja'"),
    ],
)
def test_options_that_cannot_be_honoured(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["serve", "--port", "0", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lora-modules", "a=b"], "lora_modules is ('a=b',), but enable_lora is False"),
        (["--allowed-lora-folder", "b"], "allowed_lora_folder is ('b',), but enable_lora is False"),
        (["--enable-lora", "--lora-modules", "a"], "lora_modules has 'a'; allowed: name=path"),
    ],
)
def test_options_of_adapters_are_checked_before_the_engine_starts(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_serve, "_start", lambda *given: pytest.fail("it starts"))
    result = CliRunner().invoke(app, ["serve", "--port", "0", *arguments])
    assert (result.exit_code, message in result.stderr) == (2, True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters, and folders that are none."""
    folder = tmp_path_factory.mktemp("adapters")
    linear = torch.nn.Sequential(OrderedDict(q_proj=torch.nn.Linear(8, 8))).requires_grad_(False)
    for name, config in {"rank_4": {}, "bias": {"bias": "all"}, "other": {"peft_type": "IA3"}, "damaged": {}}.items():
        make_adapter(folder / name, linear, 4, targets=("q_proj",), **config)
    (folder / "damaged" / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    (folder / "empty").mkdir()
    return folder


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./nowhere", "lora_modules has 'a': nowhere is no folder; allowed: a folder with adapter_config.json and "),
        ("empty", "lora_modules has 'a': empty/adapter_config.json is missing"),
        ("bias", "bias must be none, got 'all'"),
        ("other", "peft_type must be LORA, the only method that is supported, got 'IA3'"),
        ("damaged", "damaged/adapter_model.safetensors is damaged: "),
        ("rank_4", "lora_modules has 'a': rank_4 has rank 4; allowed: up to max_lora_rank, 2"),
    ],
)
def test_adapters_are_checked_before_anything_heavy_is_imported(path: str, message: str, folders: Path) -> None:
    program = f"""
import sys
sys.modules["torch"] = None
from compiled_engine.cli import main
sys.argv[1:] = ["serve", "--port", "0", "--enable-lora", "--max-lora-rank", "2", "--lora-modules", "a={path}"]
main()
"""
    result = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, cwd=folders)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert message in line


def test_adapters_that_the_engine_may_have_are_left_to_it(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names on the hub as well, which are not looked up."""
    monkeypatch.chdir(folders)
    given = ("a=rank_4", "b=org/name", '{"name": "c", "path": "org/name@main"}')
    check_adapter_folders(ServerOptions(lora_modules=given), 4)


def test_a_wrong_value_of_the_environment_is_named() -> None:
    result = CliRunner().invoke(app, ["serve"], env={"COMPILED_ENGINE_PORT": "abc"})
    assert result.exit_code == 2
    assert "(the environment has COMPILED_ENGINE_PORT='abc')" in result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-modellen: 3", "max_model_len"),
        ("- a", "option names"),
        ("port: {a: 1}", "port"),
        ("a: [", "cannot read"),
        ("port: abc", "(the file of --config has 'abc')"),
        ("api-key: ''", "api_key has an entry that is not allowed; allowed: printable ASCII"),  # one is a list of one
    ],
)
def test_files_that_are_no_configuration(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    result = CliRunner().invoke(app, ["serve", "--config", str(path)])
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no-fast: true", "False"),
        ("no_fast: false", "True"),
        ("fast: true", "True"),
        ("no-fast: 3", "must be true or false, got 3"),
    ],
)
def test_a_file_may_say_what_is_not_to_be(text: str, said: str, tmp_path: Path) -> None:
    command = typer.Typer()

    @command.command()
    def show(
        config: Annotated[Path | None, typer.Option(callback=read_config_file, is_eager=True)] = None,
        fast: Annotated[bool | None, typer.Option("--fast/--no-fast")] = None,
    ) -> None:
        typer.echo(repr(fast))

    path = tmp_path / "server.yaml"
    path.write_text(text)
    result = CliRunner().invoke(command, ["--config", str(path)])
    assert re.search(said, " ".join((result.stdout + result.stderr).split()))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("speculative-config: {method: ngram, num_speculative_tokens: 3}", '{"method": "ngram", "num_speculative_tok'),
        ("speculative_config:\n  method: ngram", '{"method": "ngram"}'),
        ("model: {method: ngram}", "model in .* must be a value or a list"),
    ],
)
def test_a_file_may_have_mappings_where_the_command_line_has_json(text: str, said: str, tmp_path: Path) -> None:
    command = typer.Typer()

    @command.command()
    def show(
        config: Annotated[Path | None, typer.Option(callback=read_config_file, is_eager=True)] = None,
        speculative_config: Annotated[str | None, typer.Option()] = None,
        model: Annotated[str | None, typer.Option()] = None,
    ) -> None:
        typer.echo(speculative_config)

    path = tmp_path / "server.yaml"
    path.write_text(text)
    result = CliRunner().invoke(command, ["--config", str(path)])
    assert re.search(said, " ".join((result.stdout + result.stderr).split()))

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from telling_program import TELLS_HOW_IT_ENDS
from typer.testing import CliRunner

import compiled_engine
from compiled_engine.cli.app import app
from compiled_engine.cli.arguments import ENGINE_ARGUMENTS, SAMPLING_ARGUMENTS
from compiled_engine.cli.config import profile_note
from compiled_engine.cli.errors import OneLineErrors, bad_input_is_reported
from compiled_engine.options import EngineOptions
from compiled_engine.resolve.engine import resolve
from compiled_engine.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = [
    *("--mode", "eager", "--device", "cpu", "--max-model-len", "128", "--max-num-seqs", "4"),
    *("--max-num-batched-tokens", "32", "--num-blocks", "64", "--quiet"),
]
PROMPT = "def add(a, b):\n"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize("closed", ["<&-", "<&- >&- 2>&-"])
def test_a_closed_standard_stream_is_no_error(closed: str, tmp_path: Path) -> None:
    """Where a daemon starts it, say; `complete` asks whether somebody types."""
    options = " ".join((*SMALL, "--max-tokens", "1"))
    command = f"{Path(sys.executable).with_name('compiled-engine')} complete {options} {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_goes_is_no_error_of_the_input(tmp_path: Path) -> None:
    command = f"{Path(sys.executable).with_name('compiled-engine')} bench table --list"
    done = subprocess.run(["sh", "-c", f"{command} | true"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "error" not in done.stderr


def test_a_report_is_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    command = [Path(sys.executable).with_name("compiled-engine"), "inspect", *SMALL, "-o", f"{tmp_path}/"]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert "·" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert list((tmp_path / "text").iterdir())


def test_every_engine_option_is_an_argument() -> None:
    assert [argument.name for argument in ENGINE_ARGUMENTS] == [field.name for field in fields(EngineOptions)]


def test_sampling_arguments_are_sampling_params() -> None:
    assert {argument.name for argument in SAMPLING_ARGUMENTS} <= {field.name for field in fields(SamplingParams)}


# Each names what it has imported, in one process.
SHOW_HELP = """
import io, json, sys
from contextlib import redirect_stdout
from compiled_engine.cli.app import app
for command in json.loads(sys.argv[1]):
    shown = io.StringIO()
    try:
        with redirect_stdout(shown):
            app([*command, "--help"])
    except SystemExit as end:
        assert not end.code
    print(json.dumps([shown.getvalue(), sorted({"torch", "transformers"} & set(sys.modules))]))
"""


def test_help_has_examples_and_needs_no_torch() -> None:
    commands: list[list[str]] = [
        *([], ["generate"], ["config"], ["demo"], ["inspect"], ["tune"], ["quantise"]),
        *(["cache", "ls"], ["bench", "serve"]),
    ]
    call = [sys.executable, "-c", SHOW_HELP, json.dumps(commands)]
    result = subprocess.run(call, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    for command, line in zip(commands, result.stdout.splitlines(), strict=True):
        shown, imported = json.loads(line)
        assert ("Examples:" if command else "examples") in shown, command
        assert not imported, command


def commands_of(group: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    for own, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands_of(command, f"{name}{own} ")
        else:
            yield name + own, command


COMMANDS = dict(commands_of(typer.main.get_command(app)))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_whole_where_lines_have_80_characters(name: str) -> None:
    """As they have in a pipe: no option's name is cut off, and examples can be copied."""
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*name.split(), "--help"]).stdout
    for parameter in COMMANDS[name].params:
        options = [option for option in (*parameter.opts[:1], *parameter.secondary_opts) if option.startswith("--")]
        assert [option for option in options if f" {option}" not in shown] == []
    _, _, examples = inspect.cleandoc(COMMANDS[name].callback.__doc__ or "").partition("Examples:\n")
    assert " ".join(examples.split()) in " ".join(shown.split())


def test_without_arguments_there_is_help() -> None:
    result = run()
    assert result.exit_code == 0
    assert result.stdout == run("--help").stdout
    for group in ("bench", "cache"):
        result = run(group)
        assert (result.exit_code, result.stderr) == (0, "")


def test_version() -> None:
    assert run("--version").stdout.strip() == compiled_engine.__version__


def test_config_as_a_table() -> None:
    result = run("config", "--device", "cpu", "--max-num-seqs", "8")
    assert result.exit_code == 0
    rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines() if line.strip()}
    assert rows["scheduler.max_num_seqs"] == ["8"]
    assert rows["model.dtype"][0] == "float32"
    assert len(rows["model.dtype"]) > 1  # the reason


def test_config_shows_values_as_they_are(tmp_path: Path) -> None:
    """Brackets and colons are no styles and no emoji."""
    result = run("config", "--device", "cpu", "--cache-dir", str(tmp_path / "[red]:100:"))
    assert "/[red]:100:" in result.stdout.replace("\n", "").replace(" ", "")


def test_config_shows_values_that_are_lists() -> None:
    result = run("config", "--device", "cpu", "--compile-range", "64", "--compile-range", "128")
    assert result.exit_code == 0, result.stderr
    assert "[1, 64], [65, 128]" in result.stdout


def test_config_says_that_a_gpu_has_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve(EngineOptions(device="cpu"))
    on_gpu = replace(config, device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A10")
    note = profile_note(on_gpu)
    assert note is not None
    assert note.startswith("NVIDIA A10 has no profile")
    assert note.endswith(f"compiled-engine tune --quick --model {config.model.path}")
    assert profile_note(config) is None
    assert profile_note(replace(on_gpu, compile=replace(config.compile, enabled=False))) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert profile_note(on_gpu) is None


def test_config_as_json() -> None:
    result = run(
        *(
            "config",
            "--json",
            "--device",
            "cpu",
            "--mode",
            "compiled",
            "--block-size",
            "32",
            "--seed",
            "3",
            "--no-cache",
        ),
        *("--disable-pass", "silu_mul", "--disable-pass", "residual_rms_norm", "--no-prefix-caching"),
    )
    config = json.loads(result.stdout)
    assert config["cache"]["block_size"] == 32
    assert config["cache"]["enable_prefix_caching"] is False
    assert config["compile"]["enabled"] is True
    assert config["compile"]["cache_dir"] is None
    assert not {"silu_mul", "residual_rms_norm"} & set(config["compile"]["passes"])
    assert config["model"]["seed"] == 3
    assert "model.path" in config["reasons"]


def test_generate_prints_the_prompt_and_its_completion() -> None:
    result = run("generate", *SMALL, "--prompt", PROMPT, "--max-tokens", "6", "--ignore-eos")
    assert result.exit_code == 0
    assert result.stdout.startswith(PROMPT)
    assert len(result.stdout) > len(PROMPT) + 1
    assert "6 tokens in " in result.stderr
    assert "tok/s" in result.stderr


def test_generate_prints_several_completions() -> None:
    result = run(
        *("generate", *SMALL, "--prompt", PROMPT, "--prompt", "class A:", "--n", "2"),
        *("--max-tokens", "3", "--temperature", "1", "--ignore-eos"),
    )
    assert result.exit_code == 0
    assert result.stdout.count(PROMPT) == result.stdout.count("class A:") == 2


def test_json_holds_outputs_and_metrics_and_nothing_else_is_on_stdout() -> None:
    program = [sys.executable, "-m", "compiled_engine"]
    arguments = ["generate", *SMALL[:-1], "--prompt", PROMPT, "--prompt", "import", "--temperature", "0"]
    arguments += ["--max-tokens", "5", "--ignore-eos", "--logprobs", "2", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run([*program, *arguments], capture_output=True, text=True, check=True, env=environment)
    report = json.loads(result.stdout)
    assert [output["prompt"] for output in report["outputs"]] == [PROMPT, "import"]
    for output in report["outputs"]:
        assert (len(output["token_ids"]), output["finish_reason"], output["stop_reason"]) == (5, "length", None)
        assert len(output["logprobs"]) == 5
        assert output["text"]
    metrics = report["metrics"]
    assert (metrics["traces"], metrics["compiles"], metrics["captures"], metrics["cache"]) == (0, 0, 0, "off")
    assert (metrics["num_output_tokens"], metrics["preemptions"], metrics["prefix_hits"]) == (10, 0, 0)
    for name in ("start_s", "ttft_s", "tpot_s", "output_tokens_per_s"):
        assert metrics[name] > 0
    assert metrics["start_s"] > metrics["engine_start_s"]
    assert "kv_usage" in metrics
    assert "load weights" in result.stderr


def test_demo_writes_python() -> None:
    result = run("demo", *SMALL[:-1], "--max-tokens", "4")
    assert result.exit_code == 0
    assert "class Stack:" in result.stdout
    assert "tok/s" in result.stderr


def test_an_interrupt_while_commands_are_imported_shows_no_traceback() -> None:
    program = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from compiled_engine.cli import main
main()
"""
    result = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize(("command", "status"), [("--help", 0), ("confg", 2)])
def test_a_command_ends_with_its_exit_handlers_and_takes_nothing_down(command: str, status: int) -> None:
    program = f"""{TELLS_HOW_IT_ENDS}
atexit.register(print, "exit handler", file=sys.stderr)
from compiled_engine.cli import main
main()
"""
    result = subprocess.run([sys.executable, "-c", program, command], check=False, capture_output=True, text=True)
    assert result.returncode == status
    assert result.stderr.endswith("exit handler\n")


BAD_INPUT = [
    (["generate"], "Missing option '--prompt'."),
    (["generate", "--promt", "a"], "No such option: --promt"),
    (
        ["generate", "--lora-modules", "a=b", "--prompt", "a"],
        "lora_modules is 'a=b', which is not supported; give enable_lora",
    ),
    (["config", "--swap-space"], "--swap-space has no value"),
    (["config", "--compilation-config", "{a}"], "compilation_config is '{a}'; allowed: a dict as JSON ("),
    (["config", "--compilation-config", "a"], "compilation_config['mode'] is 'a'; allowed: 0, 3, 'NONE', 'VLLM_"),
    (["config", "--attention-config", "a"], "attention_config is 'a'; allowed: a dict"),
    (["config", "-cc.mod", "3"], "compilation_config has no key 'mod'; did you mean 'mode'?"),
    (["config", "--enable-auto-tool-choice"], "No such option: --enable-auto-tool-choice"),
    (["bench", "plot", "--enable-lora"], "No such option: --enable-lora"),
    (["confg"], "No such command 'confg'."),
    (["generate", "--prompt", "a", "--max-tokens", "many"], "(got 'many')"),
    (["generate", "--prompt", "a", "--max-tokens=many"], "Invalid value for '--max-tokens': "),
    (["generate", "--prompt", "a", "--mode", "fast"], "mode is 'fast'; allowed: auto, eager, compiled, graphed"),
    (["generate", "--prompt", "a", "--model", "nowhere"], "model must be a folder"),
    (["config", "--block-size", "none"], "block_size"),
    (["generate", *SMALL, "--num-blocks", "2", "--prompt", "a b " * 20], "prompts must have at most the 32 tokens"),
    (["generate", *SMALL, "--num-blocks", "1000000000", "--prompt", "a"], "num_blocks is 1000000000, which take"),
    (["config", "--num-blocks", str(10**23)], f"num_blocks is {10**23}; allowed: an integer from 1 to 2147483647"),
    (["config", "--max-num-batched-tokens", str(10**12)], "allowed: an integer from 1 to 1048576"),
    (["config", "--max-num-seqs", str(10**12)], "allowed: an integer from 1 to 65535"),
    (["config", "--block-size", str(10**12)], "allowed: 1 to 65536, or 'auto'"),
    (
        ["bench", "load", "--shape", "qwen3-0.6b", "--device", "foo"],
        "device is 'foo'; allowed: auto, cpu, cuda, cuda:N",
    ),
    (["config", "--capture-size", "8"], "capture_sizes is (8,), but the mode captures no"),
    (["bench", "step", "--profile", "README.md"], "profile is 'README.md', a file; allowed: a folder"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT)
def test_bad_input_is_one_line_on_stderr(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("compiled-engine: error: ")
    assert message in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a", "--temperature", "-1"], "temperature must be a finite number >= 0 and <= 1e+37, got -1.0"),
        (["--prompt", "a", "--prompt", ""], "prompts[1] must have at least one token, got ''"),
        (["--prompt", "a " * 3000], "prompts must have at most 2047 tokens"),
        (["--prompt", "a", "--logprobs", "99999"], "logprobs must be <= 4096"),
    ],
)
def test_bad_prompts_and_parameters_are_found_before_a_model_is_loaded(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compiled_engine.llm.LLM", lambda *_, **__: pytest.fail("the model is loaded"))
    result = run("generate", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


@pytest.mark.parametrize("option", ["--output", "--text", "--depyf"])
def test_a_report_that_cannot_be_written_is_found_before_anything_is_compiled(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compiled_engine.graphs.compiled_model.compile_model", lambda *_: pytest.fail("it is compiled"))
    (tmp_path / "file").touch()
    result = run("inspect", option, str(tmp_path / "file" / "x.html"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"compiled-engine: error: {option[2:]} is ")
    assert "file is a file; allowed: a folder" in result.stderr or "a file; allowed: a folder" in result.stderr


def test_an_error_of_the_program_is_not_taken_for_bad_input() -> None:
    failing = typer.Typer(cls=OneLineErrors)

    @failing.command()
    def read() -> None:
        with bad_input_is_reported():
            raise ValueError("no such\nfile")

    @failing.command()
    def compute() -> None:
        raise ValueError("a mistake in the program")

    result = CliRunner().invoke(failing, ["read"])
    assert (result.exit_code, result.stderr) == (2, "compiled-engine: error: no such file\n")
    assert isinstance(CliRunner().invoke(failing, ["compute"]).exception, ValueError)

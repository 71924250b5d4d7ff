"""`compiled-engine chat` and `complete`, with a model of their own and with a server."""

from __future__ import annotations

from typing import Any

import pytest
from running_server import ENGINE, RunningServer
from typer.testing import CliRunner

from compiled_engine import LLM, SamplingParams
from compiled_engine.cli.app import app

LOCAL = [
    *("--mode", "eager", "--device", "cpu", "--dtype", "float32", "--max-model-len", "256", "--num-blocks", "64"),
    *("--max-num-batched-tokens", "256", "--max-num-seqs", "4", "--quiet"),
]
GREEDY = ["--temperature", "0", "--max-tokens", "8"]
PARAMS = SamplingParams(temperature=0, max_tokens=8)

pytestmark = pytest.mark.usefixtures("one_thread")


def run(command: str, given: str, *arguments: str) -> Any:
    return CliRunner().invoke(app, [command, *arguments, *GREEDY], input=given)


@pytest.fixture(scope="module")
def offline() -> Any:
    """A completion of two prompts, an answer, and the answer to what follows it."""
    with LLM(**ENGINE) as llm:
        completions = [output.outputs[0].text for output in llm.generate(["x = 1", "import"], PARAMS, use_tqdm=False)]
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "x = 1"}]
        answers = []
        for line in ("y", "z"):
            answers.append(llm.chat(messages, PARAMS, use_tqdm=False)[0].outputs[0].text)
            messages += [{"role": "assistant", "content": answers[-1]}, {"role": "user", "content": line}]
        return completions, answers


@pytest.mark.parametrize("remote", [False, True])
def test_lines_are_completed(server: RunningServer, offline: Any, remote: bool) -> None:
    result = run("complete", "x = 1\nimport\n\nleft out\n", *(["--url", server.url] if remote else LOCAL))
    assert result.exit_code == 0, result.output
    assert result.stdout == "".join(f"{text}\n" for text in offline[0])
    assert ("8 tokens in" in result.stderr) == remote  # --quiet


def test_a_line_of_the_command_line_is_answered_alone(server: RunningServer, offline: Any) -> None:
    result = run("complete", "import\n", "--url", server.url, "--quick", "x = 1")
    assert (result.exit_code, result.stdout) == (0, f"{offline[0][0]}\n")
    result = run("chat", "", "--url", server.url, "--system", "s", "-q", "x = 1")
    assert (result.exit_code, result.stdout) == (0, f"{offline[1][0]}\n")


@pytest.mark.parametrize("remote", [False, True])
def test_a_conversation_goes_on_until_it_is_cleared(server: RunningServer, offline: Any, remote: bool) -> None:
    where = ["--url", f"{server.url}/v1", "--quiet"] if remote else LOCAL
    result = run("chat", "x = 1\ny\n/clear\nx = 1\n", "--system", "s", *where)
    assert result.exit_code == 0, result.output
    first, second = offline[1]
    assert result.stdout == f"{first}\n{second}\n{first}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "ftp://x"], "url is 'ftp://x'"),
        (["--url", "http://127.0.0.1:9"], "the server at 127.0.0.1:9 fails"),
        (["--url", "http://127.0.0.1:9", "--mode", "eager"], "mode is an option of an engine here"),
        (["--n", "2"], "n is 2"),
        (["one", "--model", "two"], "given twice"),
        (["/no/such/folder"], "/no/such/folder"),
    ],
)
def test_what_cannot_be_asked(arguments: list[str], message: str) -> None:
    result = run("complete", "x\n", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_what_a_server_refuses(server: RunningServer) -> None:
    result = run("chat", "x\n", "another", "--url", server.url)
    assert (result.exit_code, "404: the model 'another' does not exist" in result.stderr) == (2, True)

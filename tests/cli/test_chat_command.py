"""`compiled-engine chat` and `complete`, with a model of their own and with a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from running_server import ENGINE, RunningServer
from typer.testing import CliRunner

from compiled_engine.cli.app import app
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

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
        (["--url", "http://localhost:abc"], "url is 'http://localhost:abc': "),
        (["--url", "http://localhost:99999"], "url is 'http://localhost:99999': "),
        (["--url", "localhost:0"], "url is 'localhost:0'; allowed: http://HOST:PORT"),
        (["--url", "http://[::1"], "url is 'http://[::1': "),
        (["--url", "http://a b:80"], "the server at a b:80 fails"),
        (["--url", "http://127.0.0.1:9"], "the server at 127.0.0.1:9 fails"),
        (["--url", "http://127.0.0.1:9", "--mode", "eager"], "mode is an option of a local engine"),
        (["--n", "2"], "n is 2"),
        (["one", "--model", "two"], "given twice"),
        (["/no/such/folder"], "/no/such/folder"),
    ],
)
def test_what_cannot_be_asked(arguments: list[str], message: str) -> None:
    result = run("complete", "x\n", *arguments)
    assert result.exit_code == 2, result.exception
    assert message in result.stderr


def test_what_a_server_refuses(server: RunningServer) -> None:
    result = run("chat", "x\n", "another", "--url", server.url)
    assert (result.exit_code, "404: the model 'another' does not exist" in result.stderr) == (2, True)


@contextmanager
def played_server(models: str, *answers: list[Any]) -> Iterator[str]:
    """A server with this text as its list of models, and these chunks in turn as its answers; its URL."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(models)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self._send("".join(f"data: {json.dumps(chunk)}\n\n" for chunk in left.pop(0)))

        def _send(self, text: str) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *values: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


MODELS = json.dumps({"data": [{"id": "played"}]}, indent=2)
TEXT = {"choices": [{"text": "so"}]}


def test_no_speed_is_told_of_an_answer_whose_tokens_the_server_has_not_counted() -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 7}}
    with played_server(MODELS, [TEXT, usage], [TEXT]) as url:
        result = run("complete", "one\ntwo\n", "--url", url)
    assert (result.exit_code, result.stdout) == (0, "so\nso\n")
    counted, unknown = result.stderr.splitlines()
    assert counted.startswith("7 tokens in ")
    assert unknown.startswith("first after ")


@pytest.mark.parametrize("models", ["<html></html>", "", "[]", '{"data": [{}]}', '{"data": null}', '"data"'])
def test_a_list_of_models_that_is_none(models: str) -> None:
    with played_server(models) as url:
        result = run("complete", "x\n", "--url", url)
    assert result.exit_code == 2, result.exception
    assert "is no OpenAI-compatible one" in result.stderr


@pytest.mark.parametrize("chunk", [{}, 3, [], {"choices": [{}]}, {"choices": [3]}, {"choices": [], "usage": [1]}])
@pytest.mark.parametrize("command", ["complete", "chat"])
def test_an_answer_that_is_none(command: str, chunk: Any) -> None:
    with played_server(MODELS, [chunk]) as url:
        result = run(command, "x\n", "--url", url)
    assert result.exit_code == 2, result.exception
    assert "is no OpenAI-compatible one" in result.stderr

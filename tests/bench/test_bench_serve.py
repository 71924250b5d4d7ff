"""`bench serve` against this engine's server and against others; no time is asserted."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from running_server import RunningServer
from typer.testing import CliRunner

from compiled_engine.cli.app import app
from compiled_engine.cli.bench_engine import command_line
from compiled_engine.cli.bench_serve import SECRETS

pytestmark = pytest.mark.usefixtures("one_thread")

PNG = b"\x89PNG\r\n"
OK = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "serve", *arguments, "--quiet"])


def chunk(value: Any) -> bytes:
    data = value if isinstance(value, bytes) else b"data: " + json.dumps(value).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


@contextmanager
def another_server(*answers: Answer) -> Iterator[str]:
    """A server of one model, "other", which says nothing of it; answer i is that of connection i, the last one of all
    others. Its url."""

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /v1/models"):
            body = b'{"data": [{"id": "other"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (len(body), body))
        else:
            length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(length)
            await waiting.pop(0)(reader, writer) if len(waiting) > 1 else await waiting[0](reader, writer)
        writer.close()

    waiting = list(answers)
    loop = asyncio.new_event_loop()
    started = loop.run_until_complete(asyncio.start_server(serve_one, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{started.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def good(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Two parts, and no usage."""
    for text in ("a", "bc"):
        writer.write((OK if text == "a" else b"") + chunk({"choices": [{"text": text}]}))
        await writer.drain()
    writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    await writer.drain()


async def busy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy")


async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(OK + chunk({"choices": [{"text": "a"}]}))


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(2)


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("endpoint", ["completions", "/v1/chat/completions"])
def test_a_sweep_ends_in_figures_plots_and_a_page(server: RunningServer, tmp_path: Path, endpoint: str) -> None:
    output, page, plots = tmp_path / "new" / "load.json", tmp_path / "load.html", tmp_path / "plots"
    arguments = ["--url", server.url, "--endpoint", endpoint, "--request-rate", "inf,50%", "--num-requests", "6"]
    arguments += ["--input-len", "uniform:4:8", "--output-len", "5", "--shared-prefix", "8", "--concurrency", "4"]
    arguments += ["--client-processes", "2", "--goodput", "ttft=1e6,tpot=1e6", "--save-detailed", "--temperature", "0"]
    result = run(*arguments, "--output", str(output), "--html", str(page), "--plots", str(plots))
    assert result.exit_code == 0, result.stderr
    for text in ("all at once", "TTFT", "p99", "good/s"):
        assert text in result.stdout
    found = json.loads(output.read_text())
    assert found.keys() == {
        *("benchmark", "url", "served_model", "load", "runs", "date", "machine", "versions", "command"),
    }
    assert (found["benchmark"], found["served_model"], len(found["runs"])) == ("serve", "small", 2)
    assert found["runs"][1]["rate"] == pytest.approx(found["runs"][0]["request_throughput"] / 2)
    for measured in found["runs"]:
        assert (measured["completed"], measured["output_tokens"], measured["errors"]) == (6, 30, {})
        assert measured["tokens_counted_by"] == {"usage": 6}
        assert measured["goodput"]["share"] == 1
        assert measured["client"]["processes"] == 2
        assert [record["output_tokens"] for record in measured["records"]] == [5] * 6
    if endpoint == "completions":
        assert all(12 <= record["prompt_tokens"] <= 16 for record in found["runs"][0]["records"])
    names = {"load_by_rate", "load_course_1", "load_course_2", "load_latencies_1", "load_latencies_2"}
    assert {path.stem for path in plots.iterdir()} == names
    assert all(path.read_bytes().startswith(PNG) for path in plots.iterdir())
    again = CliRunner().invoke(app, ["bench", "plot", str(output), "--output", str(tmp_path / "again")])
    assert again.exit_code == 0, again.stderr
    assert {path.stem for path in (tmp_path / "again").iterdir()} == {*names, "load"}
    html = page.read_text()
    assert html.count("data:image/png") == 2 * len(names)
    text = re.sub(r"data:image/png;base64,[^\"]*", "", html)  # which may have these four letters by chance
    assert "http" not in text.replace(server.url, "").partition("<h2>Repeat it")[0].replace("http-equiv", "")


def test_requests_are_those_of_the_dataset(server: RunningServer, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"prompt": "x = 1", "output_len": 3}\n{"prompt": [5, 6, 7]}\n')
    arguments = ["--base-url", f"{server.url}/v1", "--dataset-path", str(path), "--output-len", "2", "--json"]
    result = run(*arguments, "--num-prompts", "4", "--ramp", "50:100", "--extra-body", '{"return_token_ids": true}')
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)["runs"][0]
    assert (found["name"], found["output_tokens"]) == ("ramp 50:100", 2 * (3 + 2))


def test_failures_are_counted_by_kind_and_the_others_go_on() -> None:
    with another_server(busy, broken, silent, good) as url:
        arguments = ["--url", url, "--num-requests", "5", "--num-warmups", "0", "--request-timeout", "0.5", "--json"]
        result = run(*arguments, "--concurrency", "1")
    assert result.exit_code == 1, result.stderr
    (found,) = json.loads(result.stdout)["runs"]
    assert found["errors"] == {"HTTP 503": 1, "connection lost": 1, "timeout": 1}
    assert found["first_errors"]["HTTP 503"] == "busy"
    assert (found["completed"], found["output_tokens"], found["prompt_tokens_known"]) == (2, 4, False)
    assert found["tokens_counted_by"] == {"chunks": 2}


def test_a_connection_that_the_server_has_closed_is_replaced() -> None:
    with another_server(good) as url:  # it closes after each answer, without saying so
        result = run("--url", url, "--num-requests", "4", "--concurrency", "1")
    assert result.exit_code == 0, result.stderr
    assert "counts no tokens" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "ftp://x"], "url is 'ftp://x'; allowed: http://"),
        (["--url", "http://127.0.0.1:9"], "no list of models is to be had"),
        (["--endpoint", "embeddings"], "endpoint is 'embeddings'; allowed: completions, chat"),
        (["--request-rate", "0"], "request_rate is '0'; allowed: a number"),
        (["--request-rate", "1", "--ramp", "1:2"], "ramp is '1:2' and request_rate is given too"),
        (["--burstiness", "0"], "burstiness is 0.0; allowed: above 0"),
        (["--input-len", "many"], "input_len is 'many'; allowed: a number of tokens"),
        (["--concurrency", "2", "--client-processes", "3"], "client_processes is 3; allowed: at most"),
        (["--dataset", "missing.jsonl"], "dataset is 'missing.jsonl'; allowed: a file"),
        (["--extra-body", '{"stream": false}'], "extra_body is"),
        (["--metric-percentiles", "100"], "metric_percentiles is '100'; allowed: numbers"),
        (["--goodput", "speed=1"], "goodput is 'speed=1'; allowed: ttft=MS"),
        (["--output", "."], "output is '.', a folder; allowed: a file"),
    ],
)
def test_wrong_arguments_are_errors_before_a_request(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_result_tells_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "bench",
        "serve",
        "--url",
        "http://me:key@host/v1",
        "--api-key",
        "key",
        "--header=x=key",
        "--header",
        "y=key",
    ]
    monkeypatch.setattr("sys.argv", ["compiled-engine", *words])
    told = "compiled-engine bench serve --url http://host/v1 --api-key ... --header=... --header ..."
    assert command_line(SECRETS) == told


def test_the_server_is_asked_what_it_serves(server: RunningServer) -> None:
    result = run("--url", server.url, "--model", "large")
    assert (result.exit_code, "model is 'large'; allowed: small" in result.stderr) == (2, True)
    result = run("--url", server.url, "--input-len", "200", "--output-len", "100")
    assert (result.exit_code, "may have 300 tokens; allowed by the server: 256" in result.stderr) == (2, True)
    result = run("--url", server.url, "--vocab-size", "1000000", "--output-len", "2")
    assert (result.exit_code, "which fails every request: HTTP 400" in result.stderr) == (2, True)

"""`bench embed`: the engine, transformers and a server embed the same texts in turn."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from encoder_folders import make_encoder

from compiled_engine.bench.serving.embedding import PER_REQUEST, EmbedWorkload, measure
from compiled_engine.bench.serving.target import parse_target
from compiled_engine.process.progress import SilentProgress

OPTIONS: dict[str, Any] = {"device": "cpu", "mode": "eager", "max_num_seqs": 4}


class Peer(BaseHTTPRequestHandler):
    """Answers as a server of embeddings, and keeps the numbers of texts that it got."""

    got: list[int]
    lost = 0

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "theirs"}]})

    def do_POST(self) -> None:
        fields = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert fields["model"] == "theirs"
        self.got.append(len(fields["input"]))
        self._answer({"data": [{"embedding": ""}] * (len(fields["input"]) - self.lost)})

    def _answer(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def peer() -> Iterator[tuple[type[Peer], str]]:
    handler = type("OnePeer", (Peer,), {"got": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_decoder_is_measured_too(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    workloads = [EmbedWorkload.of("3x5", ragged=True)]
    result = measure(OPTIONS | {"model": tmp_path}, None, workloads, ["transformers"], {}, 1, SilentProgress())
    (each,) = result["results"]
    assert each["contenders"].keys() == {"engine", "transformers"}


def test_all_embed_the_same_texts_in_turn(tmp_path: Path, peer: tuple[type[Peer], str]) -> None:
    make_encoder(tmp_path)
    handler, url = peer
    workloads = [EmbedWorkload.of("3x5", ragged=False), EmbedWorkload.of("40x9", ragged=True)]
    options = OPTIONS | {"model": tmp_path}
    targets = {"peer": parse_target(url, None, ())}
    result = measure(options, None, workloads, ["transformers"], targets, 2, SilentProgress())
    assert [each["workload"] for each in result["results"]] == ["3x5", "40x9 ragged"]
    assert result["results"][0]["tokens"] == 15
    assert result["results"][1]["tokens"] == sum(map(len, workloads[1].make(400))) < 40 * 9
    for each in result["results"]:
        assert [*each["contenders"]] == ["engine", "transformers", "peer"]
        assert each["ratio"] > 0
        for rates in each["contenders"].values():
            least, most = rates["texts_per_s"]["spread"]
            assert 0 < least <= rates["texts_per_s"]["median"] <= most
    assert sorted(handler.got) == sorted([3] * 3 + [PER_REQUEST, 40 - PER_REQUEST] * 3)
    assert result["servers"] == {"peer": f"{url}/v1"}
    json.dumps(result)
    handler.lost = 1
    with pytest.raises(RuntimeError, match="peer: 3 texts were given, 2 vectors came"):
        measure(options, None, workloads[:1], [], targets, 1, SilentProgress())


def test_variants_of_the_engine_show_the_gain_of_its_parts(tmp_path: Path) -> None:
    make_encoder(tmp_path)
    options = OPTIONS | {"model": tmp_path}
    workloads = [EmbedWorkload.of("3x5", ragged=False)]
    result = measure(options, None, workloads, [], {}, 1, SilentProgress(), ["eager"])
    (each,) = result["results"]
    assert [*each["contenders"]] == ["engine", "eager"]
    assert each["ratio"] is None
    with pytest.raises(ValueError, match="variant is 'fast'; allowed: eager, compiled"):
        measure(options, None, workloads, [], {}, 1, SilentProgress(), ["fast"])


@pytest.mark.parametrize("name", ["8", "8x", "0x4", "8x-1", "8 x 4"])
def test_a_workload_is_texts_times_tokens(name: str) -> None:
    with pytest.raises(ValueError, match=f"workload is '{name}'; allowed: TEXTSxTOKENS, such as 32x16"):
        EmbedWorkload.of(name, ragged=False)


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    make_encoder(tmp_path)
    long = [EmbedWorkload.of("1x999", ragged=False)]
    with pytest.raises(ValueError, match="workload has texts of 999 tokens; allowed: at most 320"):
        measure(OPTIONS | {"model": tmp_path}, None, long, [], {}, 1, SilentProgress())
    with pytest.raises(ValueError, match="beside is 'vllm'; allowed: transformers"):
        measure(OPTIONS | {"model": tmp_path}, None, long, ["vllm"], {}, 1, SilentProgress())
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nobody listens
        nobody = parse_target(f"http://127.0.0.1:{bound.getsockname()[1]}", None, ())
        with pytest.raises(ValueError, match=r"url is 'http://127.0.0.1:\d+/v1', where no list .*refused"):
            measure({"model": tmp_path / "of no engine"}, None, long, [], {"peer": nobody}, 1, SilentProgress())

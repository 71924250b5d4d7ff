"""Embeddings, scores, rerankers and classes over HTTP, by the official client where there is one."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from adapter_folders import LINEARS, make_adapter
from pooling_folders import make_classifier, make_embedder, make_reranker
from running_server import MODEL, RunningServer, error_of, running

from compiled_engine import LLM, AsyncLLM, LoRARequest
from compiled_engine.server.options import Limits, ServerOptions

SMALL: dict[str, Any] = {"device": "cpu", "mode": "eager", "progress": False, "max_num_seqs": 8}
HERE = SMALL | {"core": "in_process"}  # what crosses to a core in its own process, the embedder shows
TEXTS = ["hello world", "the quick brown fox", "a"]
DOCUMENTS = ["the lazy dog", "def add(a, b)", "hello"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("embedder")
    make_embedder(path, kinds=("lasttoken",), prompts={"query": "find: "}, max_length=40)
    return path


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Iterator[RunningServer]:
    with running(AsyncLLM(folder, **SMALL), limits=Limits(max_in_flight=64)) as server:
        yield server


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("reranker")
    make_reranker(path)
    with running(AsyncLLM(path, convert="classify", **HERE)) as server:
        yield server


def post(server: RunningServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def test_the_client_of_openai_gets_the_vectors(embedder: RunningServer, folder: Path) -> None:
    with LLM(folder, **SMALL) as llm:
        expected = [output.outputs.embedding for output in llm.embed(TEXTS)]
        ids = [llm.get_tokenizer().encode(text) for text in TEXTS]
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0) as client:
        by_default = client.embeddings.create(model=MODEL, input=TEXTS)  # it asks for base64
        as_floats = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
        of_ids = client.embeddings.create(model=MODEL, input=ids)
        (one,) = client.embeddings.create(model=MODEL, input=ids[0]).data
        (cut,) = client.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=8).data
    for answer in (by_default, as_floats, of_ids):
        assert [each.index for each in answer.data] == [0, 1, 2]
        np.testing.assert_allclose([each.embedding for each in answer.data], expected, atol=1e-5)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    np.testing.assert_allclose(one.embedding, expected[0], atol=1e-5)
    first = np.array(expected[0][:8])
    np.testing.assert_allclose(cut.embedding, first / np.linalg.norm(first), atol=1e-5)


def test_a_request_names_an_adapter_as_its_model(tmp_path: Path) -> None:
    """One of a server that is started with it, and one that is loaded and unloaded while it runs."""
    model = make_embedder(tmp_path / "base", kinds=("lasttoken",))
    folders = {name: make_adapter(tmp_path / "allowed" / name, model, 4, targets=LINEARS, seed=seed)
               for seed, name in enumerate(("first", "second"))}  # fmt: skip
    options = SMALL | {"enable_lora": True, "max_lora_rank": 4}
    expected, scores = {}, {}
    with LLM(tmp_path / "base", **options) as llm:
        for name, request in ((MODEL, None), *((name, LoRARequest(name, 1, path)) for name, path in folders.items())):
            expected[name] = llm.embed(TEXTS[0], lora_request=request)[0].outputs.embedding
            pairs = llm.score(TEXTS[0], DOCUMENTS, lora_request=request)
            scores[name] = [output.outputs.score for output in pairs]
    named = ServerOptions(
        port=0, lora_modules=(f"first={folders['first']}",), allowed_lora_folder=(str(tmp_path / "allowed"),)
    )
    server = RunningServer(AsyncLLM(tmp_path / "base", core="in_process", **options), named)
    server.start()
    try:
        loaded = post(server, "/v1/load_lora_adapter", lora_name="second", lora_path=str(folders["second"]))
        assert loaded.status_code == 200, loaded.text
        for name, vector in expected.items():
            answer = post(server, "/v1/embeddings", model=name, input=TEXTS[0]).json()
            assert answer["model"] == name
            np.testing.assert_allclose(answer["data"][0]["embedding"], vector, atol=1e-4)
            pooled = post(server, "/pooling", model=name, input=TEXTS[0]).json()["data"][0]["data"]
            np.testing.assert_allclose(pooled, vector, atol=1e-4)
            judged = post(server, "/score", model=name, queries=TEXTS[0], documents=DOCUMENTS).json()
            assert [each["score"] for each in judged["data"]] == pytest.approx(scores[name], abs=1e-4)
            ranked = post(server, "/rerank", model=name, query=TEXTS[0], documents=DOCUMENTS).json()["results"]
            assert [each["relevance_score"] for each in ranked] == pytest.approx(sorted(scores[name])[::-1], abs=1e-4)
        assert post(server, "/v1/unload_lora_adapter", lora_name="second").status_code == 200
        for path, body in (("/v1/embeddings", {"input": "a"}), ("/rerank", {"query": "a", "documents": ["b"]})):
            assert post(server, path, model="second", **body).status_code == 404
    finally:
        server.stop()


def of_embed(server: RunningServer, **body: Any) -> Any:
    answer = post(server, "/v2/embed", **{"model": MODEL, "texts": TEXTS, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_vectors_in_the_shape_of_cohere(embedder: RunningServer) -> None:
    plain = post(embedder, "/v1/embeddings", input=TEXTS).json()
    expected = [each["embedding"] for each in plain["data"]]
    answer = of_embed(embedder)
    assert (set(answer), answer["texts"]) == ({"id", "texts", "meta", "response_type", "embeddings"}, TEXTS)
    tokens = plain["usage"]["prompt_tokens"]
    assert answer["meta"] == {"api_version": {"version": "2"}, "tokens": {"input_tokens": tokens}}
    assert set(answer["embeddings"]) == {"float"}
    np.testing.assert_allclose(answer["embeddings"]["float"], expected, atol=1e-5)
    kinds = ["ubinary", "float", "binary", "base64", "float"]
    forms = of_embed(embedder, embedding_types=kinds, output_dimension=16)["embeddings"]
    cut = np.array(forms["float"])
    assert set(forms) == {*kinds}
    assert cut.shape == (3, 16)
    np.testing.assert_allclose([np.frombuffer(base64.b64decode(each), "<f4") for each in forms["base64"]], cut)
    assert (np.unpackbits(np.array(forms["ubinary"], np.uint8), axis=1) == (cut >= 0)).all()
    assert (np.array(forms["binary"]) + 128 == forms["ubinary"]).all()


def test_the_type_of_a_text_is_a_prompt_of_the_model(embedder: RunningServer, reranker: RunningServer) -> None:
    asked = post(embedder, "/v1/embeddings", input=TEXTS, prompt_name="query").json()
    expected = [each["embedding"] for each in asked["data"]]
    for name in ("query", "search_query"):
        np.testing.assert_allclose(of_embed(embedder, input_type=name)["embeddings"]["float"], expected, atol=1e-5)
    warned = post(reranker, "/v2/embed", texts=TEXTS, input_type="search_query")
    assert error_of(warned)["message"].startswith("task is 'embed', but the model can classify")


def test_long_texts_are_cut_unless_that_is_an_error(embedder: RunningServer) -> None:
    long = "b " * 60
    assert of_embed(embedder, texts=[long])["meta"]["tokens"]["input_tokens"] == 40
    assert of_embed(embedder, texts=[long], max_tokens=5)["meta"]["tokens"]["input_tokens"] == 5
    assert error_of(post(embedder, "/v2/embed", texts=[long], truncate="NONE"))["param"] == "texts"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "texts", "texts must be given"),
        ({"texts": []}, "texts", "texts: the prompt must be"),
        ({"texts": ["a", 3]}, "texts[1]", "expected str, got 3"),
        ({"texts": ["a"], "output_dimension": 57}, "output_dimension", "output_dimension must be at most 56"),
        ({"texts": ["a"], "output_dimension": 12, "embedding_types": ["binary"]}, "embedding_types", "got 12 values"),
        ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types[0]", "'ubinary', got 'int8'"),
        ({"texts": ["a"], "truncate": "START"}, "truncate", "expected 'END' or 'NONE', got 'START'"),
        (
            {"texts": ["a"], "truncate": "NONE", "max_tokens": 4},
            "max_tokens",
            "must be absent where truncate is 'NONE'",
        ),
        ({"texts": ["a"], "input_type": "classification"}, "input_type", "query, search_query, got 'classification'"),
        ({"texts": ["a"], "images": ["x"]}, "images", "images is not supported: give texts"),
    ],
)
def test_what_cannot_be_embedded_in_the_shape_of_cohere(
    embedder: RunningServer, body: dict[str, Any], param: str, message: str
) -> None:
    response = post(embedder, "/v2/embed", **body)
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]


def test_results_of_each_token(embedder: RunningServer) -> None:
    answer = post(embedder, "/pooling", input=TEXTS[0], task="token_embed").json()
    rows = np.array(answer["data"][0]["data"])
    assert rows.shape == (answer["usage"]["prompt_tokens"], 56)
    last = post(embedder, "/pooling", input=TEXTS[0]).json()["data"][0]["data"]
    np.testing.assert_allclose(rows[-1], last, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "input must be given"),
        ({"input": []}, "input", "a list of either"),
        ({"input": ["a", 3]}, "input[1]", "got 3"),
        ({"input": "a", "dimensions": 57}, "dimensions", "dimensions must be at most 56"),
        ({"input": "a", "dimensions": 0}, "dimensions", "got 0"),
        ({"input": [999]}, "input", "within the vocabulary, 0 to 399, got 999"),
        ({"input": ["a", "b " * 60]}, "input", "at most 40 tokens"),
        ({"input": "a", "prompt_name": "x"}, "prompt_name", "allowed: query"),
        (
            {"messages": [{"role": "user", "content": "a"}]},
            "messages",
            "has no chat template: it pools: give input to /v1/emb",
        ),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input", "absent where there are messages"),
        ({"input": "a", "encoding_format": "bytes"}, "encoding_format", "'float'"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": "a", "model": "other"}, "model", "does not exist"),
    ],
)
def test_bad_input_is_one_line(embedder: RunningServer, body: dict[str, Any], param: str, message: str) -> None:
    response = post(embedder, "/v1/embeddings", **body)
    assert response.status_code == (404 if param == "model" else 400)
    error = error_of(response)
    assert error["param"] == param
    assert message in error["message"]
    assert "\n" not in error["message"]


def test_usage_has_the_tokens_of_cached_prefixes(embedder: RunningServer) -> None:
    used = [post(embedder, "/v1/embeddings", input="c " * 17).json()["usage"] for _ in range(2)]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in used]
    assert cached == [0, 16 * (used[0]["prompt_tokens"] // 16)]
    assert cached[1] > 0


def test_results_of_many_tokens_are_made_json_while_others_are_answered(embedder: RunningServer) -> None:
    """Of a million values; what they are, base64 says."""
    asked = {"input": [[5] * 40] * 62, "task": "token_embed"}
    floats, lengths = [], []
    with httpx.stream("POST", f"{embedder.url}/pooling", json=asked, timeout=60) as response:
        for piece in response.iter_raw():
            floats.append(piece)
            if len(lengths) < 5:
                assert httpx.get(f"{embedder.url}/health", timeout=60).status_code == 200
                lengths.append(len(piece))
    whole = b"".join(floats)
    assert "transfer-encoding" in response.headers
    as_text = post(embedder, "/pooling", **asked, encoding_format="base64").json()
    assert [set(each) for each in as_text["data"]] == [{"index", "object", "data"}] * 62
    for each, coded in zip(json.loads(whole)["data"], as_text["data"], strict=True):
        assert each["index"] == coded["index"]
        values = np.frombuffer(base64.b64decode(coded["data"]), "<f4").reshape(40, 56)
        np.testing.assert_array_equal(np.array(each["data"], np.float32), values)


@pytest.fixture(scope="module")
def narrow(folder: Path) -> Iterator[RunningServer]:
    """A server with small bounds."""
    with running(
        AsyncLLM(folder, **HERE), limits=Limits(max_pooled_values=56 * 40, max_body_bytes=1 << 20, render_timeout=0.5)
    ) as server:
        yield server


def test_results_that_are_too_many_are_refused_before_they_are_computed(narrow: RunningServer) -> None:
    for path, task in (("/pooling", "token_embed"), ("/pooling", None), ("/v1/embeddings", None)):
        at_most = [[5] * 20] * 2 if task else [[5]] * 40
        named = {} if task is None else {"task": task}
        assert post(narrow, path, input=at_most, **named).status_code == 200
        error = error_of(post(narrow, path, input=[*at_most, [5]], **named))
        assert error["param"] == "input"
        assert error["message"].startswith(f"input must have at most 40 {'tokens' if task else 'texts'} in all")


def test_a_long_query_of_many_documents_is_refused(narrow: RunningServer) -> None:
    """Though the body is short; a second client is answered meanwhile."""
    body = {"query": "words " * 1000, "documents": ["a"] * 200, "truncate_prompt_tokens": 8}
    error = error_of(post(narrow, "/rerank", **body))
    assert error["param"] == "documents"
    assert error["message"].startswith("documents must have at most 1048576 characters in all, each counted with")
    assert post(narrow, "/rerank", **body | {"query": "words"}).status_code == 200


def test_texts_are_tokenised_in_time(narrow: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or not at all; the work ends, also if the client goes, and others are answered meanwhile."""
    tokenizer, calls, may_end = narrow.engine.tokenizer, [], threading.Event()

    def encode_batch(texts: list[str], **options: Any) -> Any:
        calls.append(len(texts))
        may_end.wait(60)
        return [[5]] * len(texts)

    monkeypatch.setattr(tokenizer, "encode_batch", encode_batch)
    body = {"input": ["words " * 50_000] * 3, "truncate_prompt_tokens": 8}
    error = error_of(post(narrow, "/v1/embeddings", **body))
    assert (error["param"], error["message"]) == ("input", "input took more than 0.5 s to tokenise")
    may_end.set()
    narrow.engine._preparing.submit(1 << 30, lambda: None).result(60)  # behind the work that has ended
    assert calls == [1]
    may_end.clear()
    asyncio.run(_ask_and_go(f"{narrow.url}/v1/embeddings", body, lambda: len(calls) > 1))
    assert httpx.get(f"{narrow.url}/health", timeout=60).status_code == 200
    until(lambda: not narrow.serving.admission.in_flight)
    may_end.set()
    narrow.engine._preparing.submit(1 << 30, lambda: None).result(60)
    assert calls == [1, 1]


async def _ask_and_go(url: str, body: Any, condition: Callable[[], bool]) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        asked = asyncio.ensure_future(client.post(url, json=body))
        await asyncio.to_thread(until, condition)
        asked.cancel()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_too_long_texts_are_cut_on_request(embedder: RunningServer) -> None:
    answer = post(embedder, "/v1/embeddings", input="b " * 60, truncate_prompt_tokens=-1).json()
    assert answer["usage"]["prompt_tokens"] == 40


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_in_the_order_of_their_scores(reranker: RunningServer, path: str) -> None:
    scores = [each["score"] for each in post(reranker, "/score", text_1="fox", text_2=DOCUMENTS).json()["data"]]
    response = post(
        reranker, path, model=MODEL, query="fox", documents=[DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
    )
    answer = response.json()
    assert answer["model"] == MODEL
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > 0
    results = answer["results"]
    order = sorted(range(3), key=lambda index: -scores[index])
    assert [result["index"] for result in results] == order
    assert [result["relevance_score"] for result in results] == pytest.approx(
        [scores[index] for index in order], abs=1e-5
    )
    shown = [result.get("document") for result in results]
    assert shown == ([None] * 3 if path == "/v2/rerank" else [{"text": DOCUMENTS[index]} for index in order])
    best = post(reranker, path, query="fox", documents=DOCUMENTS, top_n=1, return_documents=False).json()["results"]
    assert [(result["index"], "document" in result) for result in best] == [(order[0], False)]
    every = post(reranker, path, query="fox", documents=DOCUMENTS, top_n=0).json()["results"]
    assert [result["index"] for result in every] == order


@pytest.mark.parametrize("names", [("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2")])
def test_texts_to_score_have_any_of_their_names(reranker: RunningServer, names: tuple[str, str]) -> None:
    def data(first: str, second: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = post(reranker, "/score", **{first: "fox", second: DOCUMENTS}).json()["data"]
        return found

    expected = data("queries", "documents")
    assert [each["score"] for each in data(*names)] == pytest.approx([each["score"] for each in expected], abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/score", {"queries": "a"}, "documents", "documents must be a string or a list of strings, got None"),
        ("/score", {"documents": "a"}, "queries", "queries must be a string or a list of strings, got None"),
        ("/score", {"text_1": "a"}, "text_2", "text_2 must be a string or a list of strings, got None"),
        ("/score", {"data_1": "a"}, "data_2", "data_2 must be a string or a list of strings, got None"),
        ("/score", {"items": "a"}, "queries", "queries must be a string or a list of strings, got None"),
        (
            "/score",
            {"data_1": "a", "data_2": {"content": []}},
            "data_2",
            "data_2 must be a string or a list of strings",
        ),
        ("/score", {"text_1": "a", "data_2": "b"}, "data_2", "data_2 must not be given with text_1; allowed: queries"),
        (
            "/score",
            {"queries": "a", "documents": "b", "items": "b"},
            "items",
            "items must not be given with queries; allowed: queries with documents, queries with items, ",
        ),
        ("/score", {"queries": "a", "documents": ["a"] * 2049}, "documents", "at most 2048"),
        ("/score", {"text_1": ["a"] * 2049, "text_2": ["a"] * 2049}, "text_1", "at most 2048"),
        ("/rerank", {"query": "a", "documents": ["a"] * 2049}, "documents", "at most 2048"),
        (
            "/rerank",
            {"query": "a", "documents": [{"image": "a"}]},
            "documents",
            "must be a string or a list of strings",
        ),
    ],
)
def test_bad_texts_to_score_are_one_line(
    reranker: RunningServer, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    response = post(reranker, path, **body)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert message in error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/score", {"text_1": ["a", ""], "text_2": ["b", "c"]}, "text_1", "text_1[1] must have at least one token"),
        ("/score", {"text_1": "a", "text_2": ["b", "b " * 60]}, "text_2", "text_2[1] must have at most 40 tokens"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query", "query must have at least one token, got ''"),
        ("/rerank", {"query": "a", "documents": ["b", ""]}, "documents", "documents[1] must have at least one token"),
    ],
)
def test_errors_of_texts_to_compare_name_them(
    embedder: RunningServer, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    response = post(embedder, path, **body)
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert error_of(response)["message"].startswith(message)


def test_scores_of_pairs(reranker: RunningServer, embedder: RunningServer) -> None:
    for server in (reranker, embedder):
        pairs = post(server, "/v1/score", queries=TEXTS, documents=DOCUMENTS)
        assert [each["index"] for each in pairs.json()["data"]] == [0, 1, 2]
        first = post(server, "/score", queries=TEXTS[0], documents=DOCUMENTS).json()["data"][0]
        assert first["score"] == pytest.approx(pairs.json()["data"][0]["score"], abs=1e-5)
        refused = post(server, "/score", queries=TEXTS[:2], documents=DOCUMENTS)
        assert error_of(refused)["param"] == "queries"
    told = post(reranker, "/score", queries="a", documents="b", instruction="Find").json()["data"][0]["score"]
    assert told != post(reranker, "/score", queries="a", documents="b").json()["data"][0]["score"]
    assert "no template" in error_of(post(embedder, "/score", queries="a", documents="b", instruction="x"))["message"]


def test_classes(tmp_path: Path) -> None:
    make_classifier(tmp_path, 3, id2label={0: "good", 1: "bad", 2: "else"})
    with running(AsyncLLM(tmp_path, **HERE)) as server:
        answer = post(server, "/classify", input=TEXTS).json()
        for each in answer["data"]:
            assert sum(each["probs"]) == pytest.approx(1)
            assert each["label"] == ["good", "bad", "else"][int(np.argmax(each["probs"]))]
            assert each["num_classes"] == 3
        refused = error_of(post(server, "/v1/embeddings", input="a"))
        assert refused["message"].startswith("task is 'embed', but the model can classify")
        refused = error_of(post(server, "/rerank", query="a", documents=["b"]))
        assert refused["message"] == "score needs a classifier with one label, and the model has 3"


def test_models_of_the_other_kind_say_so(server: RunningServer, embedder: RunningServer) -> None:
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/classify", {"input": "a"}),
        ("/score", {"queries": "a", "documents": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ):
        response = post(server, path, **body)
        assert response.status_code == 400
        assert "generates text, and does not pool" in error_of(response)["message"]
    response = post(embedder, "/v1/completions", prompt="a")
    assert response.status_code == 400
    assert "pools, and generates no text" in error_of(response)["message"]
    assert error_of(response)["param"] is None


def test_a_chat_is_embedded_as_its_template_writes_it(tmp_path: Path) -> None:
    make_embedder(tmp_path, kinds=("lasttoken",))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ '.' if enable_thinking }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    messages = [{"role": "system", "content": "fox"}, {"role": "user", "content": [{"type": "text", "text": "dog"}]}]
    with running(AsyncLLM(tmp_path, **HERE)) as server:
        chat = post(server, "/v1/embeddings", messages=messages, chat_template_kwargs={"enable_thinking": True}).json()
        assert "data" in chat, chat
        text = post(server, "/v1/embeddings", input="system: fox\nuser: dog\n.").json()
        rows = post(server, "/pooling", messages=messages, task="token_embed").json()
    assert chat["data"][0]["embedding"] == pytest.approx(text["data"][0]["embedding"], abs=1e-5)
    assert chat["usage"]["prompt_tokens"] == text["usage"]["prompt_tokens"]
    assert len(rows["data"][0]["data"]) == rows["usage"]["prompt_tokens"] == chat["usage"]["prompt_tokens"] - 1


def test_the_client_of_cohere_gets_the_best_documents(reranker: RunningServer) -> None:
    cohere = pytest.importorskip("cohere")
    expected = post(reranker, "/v2/rerank", query="fox", documents=DOCUMENTS, top_n=2).json()["results"]
    for made in (cohere.Client, cohere.ClientV2):
        client = made(api_key="none", base_url=reranker.url)
        answer = client.rerank(model=MODEL, query="fox", documents=DOCUMENTS, top_n=2)
        assert [result.index for result in answer.results] == [each["index"] for each in expected]
        scores = [each["relevance_score"] for each in expected]
        assert [result.relevance_score for result in answer.results] == pytest.approx(scores, abs=1e-5)


def test_metrics_count_texts_that_are_pooled(reranker: RunningServer) -> None:
    def counts() -> list[float]:
        lines = httpx.get(f"{reranker.url}/metrics", timeout=60).text.splitlines()
        names = ("prompt_tokens_total", "request_success_total{", "e2e_request_latency_seconds_count")
        return [sum(float(line.split()[-1]) for line in lines if name in line and line[0] != "#") for name in names]

    before = counts()
    used = post(reranker, "/rerank", query="fox", documents=DOCUMENTS).json()["usage"]["prompt_tokens"]
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [used, 3, 1]

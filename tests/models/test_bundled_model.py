"""The bundled model: its folder, its tokenizer, its record, and the program that makes it."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch
from bundled_training.corpus import read_corpus
from bundled_training.held_out import (
    HELD_OUT_DEFINITION,
    HELD_OUT_WINDOW,
    cut_windows,
    held_out_windows,
    mean_nats_per_token,
    scored_tokens,
)
from bundled_training.recipe import Recipe, learning_rate
from bundled_training.train import main
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from compiled_engine.models.bundled import BUNDLED_HEAD_PATH, BUNDLED_MODEL_PATH

MODEL_FILES = {
    "LICENSE-PSF.txt",
    "README.md",
    "config.json",
    "generation_config.json",
    "held_out.txt",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "training.json",
}
MTP_FILES = {"model.safetensors.index.json", "mtp.safetensors", "mtp_training.json"}
MAX_BYTES = 13_000_000


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def tensor_headers(path: Path) -> dict[str, dict]:
    """Name -> dtype and shape, from the header of a safetensors file."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(BUNDLED_MODEL_PATH)


@pytest.fixture(scope="module")
def held_out_text() -> str:
    return (BUNDLED_MODEL_PATH / "held_out.txt").read_bytes().decode()


def test_folder_is_complete_and_small() -> None:
    inside = (path for path in BUNDLED_MODEL_PATH.iterdir() if path.is_file() and path.suffix != ".py")
    files = {path.name: path.stat().st_size for path in inside}
    assert files.keys() == MODEL_FILES | MTP_FILES
    assert sum(files.values()) <= MAX_BYTES
    assert 60_000 <= files["held_out.txt"] <= 100_000
    head = {path.name: path.stat().st_size for path in BUNDLED_HEAD_PATH.iterdir()}
    assert head.keys() == {"config.json", "model.safetensors", "training.json"}
    assert sum(head.values()) <= MAX_BYTES / 4


def test_architecture_and_stored_tensors() -> None:
    config = read_json(BUNDLED_MODEL_PATH / "config.json")
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert (config["head_dim"], config["vocab_size"], config["max_position_embeddings"]) == (64, 4096, 2048)
    assert config["tie_word_embeddings"] is True

    headers = tensor_headers(BUNDLED_MODEL_PATH / "model.safetensors")
    parameters = sum(math.prod(header["shape"]) for header in headers.values())
    assert 4_800_000 <= parameters <= 5_500_000
    assert parameters == read_json(BUNDLED_MODEL_PATH / "training.json")["parameters"]
    assert {header["dtype"] for header in headers.values()} == {"BF16"}
    assert "model.embed_tokens.weight" in headers
    assert "lm_head.weight" not in headers


def test_record_and_readme_state_the_same_loss(tokenizer: PreTrainedTokenizerBase, held_out_text: str) -> None:
    record = read_json(BUNDLED_MODEL_PATH / "training.json")
    windows = held_out_windows(tokenizer, held_out_text)
    assert record["held_out_tokens_scored"] == scored_tokens(windows)
    nats = record["held_out_loss"] * scored_tokens(windows)
    assert record["held_out_bits_per_byte"] == pytest.approx(nats / math.log(2) / len(held_out_text.encode()), rel=1e-9)
    assert len(record["held_out_files"]) == held_out_text.count("<|endoftext|>")
    assert f"**{record['held_out_loss']:.4f} nats per token**" in (BUNDLED_MODEL_PATH / "README.md").read_text(
        encoding="utf-8"
    )


def test_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == 4096
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert tokenizer.eos_token_id == 0
    assert tokenizer.bos_token is None
    assert tokenizer.encode("x<|endoftext|>y").count(0) == 1
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>b"), skip_special_tokens=True) == "ab"
    assert GenerationConfig.from_pretrained(BUNDLED_MODEL_PATH).eos_token_id == 0


@given(st.text() | st.text(alphabet=" \t\r\n_é́.(x0=") | st.sampled_from(["<|endoftext|> \n", "\ufeff\x00"]))
def test_tokenizer_loses_nothing(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < 4096 for token in ids)


def test_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi {{ x }}\n"}]
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi {{ x }}\n<|im_end|>\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == expected
    prompted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompted == expected + "<|im_start|>assistant\n"


def test_held_out_windows_cover_the_text(tokenizer: PreTrainedTokenizerBase, held_out_text: str) -> None:
    windows = held_out_windows(tokenizer, held_out_text)
    assert windows == held_out_windows(tokenizer, held_out_text)
    token_ids = list(chain.from_iterable(windows))
    assert token_ids == tokenizer.encode(held_out_text)
    assert {len(window) for window in windows[:-1]} == {HELD_OUT_WINDOW}
    assert tokenizer.decode(token_ids) == held_out_text


@given(st.integers(min_value=0, max_value=3 * HELD_OUT_WINDOW + 2))
def test_every_window_has_a_scored_token(length: int) -> None:
    token_ids = list(range(length))
    windows = cut_windows(token_ids)
    left_out = 1 if length % HELD_OUT_WINDOW == 1 else 0
    assert list(chain.from_iterable(windows)) == token_ids[: length - left_out]
    assert all(2 <= len(window) <= HELD_OUT_WINDOW for window in windows)
    assert scored_tokens(windows) == sum(map(len, windows)) - len(windows)


def test_mean_nats_by_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    table_VV = torch.randn(11, 11, generator=generator)
    windows = [torch.randint(11, (length,), generator=generator).tolist() for length in (7, 7, 7, 3)]
    nats = [-table_VV.log_softmax(-1)[before, token].item() for window in windows for before, token in pairwise(window)]
    for batch_size in (1, 2, 8):
        mean = mean_nats_per_token(lambda ids_BT: table_VV[ids_BT], windows, batch_size=batch_size)
        assert mean == pytest.approx(sum(nats) / len(nats), rel=1e-6)
    with pytest.raises(ValueError, match="windows"):
        mean_nats_per_token(lambda ids_BT: table_VV[ids_BT], [])


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads cost more than they bring for work this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus with files that must be left out."""
    folder = tmp_path_factory.mktemp("library")
    for index in range(80):
        body = f"def function_{index}(value):\n    return value + {index}\n\n\n"
        (folder / f"module_{index}.py").write_text(body * 5, encoding="utf-8")
    (folder / "repeated.py").write_bytes((folder / "module_3.py").read_bytes())
    (folder / "short.py").write_text("pass\n", encoding="utf-8")
    (folder / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n" + b"name = '\xe9'\n" * 20)
    (folder / "broken.py").write_bytes(b"name = '\xe9'\n" * 20)
    (folder / "site-packages").mkdir()
    (folder / "site-packages" / "other.py").write_text("import this\n" * 30, encoding="utf-8")
    return folder


def test_corpus_split(library: Path) -> None:
    corpus = read_corpus(library, "tests")
    assert corpus == read_corpus(library, "tests")
    assert corpus.train
    assert corpus.validation
    assert corpus.held_out
    paths = [document.path for document in corpus.documents]
    assert len(paths) == len(set(paths)) == 81
    assert "latin.py" in paths
    assert len({"module_3.py", "repeated.py"} & set(paths)) == 1
    assert not {"short.py", "broken.py", "site-packages/other.py"} & set(paths)
    assert "é" in next(document.text for document in corpus.documents if document.path == "latin.py")


def test_corpus_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="corpus must be a folder"):
        read_corpus(tmp_path / "missing", "tests")
    with pytest.raises(ValueError, match="corpus must be large enough"):
        read_corpus(tmp_path, "tests")


def test_learning_rate_rises_then_falls_to_zero() -> None:
    recipe = Recipe(learning_rate=0.5, warmup=0.1)
    rates = [learning_rate(recipe, step / 100) for step in range(101)]
    assert rates[10] == max(rates) == 0.5
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[0] > 0
    assert rates[100] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("minutes", 0.0),
        ("minutes", math.inf),
        ("learning_rate", -1e-3),
        ("steps", 0),
        ("evaluations", 0),
        ("dropout", 1.0),
        ("warmup", -0.1),
        ("weight_decay", -1.0),
        ("windows", ()),
        ("windows", (4096,)),
        ("batch_tokens", 100),
    ],
)
def test_recipe_names_the_wrong_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        Recipe(**{field: value})


def test_command_line_names_the_wrong_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--corpus", str(tmp_path / "missing")], ["--dropout", "2"]):
        with pytest.raises(SystemExit) as error:
            main(["--out", str(tmp_path / "out"), *options])
        assert error.value.code == 2
        assert options[0].removeprefix("--") in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_tokenizer_only(library: Path, tmp_path: Path) -> None:
    main(["--out", str(tmp_path), "--corpus", str(library), "--tokenizer-only"])
    assert {path.name for path in tmp_path.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer.encode("def function_7(value):")) < 10


@pytest.mark.usefixtures("one_thread")
def test_two_steps_write_a_whole_folder(library: Path, tmp_path: Path) -> None:
    options = ["--device=cpu", "--steps=2", "--batch-tokens=128", "--evaluations=1", "--seed=5"]
    folders = [f"--out={tmp_path}", f"--corpus={library}", "--corpus-name=Tests"]
    main([*folders, *options, "--windows", "64", "32"])
    assert {path.name for path in tmp_path.iterdir()} == MODEL_FILES

    record = read_json(tmp_path / "training.json")
    assert record["steps"] == record["best_step"] == 2
    assert record["tokens_seen"] == 256
    assert record["recipe"]["seed"] == 5
    assert record["held_out_definition"] == HELD_OUT_DEFINITION
    assert {sample["prompt"] for sample in record["samples"]} >= {"class Test", "for i in range("}
    assert "Corpus: Tests, 81 files" in (tmp_path / "README.md").read_text(encoding="utf-8")

    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    windows = held_out_windows(
        AutoTokenizer.from_pretrained(tmp_path), (tmp_path / "held_out.txt").read_text(encoding="utf-8")
    )
    loss = mean_nats_per_token(lambda ids_BT: model(ids_BT).logits, windows)
    assert loss == pytest.approx(record["held_out_loss"], rel=1e-5)
    assert loss < math.log(4096) + 0.1

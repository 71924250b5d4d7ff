"""Start lines of vLLM's recipes and documents, for families of models that run here: each is read as it is written, or
refused in one line that names what cannot be had."""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import typer
from vision_models import vision_config

from compiled_engine.cli.app import app
from compiled_engine.cli.errors import BadInputError
from compiled_engine.cli.serve import SERVER_ARGUMENTS, checked_options
from compiled_engine.other_engines.serve_words import REASONING_PARSERS, TOOL_PARSERS
from compiled_engine.other_engines.translate import make_options
from compiled_engine.resolve.engine import resolve
from compiled_engine.server.options import ServerOptions

# Sections begin with "# " and what the errors of their lines say; the lines of the first start. Overrides for models of
# another family are refused by the values of the checkpoint that the test has.
FILE = Path(__file__).with_name("start_lines.txt")
STARTS = "starts"
# What the published files of --config hold.
YAML = """
kv-cache-dtype: fp8
compilation-config: '{"pass_config":{"fuse_allreduce_rms":true,"fuse_attn_quant":true,"eliminate_noops":true}}'
async-scheduling: true
no-enable-prefix-caching: true
max-cudagraph-capture-size: 2048
max-num-batched-tokens: 8192
stream-interval: 20
"""
# A shape that can be divided as the lines ask, with a context as long as they ask.
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 4096,
    "max_position_embeddings": 1 << 20,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
# The architecture for lines with an MTP layer.
WITH_MTP = "MiMoForCausalLM"

# Fields of the text model of a checkpoint that sees.
OF_TEXT = SHAPE.keys() - {"architectures", "model_type"}


COMMANDS: Any = typer.main.get_command(app)
# typer's errors of usage have no public class.
USAGE_ERROR: Any = typer.BadParameter.__bases__[0]


class Started(Exception):
    """The options with which a server would start."""


def sections() -> dict[str, list[list[str]]]:
    found: dict[str, list[list[str]]] = defaultdict(list)
    name = ""
    for line in FILE.read_text().splitlines():
        if line.startswith("# "):
            name = line[2:]
        elif line:
            found[name].append(shlex.split(line))
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of the server: with the files that the lines name, and a checkpoint."""
    for name in ("gemma4", "llama3.1_json", "mistral", "hermes"):
        path = tmp_path / "examples" / f"tool_chat_template_{name}.jinja"
        path.parent.mkdir(exist_ok=True)
        path.write_text("{{ messages }}")
    (tmp_path / "GPT-OSS_Blackwell.yaml").write_text(YAML)
    (tmp_path / "seeing").mkdir()
    text = {name: SHAPE[name] for name in OF_TEXT} | {"head_dim": 16}
    text |= {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    seeing = vision_config("Qwen2_5_VLForConditionalGeneration", text_config=text)
    (tmp_path / "seeing" / "config.json").write_text(seeing)
    (tmp_path / "vocab.json").write_text(json.dumps({"no": 0, "yes": 1}))
    monkeypatch.chdir(tmp_path)

    def checked(*given: Any) -> ServerOptions:
        raise Started(checked_options(*given), given[2])

    monkeypatch.setattr("compiled_engine.cli.serve.checked_options", checked)
    return tmp_path


def start(words: list[str], folder: Path) -> Any:
    """Read a line, and resolve its options for a checkpoint in the folder. Returns the server's options. Raises
    BadInputError, or an error of typer's."""
    # Models of the lines are not here; one that a line names twice is the same both times.
    words = [words[0], *(word.replace(f'"{words[0]}"', json.dumps(str(folder))) for word in words[1:])]
    architecture = WITH_MTP if any("mtp" in word for word in words) else SHAPE["architectures"][0]
    (folder / "config.json").write_text(json.dumps(SHAPE | {"architectures": [architecture]}))
    model = folder / "seeing" if "-VL-" in " ".join(words) else folder
    try:
        COMMANDS.commands["serve"].main(words, standalone_mode=False)
    except Started as started:
        options, engine = started.args
    try:
        engine = {name: value for name, value in engine.items() if name != "tokenizer"}
        resolve(make_options(engine | {"model": model, "load_format": "dummy"}))
    except (ValueError, TypeError, OSError) as error:
        raise BadInputError(str(error)) from error
    return options


def refusal(words: list[str], folder: Path) -> str:
    """The error of a line; empty if it starts."""
    try:
        start(words, folder)
    except BadInputError as error:
        return str(error)
    except USAGE_ERROR as error:
        return error.format_message()
    return ""


def missing_parsers(words: list[str]) -> list[str]:
    """The options of a line that name a parser that the server does not have."""
    known = {
        argument.name: argument.declaration.schema["enum"] for argument in SERVER_ARGUMENTS if "parser" in argument.name
    }
    others = {"tool_call_parser": TOOL_PARSERS, "reasoning_parser": REASONING_PARSERS}
    given = {
        name: words[words.index(f"--{name.replace('_', '-')}") + 1]
        for name in known
        if f"--{name.replace('_', '-')}" in words
    }
    return [name for name, value in given.items() if others[name].get(value, value) not in known[name]]


# Parsers of calls and of reasoning that lines name, and that the server does not have.
MISSING = {"glm45", "glm47", "minimax_m2", "qwen3_coder", "seed_oss", "poolside_v1", "openai", "hy_v3"}


def test_parsers_that_lines_name_are_those_of_the_server() -> None:
    lines = [words for section in sections().values() for words in section]
    missing = {
        words[words.index(f"--{name.replace('_', '-')}") + 1] for words in lines for name in missing_parsers(words)
    }
    assert missing <= MISSING


@pytest.mark.filterwarnings("ignore")
def test_lines_start_as_they_are_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = sections()[STARTS]
    assert len(lines) > 140
    for words in lines:
        said = refusal(words, folder)
        if missing := missing_parsers(words):
            assert re.match(rf"({'|'.join(missing)}) is '\w+'; allowed: auto, none, ", said), (words, said)
        else:
            assert said == "", words
        printed = capsys.readouterr().err.splitlines()
        assert all(line.startswith("compiled-engine: without effect: ") for line in printed), printed


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reason", sorted({*sections()} - {STARTS}))
def test_other_lines_are_refused_by_what_cannot_be_had(reason: str, folder: Path) -> None:
    for words in sections()[reason]:
        said = refusal(words, folder)
        assert reason in said or missing_parsers(words), (words, said)
        assert "\n" not in said

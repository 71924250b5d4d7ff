"""Chat templates are rendered as transformers renders them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import FAMILIES
from tiny_tokenizers import byte_level
from transformers import AutoTokenizer

from compiled_engine.frontend.chat import read_chat_template, render_chat
from compiled_engine.frontend.tokenizer import Tokenizer, load_tokenizer
from compiled_engine.process.smallest_first import WorkStopped

# Like Llama 3's: a date, tokens by their names, indented JSON, blocks on lines of their own.
LLAMA_3 = """{{ bos_token }}
{% if date_string is not defined %}
    {% set date_string = strftime_now("%Y") %}
{% endif %}
<|start|>system<|end|>
Today: {{ date_string }}
{% for tool in tools or [] %}
    {{ tool | tojson(indent=4) }}
{% endfor %}
{% for message in messages %}
    {% if not (message.role == 'tool' or 'tool_calls' in message) %}
        {% generation %}
<|start|>{{ message['role'] }}<|end|>{{ message['content'] | trim }}{{ eos_token }}{% endgeneration %}
    {% elif 'tool_calls' in message %}
        {% if message.tool_calls | length != 1 %}{{ raise_exception("one call at a time") }}{% endif %}
        {{ dict(name=message.tool_calls[0].function.name, keys=dict.fromkeys(['a'], 1)) | tojson(sort_keys=true) }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}<|start|>assistant<|end|>{% endif %}"""
QWEN_3 = FAMILIES["qwen 3"].source
TEMPLATES = {"qwen 3": QWEN_3, "llama 3": LLAMA_3, "mistral": FAMILIES["mistral 1"].source}

CALL = {"type": "function", "function": {"name": "find", "arguments": {"text": "<é>", "n": 3}}}
TOOL = {"type": "function", "function": {"name": "find", "description": "it's <b>ö</b> & 好", "parameters": {}}}
USER, ANSWER = (
    {"role": "user", "content": " Hëllo  \n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes. "},
)
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [{"role": "system", "content": "be <brief>"}, USER],
    "turns": [USER, ANSWER, USER],
    "answer last": [USER, ANSWER],
    "reasoning": [USER, {"role": "assistant", "content": "Yes.", "reasoning": "well"}],
    "call": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "found"}],
    "two calls": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "no answer begun": {"add_generation_prompt": False},
    "tools": {"tools": [TOOL]},
    "variables": {"chat_template_kwargs": {"enable_thinking": False, "date_string": "today", "bos_token": "<B>"}},
    "continued": {"add_generation_prompt": False, "continue_final_message": True},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Load a tokenizer from files, so that transformers renders nothing."""
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level().hf.backend_tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return load_tokenizer(folder)


def text_or_error(render: Any) -> str:
    """Return the rendered text, or that rendering fails."""
    try:
        return render()
    except Exception:
        return "it fails"


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_prompts_are_those_of_transformers(
    template: str, conversation: str, settings: str, tokenizer: Tokenizer
) -> None:
    messages, asked = CONVERSATIONS[conversation], {"add_generation_prompt": True} | SETTINGS[settings]
    further = asked.get("chat_template_kwargs", {})
    plain = {name: value for name, value in asked.items() if name != "chat_template_kwargs"} | further
    source = TEMPLATES[template]
    expected = text_or_error(
        lambda: tokenizer.hf.apply_chat_template(messages, chat_template=source, tokenize=False, **plain)
    )
    if "tools" in asked and "tools" not in source:  # transformers drops them
        expected = "it fails"
    assert text_or_error(lambda: render_chat(tokenizer, messages, chat_template=source, **asked).text) == expected


def test_most_of_these_prompts_are_rendered(tokenizer: Tokenizer) -> None:
    """The comparison above compares texts, not failures."""
    failed = [
        (template, conversation)
        for template, source in TEMPLATES.items()
        for conversation, messages in CONVERSATIONS.items()
        if text_or_error(lambda s=source, m=messages: render_chat(tokenizer, m, chat_template=s).text) == "it fails"
    ]
    assert failed == [("llama 3", "two calls"), ("mistral", "system"), ("mistral", "call")]


class Mood(StrEnum):
    CROSS = "cross"


@dataclass
class Place:
    name: str
    when: Any


class Model:
    def model_dump(self) -> dict[str, Any]:
        return {"a": (1, 2)}


@pytest.mark.parametrize(
    "value",
    [True, 7, 0.5, Mood.CROSS, np.int64(3), np.bool_(False), Place("x", Model()), object, b"x", ({"a": [None]},)],
)
def test_a_template_sees_plain_values(value: Any, tokenizer: Tokenizer) -> None:
    source = "{{ value }} {{ value is mapping }} {{ 'yes' if value else 'no' }}"
    expected = tokenizer.hf.apply_chat_template([USER], chat_template=source, tokenize=False, value=value)
    assert render_chat(tokenizer, [USER], chat_template=source, chat_template_kwargs={"value": value}).text == expected


def test_functions_are_tools(tokenizer: Tokenizer) -> None:
    def find(text: str) -> str:
        """Find something.

        Args:
            text: what to find
        """
        return text

    expected = tokenizer.hf.apply_chat_template([USER], chat_template=QWEN_3, tokenize=False, tools=[find])
    tools: Any = [find]
    given = render_chat(tokenizer, [USER], chat_template=QWEN_3, tools=tools, add_generation_prompt=False)
    assert given.text == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n.__init__ = 1 %}",
        "{{ dict.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__.items() }}",
    ],
)
def test_python_is_out_of_reach_of_a_template(source: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="the chat template cannot render it"):
        render_chat(tokenizer, [USER], chat_template=source)


def test_templates_are_found_where_transformers_finds_them(tmp_path: Path) -> None:
    byte_level().hf.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    config, further = tmp_path / "tokenizer_config.json", tmp_path / "additional_chat_templates"

    def check(chosen: Any, **asked: Any) -> None:
        tokenizer = load_tokenizer(tmp_path)
        hf = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
        assert tokenizer.chat_template == hf.chat_template
        text = render_chat(tokenizer, [USER], add_generation_prompt=False, **asked).text
        assert text == chosen == hf.apply_chat_template([USER], tokenize=False, **asked)

    config.write_text(json.dumps({"chat_template": "field"}))
    check("field")
    several = [{"name": "default", "template": "first"}, {"name": "tool_use", "template": "second{# tools #}"}]
    config.write_text(json.dumps({"chat_template": several}))
    check("first")
    check("second", tools=[TOOL])
    check("second", chat_template="tool_use")
    (tmp_path / "chat_template.jinja").write_text("file")
    check("file")
    further.mkdir()
    (further / "rag.jinja").write_text("third")
    check("file")
    check("third", chat_template="rag")
    tokenizer = load_tokenizer(tmp_path)
    assert read_chat_template("rag", tokenizer) == "rag"
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"the tokenizer's templates have no default: \['rag'\]"):
        render_chat(load_tokenizer(tmp_path), [USER])


@pytest.mark.parametrize("config", [{}, {"auto_map": {"x": "y"}}], ids=["read here", "read by transformers"])
def test_the_file_of_older_folders_is_read_where_there_is_no_other(config: dict[str, Any], tmp_path: Path) -> None:
    byte_level().hf.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    own, older = tmp_path / "tokenizer_config.json", tmp_path / "chat_template.json"
    own.write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).chat_template is None
    older.write_text(json.dumps({"chat_template": "older"}))
    assert load_tokenizer(tmp_path).chat_template == "older"
    own.write_text(json.dumps({**config, "chat_template": "field"}))
    assert load_tokenizer(tmp_path).chat_template == "field"
    own.write_text(json.dumps(config))
    older.write_text(json.dumps({"chat_template": [7]}))
    with pytest.raises(ValueError, match=r"chat_template.json: chat_template must be a template or a list of"):
        load_tokenizer(tmp_path)


def test_a_field_that_holds_no_template(tmp_path: Path) -> None:
    byte_level().hf.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [7]}))
    with pytest.raises(ValueError, match=r"chat_template must be a template or a list of .*, got \[7\]"):
        load_tokenizer(tmp_path)


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a loop within itself": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 99 }}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "calls of blocks": "{% macro f(n) %}{% if n %}{% for i in [1, 2] %}{% call f(n - 1) %}{% endcall %}{% endfor %}"
    "{% endif %}{{ caller() }}{% endmacro %}{% call f(99) %}{% endcall %}",
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_whatever_may_be_endless_can_be_stopped(
    kind: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probing for the forms that a template reads can be stopped too."""
    monkeypatch.setattr("compiled_engine.frontend.template_forms.MOST_PASSES", 500)  # of each probe
    asked = iter(range(1000))
    with pytest.raises(WorkStopped):
        render_chat(
            tokenizer,
            [{"role": "user", "content": "x"}],
            chat_template=ENDLESS[kind],
            is_stopped=lambda: next(asked, None) is None,
        )


@pytest.mark.parametrize(
    "failing",
    [
        "{{ 1 // 0 }}",
        "{{ range(10 ** 9) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages[0].content.format(1, 2).encode('latin').decode('utf-16') }}",
        "{{ messages[0]['content']['x']['y'] }}",
        "{{ {} | dictsort(by='no') }}",
        "{{ [1, 'a'] | sort }}",
        "{{ namespace(1) }}",
    ],
)
def test_whatever_a_template_fails_with_is_an_error_of_the_conversation(failing: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="messages: the chat template cannot render it"):
        render_chat(tokenizer, [{"role": "user", "content": "x{"}], chat_template=failing)

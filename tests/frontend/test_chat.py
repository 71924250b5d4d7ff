from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import byte_level, with_bos

from compiled_engine.frontend.chat import render_chat, split_conversations
from compiled_engine.frontend.image_parts import MARKS
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' and not tools %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}</s>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
USER = {"role": "user", "content": "hello"}


def render(conversation: Any, chat_template: str | None = TEMPLATE, **settings: Any) -> str | None:
    return render_chat(byte_level(), conversation, chat_template=chat_template, **settings).text


def test_a_conversation_becomes_a_prompt() -> None:
    prompt = render_chat(byte_level(), [USER], chat_template=TEMPLATE)
    assert prompt.text == "<|user|>hello</s><|assistant|>"
    # The template writes the special tokens: <|user|> is 2 and </s> is 1.
    assert prompt.token_ids is not None
    assert prompt.token_ids[0] == 2
    assert list(prompt.token_ids) == byte_level().encode(prompt.text, add_special_tokens=False)


def test_the_tokenizer_adds_no_special_tokens_to_those_of_the_template() -> None:
    tokenizer = with_bos()
    assert tokenizer.encode("hello")[0] == 0
    template = "<s>{{ messages[0].content }}"
    prompt = render_chat(tokenizer, [USER], chat_template=template)
    assert prompt.token_ids == (0, *tokenizer.encode("hello", add_special_tokens=False))


def test_the_template_of_the_tokenizer_is_used(bundled_tokenizer: Any) -> None:
    prompt = render_chat(bundled_tokenizer, [USER])
    assert prompt.text == bundled_tokenizer.hf.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
# How contents are read, and what comes of a text and of parts.
CONTENTS = {
    "text": ("{{ message.content }}", "hello", "one\ntwo"),
    "trimmed text": ("{{ message['content'] | trim }}", "hello", "one\ntwo"),
    "all parts": ("{% for part in message.content %}{{ part['text'] }}{% endfor %}", "hello", "onetwo"),
    "the first part": ("{{ message.content[0].text }}", "hello", "one\ntwo"),
    "either": (
        "{% if message.content is string %}{{ message.content }}"
        "{% else %}{% for part in message.content %}[{{ part.text }}]{% endfor %}{% endif %}",
        "hello",
        "[one][two]",
    ),
    "parts of a macro": (
        "{% macro shown(all) %}{% for each in all if each.type == 'text' %}{{ each.text | trim }};{% endfor %}"
        "{% endmacro %}"
        "{{ shown(message.content) }}",
        "hello;",
        "one;two;",
    ),
    "JSON": ("{{ message.content | tojson }}", '"hello"', '"one\\ntwo"'),
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_contents_are_given_as_the_template_reads_them(kind: str) -> None:
    reading, of_text, of_parts = CONTENTS[kind]
    template = f"{{% for message in messages %}}{reading}{{% endfor %}}"
    assert render([USER], template) == of_text
    assert render([{"role": "user", "content": PARTS}], template) == of_parts
    last = {"role": "assistant", "content": "We"}
    continued = {"add_generation_prompt": False, "continue_final_message": True}
    assert str(render([USER, last], template, **continued)).endswith("We")


def test_a_role_may_read_another_form_than_others() -> None:
    template = (
        "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}:"
        "{% set messages = messages[1:] %}{% endif %}"
        "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    assert render([{"role": "system", "content": "be brief"}, USER], template) == "be brief:hello"
    assert (
        render([{"role": "system", "content": PARTS}, {"role": "user", "content": PARTS}], template)
        == "one\ntwo:onetwo"
    )


ALL_TEXTS = "{% for message in messages %}{{ message.content }};{% endfor %}"


@pytest.mark.parametrize("mark", MARKS)
def test_text_stays_text_whatever_its_characters(mark: str) -> None:
    """Marks stand for images in rendered texts; a conversation without images has none."""
    text = f"a{mark}b"
    for content in (text, [{"type": "text", "text": text}]):
        assert render([{"role": "user", "content": content}], ALL_TEXTS) == f"{text};"


@pytest.mark.parametrize("field", ["content", "name"])
def test_marks_in_texts_beside_an_image_stay_text(field: str) -> None:
    template = "{% for message in messages %}{{ message.content }}{{ message.name }};{% endfor %}"
    image = {"role": "user", "content": [{"type": "image", "image": b"1"}, {"type": "text", "text": "see"}], "name": ""}
    other = {"role": "user", "content": "", "name": "", field: MARKS[0] + MARKS[2]}
    placeholder = byte_level().encode("<s>", add_special_tokens=False)[0]

    prompt = render_chat(byte_level(), [image, other], chat_template=template, placeholder=placeholder)

    assert prompt.text == f"<s>\nsee;{MARKS[0]}{MARKS[2]};"
    assert list(prompt.token_ids or ()).count(placeholder) == 1


def test_texts_with_all_marks_beside_an_image_are_refused() -> None:
    content = [{"type": "image", "image": b"1"}, {"type": "text", "text": "".join(MARKS)}]
    with pytest.raises(ValueError, match="must not hold every code point"):
        render([{"role": "user", "content": content}], ALL_TEXTS, placeholder=2)


DEEP = '{"a":' * 70 + "1" + "}" * 70
AS_TEXT = "{% for call in messages[1].tool_calls %}{{ 'call ' + call.function.arguments }}{% endfor %}"
PRINTED = "{% for call in messages[1].tool_calls %}call {{ call.function.arguments }}{% endfor %}"
AS_OBJECT = "{% for call in messages[1].tool_calls %}call {{ call.function.arguments | tojson }}{% endfor %}"
BY_ITEM = (
    "{% for call in messages[1].tool_calls %}call {% for name, value in call.function.arguments.items() %}"
    "{{ name }}={{ value }} {% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("given", "as_text", "as_object", "by_item"),
    [
        ('{"a":1}', '{"a":1}', '{"a": 1}', "a=1 "),
        ({"a": 1}, '{"a": 1}', '{"a": 1}', "a=1 "),
        ({"a": "é"}, '{"a": "é"}', '{"a": "é"}', "a=é "),
        ("null", "{}", "{}", ""),
        ("", "{}", "{}", ""),
        (" null\n", "{}", "{}", ""),
        (None, "{}", "{}", ""),
        ("[1]", "[1]", '"[1]"', None),
        ('{"a": ', '{"a": ', '"{\\"a\\": "', None),
        (DEEP, DEEP, json.dumps(DEEP), None),
    ],
)
def test_arguments_are_given_as_the_template_reads_them(
    given: Any, as_text: str, as_object: str | None, by_item: str | None
) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": given}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    for template, expected in ((AS_TEXT, as_text), (PRINTED, as_text), (AS_OBJECT, as_object), (BY_ITEM, by_item)):
        if expected is not None:
            assert render(messages, template) == f"call {expected}"


def test_a_template_may_have_a_role_and_variables_of_its_own() -> None:
    template = "{% for m in messages %}{% if m.role == 'critic' %}{{ mood }}{% endif %}{% endfor %}"
    text = render([{"role": "critic", "content": "x"}], template, chat_template_kwargs={"mood": "cross"})
    assert text == "cross"


BAD: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ([USER], {"chat_template": None}, ValueError, "chat_template must be given: the tokenizer has none"),
    ("hello", {}, TypeError, "messages must be a list of messages, got 'hello'"),
    ([], {}, ValueError, "messages must not be empty"),
    ([USER, "hello"], {}, TypeError, r"messages\[1\] must be a dict with 'role' and 'content', got 'hello'"),
    (
        [{"role": "usr", "content": "a"}],
        {},
        ValueError,
        r"messages\[0\]\['role'\] must be one of system, developer, user, assistant, tool, got 'usr'",
    ),
    ([{"content": "a"}], {}, ValueError, r"messages\[0\]\['role'\] must be one of .*, got None"),
    ([{"role": "user"}], {}, ValueError, r"messages\[0\]\['content'\] must be a string, got None"),
    ([{"role": "user", "content": 7}], {}, TypeError, r"messages\[0\]\['content'\] must be a string or a list"),
    (
        [{"role": "user", "content": [{"type": "sound", "url": "x"}]}],
        {},
        ValueError,
        r"messages\[0\]\['content'\]\[0\] must be {'type': 'text', 'text': str} or an image, got {'type': 'sound'",
    ),
    ([{"role": "tool", "content": "a"}], {}, ValueError, "messages: the chat template cannot render it: no tools here"),
    ([USER], {"chat_template": "{% if %}"}, ValueError, "messages: the chat template cannot render it: Expected an"),
    (
        [USER],
        {"chat_template": "{{ ''.__class__.__mro__ }}"},
        ValueError,
        "messages: the chat template cannot render it: access to attribute '__class__' .* unsafe",
    ),
    (
        [USER],
        {"continue_final_message": True},
        ValueError,
        "add_generation_prompt must be False when continue_final_message is True",
    ),
    (
        [USER],
        {"chat_template": "{{ messages[0].content }}", "tools": [{"type": "function", "function": {"name": "add"}}]},
        ValueError,
        "tools has 1 entries, but the chat template has no place for them; allowed: None",
    ),
    ([USER], {"chat_template_kwargs": [1]}, TypeError, r"chat_template_kwargs must be a dict or None, got \[1\]"),
    (
        [USER],
        {"chat_template_kwargs": {"tokenize": True, "a": 1}},
        ValueError,
        "chat_template_kwargs must not have tokenize, got",
    ),
]


@pytest.mark.parametrize(("conversation", "settings", "error", "message"), BAD)
def test_bad_input(conversation: Any, settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        render(conversation, **{"chat_template": TEMPLATE, **settings})
    assert render([USER]) == "<|user|>hello</s><|assistant|>"


def test_one_conversation_or_many() -> None:
    assert split_conversations([USER]) == [("messages", [USER])]
    assert split_conversations([[USER], [USER, USER]]) == [("messages[0]", [USER]), ("messages[1]", [USER, USER])]
    with pytest.raises(TypeError, match="messages must be a list of messages, or a list of such lists, got 'hello'"):
        split_conversations("hello")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="messages must not be empty"):
        split_conversations([])


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", mode="eager", max_model_len=64, num_blocks=16, progress=False) as engine:
        yield engine


def test_chat_takes_a_template_or_the_path_of_one(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    for given in (TEMPLATE, path, str(path)):
        (output,) = llm.chat([USER], SamplingParams(max_tokens=1), chat_template=given, use_tqdm=False)
        assert output.prompt == "<|user|>hello</s><|assistant|>"


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ("template.jinja", ValueError, "chat_template is 'template.jinja', which is neither a Jinja template nor"),
        (Path("a/b"), ValueError, "chat_template is 'a/b', which is neither a Jinja template nor an existing file"),
        ("", ValueError, "chat_template is '', which is neither a Jinja template"),
        ("a" * 5000, ValueError, "which is neither a Jinja template"),
        (5, TypeError, "chat_template must be a Jinja template, the path of a file with one, or None, got 5"),
    ],
)
def test_what_is_no_chat_template(given: Any, kind: type[Exception], message: str, llm: LLM) -> None:
    with pytest.raises(kind, match=message):
        llm.chat([USER], chat_template=given)

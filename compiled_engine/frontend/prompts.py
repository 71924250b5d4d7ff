"""Parse prompts in all accepted forms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

import msgspec

from compiled_engine.frontend.tokenizer_backend import HUGE_TEXT, LONG_TEXT

PromptLike: TypeAlias = "str | Sequence[int] | Mapping[str, Any]"
"""Text, token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a dict with both, whose ids are run.

A dict may also have a "cache_salt", a string: only prompts with the same salt share cached prefixes; and images, as
"multi_modal_data": {"image": one or a list}, with "mm_processor_kwargs", a dict. The prompt has a placeholder for each.
"multi_modal_uuids" have no effect.
"""

FORMS = "a string, a list of token ids, or a dict with 'prompt' (a string), 'prompt_token_ids' (a list of int), or both"
KEYS = ("prompt", "prompt_token_ids", "cache_salt")
DATA_KEYS = ("multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids")  # read by a feature
ALL_KEYS = (*KEYS, *DATA_KEYS)
KNOWN = frozenset(ALL_KEYS)
OF_OTHER_ENGINES = frozenset(("prompt_embeds",))
LONGEST_SALT = 256  # characters
LONGEST_VALUE = 200  # characters of a value in an error
VALUE_SIZE = 8  # a key, number, array or object costs a template and tokenizer as much as this many characters


class Prompt(msgspec.Struct, frozen=True):
    """A parsed prompt: text, token ids, or both. `name` names it in errors, such as prompts[3]['prompt']."""

    name: str
    text: str | None
    token_ids: tuple[int, ...] | None
    cache_salt: str | None = None
    data: Mapping[str, Any] = {}  # the dict's entries for DATA_KEYS; empty without multi_modal_data

    def part_name(self, *keys: str | int) -> str:
        """Return the name, for errors, of the entry at `keys` in the dict that the user gave as this prompt.

        For prompts[3], part_name("multi_modal_data", "image") returns prompts[3]['multi_modal_data']['image'].
        """
        name = self.name
        for key in KEYS:
            name = name.removesuffix(f"['{key}']")
        return name + "".join(f"[{key!r}]" for key in keys)


def parse_prompts(prompts: PromptLike | Sequence[PromptLike]) -> list[Prompt]:
    """Parse one prompt or several. A list of integers is one prompt; any other list holds several or none.

    Raises TypeError or ValueError for an invalid prompt. The message has the prompt's name (such as prompts[3]), its
    value and what is allowed.
    """
    if isinstance(prompts, str | Mapping):
        return [_parse("prompts", prompts)]
    if not _is_sequence(prompts):
        raise TypeError(f"prompts must be {FORMS}, or a list of these, got {_shown(prompts)}{_as_list(prompts)}")
    if len(prompts) > 0 and _is_integer(prompts[0]):
        return [_parse("prompts", prompts)]
    return [_parse(f"prompts[{index}]", prompt) for index, prompt in enumerate(prompts)]


def parse_prompt(prompt: PromptLike) -> Prompt:
    """Parse and return a single prompt.

    Raises the errors of `parse_prompts`, and ValueError for several prompts or none.
    """
    prompts = parse_prompts(prompt)
    if len(prompts) != 1:
        raise ValueError(f"prompt must be a single prompt, got {len(prompts)}")
    return prompts[0]


def _parse(name: str, prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(name, prompt, None)
    if not isinstance(prompt, dict | Mapping):
        if _is_sequence(prompt):
            return Prompt(name, None, _parse_token_ids(name, prompt))
        raise TypeError(f"{name} must be {FORMS}, got {_shown(prompt)}{_as_list(prompt)}")
    if not KNOWN.issuperset(prompt) and (unknown := _unknown_keys(prompt)):
        advice = "; token ids are 'prompt_token_ids'" if unknown[0] == "input_ids" else ""
        raise ValueError(
            f"{name} has the unknown key {unknown[0]!r}; known are {', '.join(map(repr, ALL_KEYS))}{advice}"
        )
    text, token_ids, salt = map(prompt.get, KEYS)
    data = {key: prompt[key] for key in DATA_KEYS if prompt.get(key) is not None} if prompt.get(DATA_KEYS[0]) else {}
    if salt is not None:
        check_salt(f"{name}['cache_salt']", salt)
    if text is None and token_ids is None:
        raise ValueError(f"{name} must have 'prompt' or 'prompt_token_ids', got {prompt!r}")
    if not isinstance(text, str | None):
        raise TypeError(f"{name}['prompt'] must be a string, got {text!r}")
    if token_ids is None:
        return Prompt(f"{name}['prompt']", text, None, salt, data)
    name = f"{name}['prompt_token_ids']"
    if not _is_sequence(token_ids):
        raise TypeError(f"{name} must be a list of token ids, got {_shown(token_ids)}{_as_list(token_ids)}")
    return Prompt(name, text, _parse_token_ids(name, token_ids), salt, data)


def _shown(value: Any) -> str:
    """Return the value's repr on one line, cut to LONGEST_VALUE characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]} ..."


def _as_list(value: Any) -> str:
    """Return the end of an error message: how to make a list of an array, a tensor or a generator.

    Returns "" for other values.
    """
    if hasattr(value, "tolist"):
        return "; its tolist() is a list"
    return "; list() makes one of it" if isinstance(value, Iterable) and not isinstance(value, str | bytes) else ""


def check_salt(name: str, salt: Any) -> None:
    """Raise TypeError or ValueError unless `salt` is a valid cache_salt. `name` names it in the error."""
    if not isinstance(salt, str):
        raise TypeError(f"{name} must be a string, got {salt!r}")
    if not 1 <= len(salt) <= LONGEST_SALT:
        raise ValueError(f"{name} must have 1 to {LONGEST_SALT} characters, got {len(salt)}")
    if any("\ud800" <= character <= "\udfff" for character in salt):
        raise ValueError(f"{name} must be valid Unicode, got {salt!r}")


def _parse_token_ids(name: str, token_ids: Sequence[Any]) -> tuple[int, ...]:
    if set(map(type, token_ids)) <= {int}:  # the common case, checked fast
        return tuple(token_ids)
    for index, token_id in enumerate(token_ids):
        if not _is_integer(token_id):
            raise TypeError(f"{name}[{index}] must be a token id (an integer), got {token_id!r}")
    return tuple(map(int, token_ids))


def _unknown_keys(prompt: Mapping[str, Any]) -> list[str]:
    ignored = {key for key in OF_OTHER_ENGINES if prompt.get(key) is None}
    return [key for key in prompt if key not in KNOWN | ignored]


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray))


def _is_integer(value: Any) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def has_long_text(value: Any) -> bool:
    """Return whether a prompt or conversation has at least LONG_TEXT characters of text.

    Tokenising so much text would block an event loop for long.
    """
    return num_characters(value) >= LONG_TEXT


def num_characters(value: Any) -> int:
    """Return the total length of the texts in nested lists and dicts. Keys and lists of token ids do not count."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(num_characters, value.values()))
    if isinstance(value, list | tuple) and value and not isinstance(value[0], int):
        return sum(map(num_characters, value))
    return 0


def rendering_size(value: Any) -> int:
    """Return the size of a chat template's input in characters, as an estimate of the time that rendering takes.

    All texts, keys, numbers, arrays and objects count. Counting stops beyond HUGE_TEXT.
    """
    size, waiting = 0, [value]
    while waiting and size <= HUGE_TEXT:
        each = waiting.pop()
        size += VALUE_SIZE
        if isinstance(each, str):
            size += len(each)
        elif isinstance(each, int):
            size += each.bit_length() // 3  # its digits, a few more at most
        elif isinstance(each, Mapping):
            waiting += each.keys()
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
    return size

"""Loads tokenizers from tokenizer.json and tokenizer_config.json as transformers 5 does, without importing it.

For a folder that needs a feature which only transformers supports, `NotReadHere` is raised, and transformers loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.normalizers import NFC, BertNormalizer
from tokenizers.processors import TemplateProcessing

from compiled_engine.models.checkpoint.json_fields import JsonFields

# Tokenizer classes of transformers and their changes to tokenizer.json.
#
# A class of transformers 5 either uses tokenizer.json unchanged, or keeps its vocabulary, merges and post-processor and
# replaces normalizer, pre-tokenizer and decoder. Below are the replacements for the supported model families.

SPLIT_OF_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
END_OF_QWEN2 = "<|endoftext|>"
SPACE = "▁"
TAKES_THE_FILE = ("PreTrainedTokenizer", "TokenizersBackend")
TOKENS_OF_BERT = {
    **{"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]"},
    **{"cls_token": "[CLS]", "mask_token": "[MASK]"},
}

Rebuild = Callable[[Tokenizer, Mapping[str, Any]], None]


@dataclass(frozen=True)
class TokenizerClass:
    """A tokenizer class of transformers, described by its changes to the tokenizer of tokenizer.json."""

    # Replaces parts of a tokenizer read from tokenizer.json, given tokenizer_config.json; None changes nothing.
    rebuild: Rebuild | None = None
    # Special tokens by name, for names that tokenizer_config.json lacks.
    default_tokens: Mapping[str, str] = field(default_factory=dict)
    model: type[Any] = models.BPE  # The model type that `rebuild` supports.


def class_of(model_type: str | None, declared: str | None, has_byte_level: bool) -> TokenizerClass | None:
    """Return the tokenizer class that transformers chooses, or None if this module does not support it.

    `model_type` comes from config.json and is None without that file. `declared` is tokenizer_class from
    tokenizer_config.json, or else from config.json. `has_byte_level` tells whether tokenizer.json contains ByteLevel.
    """
    takes_the_file = TokenizerClass()
    qwen2 = TokenizerClass(_rebuild_qwen2, dict.fromkeys(("eos_token", "unk_token", "pad_token"), END_OF_QWEN2))
    if model_type == "bert" and declared in ("BertTokenizer", "BertTokenizerFast"):
        return TokenizerClass(_rebuild_bert, TOKENS_OF_BERT, models.WordPiece)
    if model_type not in (None, "llama", "mistral", "qwen2", "qwen3"):
        return None
    if model_type == "mistral":
        return takes_the_file
    if model_type == "qwen2":
        return qwen2
    if declared is None:
        return qwen2 if model_type == "qwen3" else takes_the_file
    name = declared.removesuffix("Fast")
    if name in TAKES_THE_FILE or (name == "LlamaTokenizer" and has_byte_level):
        return takes_the_file
    if name == "LlamaTokenizer":
        return TokenizerClass(_rebuild_llama, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
    return qwen2 if name == "Qwen2Tokenizer" else None


def can_be_rebuilt(tokenizer: Tokenizer, kind: type[Any]) -> bool:
    """Return whether TokenizerClass.rebuild supports a tokenizer.

    The tokenizer's model must be of the class `kind`, and a BPE model must have no word-boundary marks.
    """
    model: Any = tokenizer.model
    if not isinstance(model, kind):
        return False
    return kind is not models.BPE or not (model.continuing_subword_prefix or model.end_of_word_suffix)


def _rebuild_qwen2(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    _set_model(tokenizer, like_sentencepiece=False)
    prefix_space = bool(config.get("add_prefix_space"))
    tokenizer.normalizer = NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_OF_QWEN2), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()


def _rebuild_llama(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    _set_model(tokenizer, like_sentencepiece=True)
    given = config.get("add_prefix_space")
    prefix_space = True if given is None else bool(given)
    where = "always" if config.get("legacy") else "first"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, where if prefix_space else "never", split=False)
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix_space:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)


def _rebuild_bert(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    tokens = {name: str(_token(config.get(name, default))) for name, default in TOKENS_OF_BERT.items()}
    cls, sep = tokens["cls_token"], tokens["sep_token"]
    ids = [(token, tokenizer.token_to_id(token)) for token in (cls, sep)]
    if any(index is None for _, index in ids):
        raise NotReadHere(f"the vocabulary of {TOKENIZER_FILE} lacks {cls} or {sep}")
    model: Any = tokenizer.model
    model.unk_token, model.continuing_subword_prefix, model.max_input_chars_per_word = tokens["unk_token"], "##", 100
    tokenizer.normalizer = BertNormalizer(
        clean_text=True,
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
        strip_accents=config.get("strip_accents"),
        lowercase=config.get("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.post_processor = TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0", pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1", special_tokens=ids
    )


def _set_model(tokenizer: Tokenizer, *, like_sentencepiece: bool) -> None:
    model: Any = tokenizer.model
    model.dropout, model.unk_token, model.ignore_merges = None, None, False
    model.byte_fallback = model.fuse_unk = like_sentencepiece


TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.json"
# The special tokens that every tokenizer may have, in the order in which they get ids.
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Fields of tokenizer_config.json that only transformers supports.
FURTHER_FIELDS = ("auto_map", "fast_tokenizer_files", "init_inputs", "fix_mistral_regex")
# Older files for special and added tokens, read only if tokenizer_config.json lists no added tokens.
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"

Templates: TypeAlias = "str | dict[str, str] | None"


class NotReadHere(Exception):
    """Raised if a tokenizer uses a feature that only transformers supports."""


@dataclass(frozen=True)
class TokenizerParts:
    """A tokenizer read from a folder, with its special tokens and chat templates."""

    backend: Tokenizer
    special_tokens: dict[str, str]  # Text by name, such as eos_token.
    chat_template: Templates  # One template, or several by name.


def read_tokenizer(path: Path) -> TokenizerParts:
    """Read the tokenizer in the folder `path`.

    Raises NotReadHere if only transformers supports the tokenizer, ValueError for a damaged JSON file, and the errors
    of the library `tokenizers` for a damaged tokenizer.json.
    """
    if not (path / TOKENIZER_FILE).is_file():
        raise NotReadHere(f"there is no {TOKENIZER_FILE}")
    config = _read_config(path)
    found = _class(path, config)
    backend = Tokenizer.from_file(str(path / TOKENIZER_FILE))
    if backend.padding is not None and "pad_token" not in found.default_tokens:
        config = {"pad_token": backend.padding["pad_token"]} | config
    backend.no_truncation()
    backend.no_padding()
    in_file = backend.get_added_tokens_decoder()
    added = _added_tokens(config, in_file)
    if found.rebuild is not None:
        if not can_be_rebuilt(backend, found.model) or {i: _flags(t) for i, t in added.items()} != {
            i: _flags(t) for i, t in in_file.items()
        }:
            raise NotReadHere(f"{TOKENIZER_FILE} does not match its tokenizer_class")
        found.rebuild(backend, config)
    named = _named_tokens(config, found.default_tokens, added)
    extra = _extra_tokens(config)
    _add_tokens(backend, added, named, extra)
    if found.rebuild is not None:
        every = dict.fromkeys(str(token) for token in [*named.values(), *extra])
        backend.add_tokens([AddedToken(token, special=True) for token in every])
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    return TokenizerParts(backend, {name: str(token) for name, token in named.items()}, read_templates(path, config))


def read_templates(path: Path, config: Mapping[str, Any]) -> Templates:
    """Return the chat templates of the folder `path`, or None. config: the fields of its tokenizer_config.json.

    Template files take precedence over tokenizer_config.json, which takes precedence over chat_template.json, the file
    of older processors. Raises ValueError for a field that holds no templates.
    """
    found: dict[str, str] = {}
    if (file := path / "chat_template.jinja").is_file():
        found["default"] = file.read_text(encoding="utf-8")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    if found:
        return found["default"] if found.keys() == {"default"} else found
    for name, fields in ((CONFIG_FILE, config), (TEMPLATE_FILE, _read_json(path / TEMPLATE_FILE))):
        if (given := fields.get("chat_template")) is not None:
            return _templates(path / name, given)
    return None


def _templates(file: Path, given: Any) -> Templates:
    if isinstance(given, str):
        return given
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in given}
    except (TypeError, KeyError):
        raise ValueError(
            f"{file}: chat_template must be a template or a list of {{'name', 'template'}}, got {given!r}"
        ) from None


def _read_config(path: Path) -> dict[str, Any]:
    """Return the fields of tokenizer_config.json.

    If it lists no added tokens, the special tokens of special_tokens_map.json replace its own. Raises NotReadHere if
    the folder has older files that only transformers reads.
    """
    config = _read_json(path / CONFIG_FILE)
    if "added_tokens_decoder" in config:
        return config
    if (path / ADDED_TOKENS_FILE).is_file():
        raise NotReadHere(f"{CONFIG_FILE} has no added_tokens_decoder, but there is {ADDED_TOKENS_FILE}")
    named = _read_json(path / SPECIAL_TOKENS_FILE)
    if not all(name in NAMES and isinstance(value, str | dict) for name, value in named.items()):
        raise NotReadHere(f"{SPECIAL_TOKENS_FILE} has more than {', '.join(NAMES)}")
    return config | named


def _class(path: Path, config: Mapping[str, Any]) -> TokenizerClass:
    for name in FURTHER_FIELDS:
        if config.get(name):
            raise NotReadHere(f"{CONFIG_FILE} has {name}")
    if (path / "tekken.json").is_file() and find_spec("mistral_common") is not None:
        raise NotReadHere("there is tekken.json, and mistral_common is installed")
    model = _read_json(path / "config.json")
    if (path / "config.json").is_file() and ("model_type" not in model or "model_name" in model):
        raise NotReadHere("config.json has no model_type, or a model_name")
    declared = config.get("tokenizer_class") or model.get("tokenizer_class")
    has_byte_level = (
        str(declared).startswith("LlamaTokenizer") and b'"ByteLevel"' in (path / TOKENIZER_FILE).read_bytes()
    )
    found = class_of(model.get("model_type"), declared, has_byte_level)
    if found is None:
        raise NotReadHere(f"tokenizer_class is {declared} with model_type {model.get('model_type')}")
    return found


def _added_tokens(config: Mapping[str, Any], in_file: dict[int, AddedToken]) -> dict[int, AddedToken]:
    """Return the added tokens that tokenizer_config.json lists, by id, in ascending order.

    in_file: the added tokens of tokenizer.json, returned if tokenizer_config.json has no list.
    """
    if "added_tokens_decoder" not in config:
        return in_file
    found = {int(index): _token(value) for index, value in config["added_tokens_decoder"].items()}
    return {index: token for index, token in sorted(found.items()) if isinstance(token, AddedToken)}


def _named_tokens(
    config: Mapping[str, Any], defaults: Mapping[str, str], added: dict[int, AddedToken]
) -> dict[str, str | AddedToken]:
    by_text = {token.content: token for token in added.values()}
    found: dict[str, str | AddedToken] = {}
    for name in NAMES:
        value = _token(config[name]) if name in config else None
        if value is not None:
            found[name] = by_text.get(str(value), value)
        elif name not in config and name in defaults:
            found[name] = defaults[name]
    further = {name: value for name, value in config.items() if name.endswith("_token") and name not in NAMES}
    extra = config.get("extra_special_tokens")
    further |= extra if isinstance(extra, dict) else {}
    return found | {name: _token(value) for name, value in further.items() if isinstance(value, str | dict)}


def _extra_tokens(config: Mapping[str, Any]) -> list[str | AddedToken]:
    """Return the special tokens that tokenizer_config.json lists without a name."""
    given = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    return [] if isinstance(given, dict) else [_token(value) for value in given]


def _add_tokens(
    backend: Tokenizer,
    added: dict[int, AddedToken],
    named: dict[str, str | AddedToken],
    extra: list[str | AddedToken],
) -> None:
    """Append the tokens that tokenizer.json lacks to the vocabulary: `added`, then `named`, then `extra`."""
    tokens: list[str | AddedToken] = list(added.values())
    texts = {*(token.content for token in backend.get_added_tokens_decoder().values()), *map(str, tokens)}
    for token in [*named.values(), *extra]:
        if str(token) not in texts and token not in tokens:
            tokens.append(token)
    special = {str(token) for token in named.values()}
    backend.add_tokens([_as_added(token, special) for token in tokens])


def _as_added(token: str | AddedToken, special: set[str]) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    token.special = token.special or token.content in special
    return token


def _token(value: Any) -> Any:
    """Return a token from JSON: a string unchanged, an object as an AddedToken."""
    if isinstance(value, dict):
        return AddedToken(**{name: field for name, field in value.items() if name != "__type"})
    return value


def _flags(token: AddedToken) -> tuple[str, bool, bool, bool, bool, bool]:
    return (token.content, token.single_word, token.lstrip, token.rstrip, token.normalized, token.special)


def _read_json(path: Path) -> dict[str, Any]:
    return JsonFields.from_file(path).values if path.is_file() else {}

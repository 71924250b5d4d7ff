"""A checkpoint's tokenizer, loaded from local files, and the facts of its vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.checkpoint.lfs_pointer import describe_lfs_pointer, is_lfs_pointer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


class Tokenizer:
    """A tokenizer of transformers, as the frontend uses it.

    hf: the tokenizer itself. known_ids: its ids; a model's vocabulary may be padded beyond them.
    special_ids: ids that skip_special_tokens leaves out. byte_ids: SentencePiece's tokens of a single byte
    (<0x00> to <0xFF>); a run of them is decoded as a whole.
    """

    def __init__(self, hf: PreTrainedTokenizerBase) -> None:
        self.hf = hf
        self._backend: Any = hf.backend_tokenizer if hf.is_fast else None
        if hf.is_fast:
            special = [index for index, token in hf.added_tokens_decoder.items() if token.special]
        else:
            special = hf.all_special_ids
        self.special_ids = frozenset(special)
        vocabulary = hf.get_vocab()
        self.known_ids = frozenset(vocabulary.values())
        byte_tokens = (f"<0x{byte:02X}>" for byte in range(256))
        self.byte_ids = frozenset(vocabulary[token] for token in byte_tokens if token in vocabulary)
        self._word = self.encode("a", add_special_tokens=False)
        self._decoded_tokens: dict[int, str] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with those that the tokenizer puts around a prompt unless told otherwise."""
        return self.hf(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens included; ids unknown to the tokenizer add nothing."""
        if self._backend is not None:
            return self._backend.decode(token_ids, skip_special_tokens=False)
        text = self.hf.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return cast(str, text)

    def decode_token(self, token_id: int) -> str:
        """The text of one token within a text, where it keeps its leading space; a special token's alone."""
        text = self._decoded_tokens.get(token_id)
        if text is None:
            text = self._decoded_tokens[token_id] = self._decode_token(token_id)
        return text

    def _decode_token(self, token_id: int) -> str:
        before, both = self.decode(self._word), self.decode([*self._word, token_id])
        if token_id in self.special_ids or not both.startswith(before):
            return self.decode([token_id])
        return both[len(before) :]


def has_tokenizer(path: Path) -> bool:
    """Whether the folder holds a file that a tokenizer is loaded from."""
    return any((path / name).is_file() for name in TOKENIZER_FILES)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in the folder `path`, from its files alone: nothing is downloaded, no code of it is run.

    Raises FileNotFoundError or ValueError, naming the folder, what is wrong, and the file if one is damaged.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"tokenizer must be a folder, and there is none at {str(path)!r}")
    if not has_tokenizer(path):
        raise FileNotFoundError(f"tokenizer: {str(path)!r} has none of {', '.join(TOKENIZER_FILES)}")
    from transformers import AutoTokenizer

    try:
        hf = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        why = _damage(path) or f"{type(error).__name__}: {error}"
        raise ValueError(f"tokenizer: cannot load the one in {str(path)!r}: {why}") from error
    return Tokenizer(hf)


def _damage(path: Path) -> str:
    """What is wrong with a file of a tokenizer that could not be loaded; empty if none is damaged for itself."""
    for file in (path / name for name in TOKENIZER_FILES if (path / name).is_file()):
        if is_lfs_pointer(file):
            return describe_lfs_pointer(file)
        if file.suffix == ".json":
            try:
                fields = JsonFields.from_file(file)
            except ValueError as error:
                return str(error)
            if file.name == "tokenizer.json" and "model" not in fields:
                return f"{file}: the field model is missing"
    return ""


def read_json_if_there(path: Path) -> dict[str, Any]:
    """The JSON object in a file that a checkpoint may lack, {} without it; ValueError if it is damaged."""
    return JsonFields.from_file(path).values if path.is_file() else {}


def find_tokenizer(given: Path | None, model_path: Path) -> Tokenizer | None:
    """The tokenizer in the folder `given`, else the checkpoint's; None if that has none."""
    if given is not None:
        return load_tokenizer(given)
    return load_tokenizer(model_path) if has_tokenizer(model_path) else None


def read_eos_token_ids(model_path: Path, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Every end-of-sequence token that generation_config.json, config.json or the tokenizer names."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = read_json_if_there(model_path / name).get("eos_token_id")
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
            raise ValueError(f"eos_token_id in {str(model_path / name)!r} must be an integer or a list, got {value!r}")
        found.update(values)
    if tokenizer is not None and tokenizer.hf.eos_token_id is not None:
        found.add(tokenizer.hf.eos_token_id)
    return frozenset(found)


def encode_bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """`bad_words` as token ids: each word as it is at the start of a text, and as it is after a space if that differs.

    As in vLLM the form after a space counts only if it has as many tokens: otherwise it begins with a token
    for the space alone, and the sequence to forbid is the first form again.

    Raises ValueError, naming the word, if it has no tokens.
    """
    encoded: list[tuple[int, ...]] = []
    for index, word in enumerate(words):
        bare = word.lstrip()
        at_start = tuple(tokenizer.encode(bare, add_special_tokens=False))
        if not at_start:
            raise ValueError(f"bad_words[{index}] must have a token after leading spaces and line ends, got {word!r}")
        encoded.append(at_start)
        after_space = tuple(tokenizer.encode(f" {bare}", add_special_tokens=False))
        if after_space[0] != at_start[0] and len(after_space) == len(at_start):
            encoded.append(after_space)
    return tuple(encoded)

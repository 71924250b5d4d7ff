"""Defines counterparts of vLLM's EngineArgs, TokensPrompt and TextPrompt, which scripts import."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, field, make_dataclass
from typing import Any, Self

from compiled_engine.other_engines.keywords import KEYWORDS
from compiled_engine.other_engines.translate import DEFAULTS


class _Args:
    """Keywords of `LLM` as an object, for `LLM(**dataclasses.asdict(args))` or `AsyncLLM.from_engine_args(args)`.

    Accepts any keyword of this engine and of vLLM's. Keywords that are not given have no effect.
    """

    def keywords(self) -> dict[str, Any]:
        """Return the keywords whose values differ from the defaults."""
        return {name: value for name, value in asdict(self).items() if value != DEFAULTS.get(name)}  # type: ignore[call-overload]

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add the options that scripts use most to `parser`, and return it."""
        parser.add_argument("--model")
        for name in ("tensor_parallel_size", "max_model_len", "max_num_seqs", "seed"):
            parser.add_argument(f"--{name.replace('_', '-')}", type=int)
        for name in ("dtype", "quantization", "load_format"):
            parser.add_argument(f"--{name.replace('_', '-')}")
        for name in ("enforce_eager", "trust_remote_code"):
            parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", default=None)
        return parser

    @classmethod
    def from_cli_args(cls, arguments: argparse.Namespace) -> Self:
        """Return an instance made from parsed arguments. Arguments that are not keywords of `LLM` are ignored."""
        given: Mapping[str, Any] = vars(arguments)
        return cls(**{name: value for name, value in given.items() if name in FIELDS and value is not None})


FIELDS = {name: DEFAULTS.get(name) for name in (*DEFAULTS, *KEYWORDS)}
EngineArgs = make_dataclass(
    "EngineArgs",
    [(name, Any, field(default=default)) for name, default in FIELDS.items()],
    bases=(_Args,),
    namespace={"__doc__": _Args.__doc__, "__module__": __name__},
)


def tokens_prompt(prompt_token_ids: list[int], **others: Any) -> dict[str, Any]:
    """Return a prompt of token ids. `others` are further keys, such as cache_salt."""
    return {"prompt_token_ids": prompt_token_ids, **others}


def text_prompt(prompt: str, **others: Any) -> dict[str, Any]:
    """Return a text prompt. `others` are further keys, such as cache_salt."""
    return {"prompt": prompt, **others}

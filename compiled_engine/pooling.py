"""Defines how hidden states become vectors or scores: pooling, head, activation.

models/checkpoint/pooling_folder.py makes these values from a checkpoint's files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

KINDS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""Kinds of pooling, by sentence-transformers' names and in the order in which its older versions concatenate them."""
LAST = ("lasttoken",)
EMBED, CLASSIFY = "embed", "classify"
NONE, NORMALISE, SOFTMAX, SIGMOID = "none", "normalise", "softmax", "sigmoid"
# Kinds by vLLM's names in pooler_config.
KINDS_BY_NAME = {"cls": "cls", "mean": "mean", "last": "lasttoken", "all": "lasttoken"} | {kind: kind for kind in KINDS}

# Conversions of the model by vLLM's names of tasks in pooler_config.
TASKS = {"embed": EMBED, "token_embed": EMBED, "classify": CLASSIFY, "token_classify": CLASSIFY, "score": CLASSIFY}


@dataclass(frozen=True)
class Dense:
    """One linear of a pooling model's head."""

    source: str  # folder of the checkpoint with its tensors, or the name of its module
    in_size: int
    out_size: int
    bias: bool = False
    activation: str = "Identity"  # a class of torch.nn
    tokens: tuple[int, ...] = ()  # if given, the weight is the output projection's rows of these tokens


@dataclass(frozen=True)
class Pooling:
    """The steps by which a model turns hidden states into the result of a request."""

    task: str  # embed or classify
    kinds: tuple[str, ...]  # of KINDS; several are concatenated
    head: tuple[Dense, ...]  # linears, applied in order
    activation: str  # applied to the result
    labels: tuple[str, ...] = ()  # names of a classifier's results
    template: tuple[str, ...] = ()  # for pairs of texts to be judged, in three parts; empty: the tokenizer's
    prompts: tuple[tuple[str, str], ...] = ()  # texts to put before a text, by name
    include_prompt: bool = True  # prompt tokens are pooled too
    lower_case: bool = False  # texts are lowercased before they are tokenised
    dimensions: int | None = None  # vectors are cut to this length; None: not cut
    activates: bool = True  # default for requests that do not choose whether to apply the activation
    own_head: bool = False  # the head is the model's own code; `head` only gives its sizes

    def width(self, hidden_size: int) -> int:
        """Return the number of values of a pooled vector after the head, before it is cut to self.dimensions."""
        return self.head[-1].out_size if self.head else hidden_size * len(self.kinds)

    @property
    def every_token(self) -> bool:
        """Whether a result needs the hidden states of tokens before the last token."""
        return self.kinds != LAST

    @property
    def num_labels(self) -> int:
        """Number of a classifier's labels; 1 for a reranker whose score is computed from one or two tokens' logits."""
        return 1 if self.head and self.head[-1].tokens else len(self.labels)


@dataclass(frozen=True)
class PoolerConfig:
    """Overrides of the checkpoint's pooling, by vLLM's names; None keeps the checkpoint's value."""

    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    tok_pooling_type: str | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    softmax: bool | None = None
    dimensions: int | None = None
    task: str | None = None

    @classmethod
    def of(cls, value: Any) -> PoolerConfig:
        """Return `value` as a PoolerConfig: a PoolerConfig, a mapping, or the text of a JSON object.

        Raises TypeError or ValueError, whose message has the key and the value.
        """
        if isinstance(value, PoolerConfig):
            return value
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ValueError(f"pooler_config must be a JSON object, got {value!r}: {error}") from error
        if not isinstance(value, Mapping):
            raise TypeError(f"pooler_config must be a mapping or a PoolerConfig, got {value!r}")
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in value if name not in known]:
            raise ValueError(f"pooler_config has no {unknown[0]!r}; allowed: {', '.join(known)}")
        made = cls(**value)
        made.check()
        return made

    def check(self) -> None:
        """Raise TypeError or ValueError if a field has a value that is not allowed."""
        for name in ("pooling_type", "seq_pooling_type"):
            kind = getattr(self, name)
            if kind is not None and str(kind).lower() not in KINDS_BY_NAME:
                raise ValueError(f"pooler_config: {name} is {kind!r}; allowed: {', '.join(KINDS_BY_NAME)}")
        if self.tok_pooling_type is not None and str(self.tok_pooling_type).lower() != "all":
            raise ValueError(f"pooler_config: tok_pooling_type is {self.tok_pooling_type!r}; allowed: ALL")
        if self.task is not None and self.task not in TASKS:
            raise ValueError(f"pooler_config: task is {self.task!r}; allowed: {', '.join(TASKS)}")
        for name in ("normalize", "use_activation", "softmax"):
            if not isinstance(getattr(self, name), bool | None):
                raise TypeError(f"pooler_config: {name} is {getattr(self, name)!r}; allowed: true, false, null")
        if self.dimensions is not None and (type(self.dimensions) is not int or self.dimensions < 1):
            raise ValueError(f"pooler_config: dimensions is {self.dimensions!r}; allowed: an integer of at least 1")

    def converts(self, convert: str) -> str:
        """Return the model's conversion, such as embed: that of `task` if it is given, otherwise the option `convert`.

        Raises ValueError if the task and the option contradict each other.
        """
        if self.task is None:
            return convert
        if convert not in ("auto", "none", TASKS[self.task]):
            raise ValueError(
                f"pooler_config: task is {self.task!r}, but convert is {convert!r}; allowed: one of the two"
            )
        return TASKS[self.task]

    @property
    def kinds(self) -> tuple[str, ...] | None:
        """Kinds of pooling (see KINDS) that the override requests; None keeps the checkpoint's kinds."""
        asked = self.seq_pooling_type or self.pooling_type
        return None if asked is None else (KINDS_BY_NAME[asked.lower()],)

    @property
    def activates(self) -> bool | None:
        """Whether the activation, or normalisation, is applied to results; None keeps the checkpoint's setting."""
        return self.use_activation if self.normalize is None else self.normalize

"""The steps from hidden states to vectors or scores, as plain data: pooling, head, activation.

Nothing here knows of files; what a checkpoint states is read into these values by models/checkpoint/pooling_folder.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

KINDS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""Names of sentence-transformers, in the order in which its older configurations concatenate several."""
LAST = ("lasttoken",)
EMBED, CLASSIFY = "embed", "classify"
NONE, NORMALISE, SOFTMAX, SIGMOID = "none", "normalise", "softmax", "sigmoid"
# Of pooler_config, by vLLM's names.
KINDS_BY_NAME = {"cls": "cls", "mean": "mean", "last": "lasttoken", "all": "lasttoken"} | {kind: kind for kind in KINDS}

# Tasks of pooler_config, by vLLM's names: what the model is converted to.
TASKS = {"embed": EMBED, "token_embed": EMBED, "classify": CLASSIFY, "token_classify": CLASSIFY, "score": CLASSIFY}


@dataclass(frozen=True)
class Dense:
    """A linear of a head. source: the tensors' file (a folder of the checkpoint), or their module in the checkpoint.
    tokens: instead, its rows are those of the output projection for these tokens. activation: of torch.nn."""

    source: str
    in_size: int
    out_size: int
    bias: bool = False
    activation: str = "Identity"
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Pooling:
    """A model's way from hidden states to the result of a request.

    task: embed or classify. kinds: of KINDS; several are concatenated. head: linears, one after the other. activation:
    of the result. activates: whether it is applied where a request does not say. labels: names of a classifier's
    results. template: the form of a pair of texts to be judged, in three parts; empty for the tokenizer's. prompts:
    texts before a text, by name. include_prompt: whether they are pooled. lower_case: whether texts are made lower case
    before they are tokenised. dimensions: the number that vectors are cut to; None for all. own_head: the head is the
    model's own code, and `head` has its sizes alone.
    """

    task: str
    kinds: tuple[str, ...]
    head: tuple[Dense, ...]
    activation: str
    labels: tuple[str, ...] = ()
    template: tuple[str, ...] = ()
    prompts: tuple[tuple[str, str], ...] = ()
    include_prompt: bool = True
    lower_case: bool = False
    dimensions: int | None = None
    activates: bool = True
    own_head: bool = False

    def width(self, hidden_size: int) -> int:
        """Values of a result."""
        return self.head[-1].out_size if self.head else hidden_size * len(self.kinds)

    @property
    def every_token(self) -> bool:
        """Return whether a result needs the hidden states of all tokens, not of the last one alone."""
        return self.kinds != LAST

    @property
    def num_labels(self) -> int:
        """Results of a classifier: the two tokens of a reranker make one."""
        return 1 if self.head and self.head[-1].tokens else len(self.labels)


@dataclass(frozen=True)
class PoolerConfig:
    """Overrides of the checkpoint's pooling, by vLLM's names; None leaves a field to the checkpoint."""

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
        """From a PoolerConfig, a mapping, or JSON. Raises TypeError or ValueError naming the key and the value."""
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
        """Raise TypeError or ValueError for a value that is not allowed."""
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
        """Return the option `convert` with what the task asks for. Raises ValueError if they differ."""
        if self.task is None:
            return convert
        if convert not in ("auto", "none", TASKS[self.task]):
            raise ValueError(
                f"pooler_config: task is {self.task!r}, but convert is {convert!r}; allowed: one of the two"
            )
        return TASKS[self.task]

    @property
    def kinds(self) -> tuple[str, ...] | None:
        """The kinds that it asks for, if any."""
        asked = self.seq_pooling_type or self.pooling_type
        return None if asked is None else (KINDS_BY_NAME[asked.lower()],)

    @property
    def activates(self) -> bool | None:
        """Return whether results are normalised or activated; None leaves it to the checkpoint."""
        return self.use_activation if self.normalize is None else self.normalize

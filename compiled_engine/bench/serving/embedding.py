"""Measure texts and tokens per second of pooling models: the engine, its variants, transformers, and servers.

All of these contenders embed the same token ids and take turns, so that changes of the machine's speed affect all
alike. transformers runs as in sentence-transformers: texts sorted by length, batches padded to their longest text,
scaled_dot_product_attention, mean pooling, normalisation. Other kinds of pooling take about as long.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from compiled_engine.bench.results import conditions
from compiled_engine.bench.serving.target import find_model
from compiled_engine.bench.workloads import summary

if TYPE_CHECKING:
    from compiled_engine.bench.serving.target import Target
    from compiled_engine.llm import LLM
    from compiled_engine.process.progress import Progress

WORKLOADS = ("32x16", "8x512", "64x512", "2000x512")
BESIDE = ("transformers",)
# Batch size of transformers (sentence-transformers' default); texts per request, and concurrent requests.
BATCH, PER_REQUEST, AT_ONCE = 32, 32, 16

Texts = list[list[int]]
Contender = Callable[[Texts], int]
"""Embeds texts and returns the number of vectors."""


@dataclass(frozen=True)
class EmbedWorkload:
    """A workload of `texts` texts to embed, of `tokens` tokens each or, if ragged, of at most `tokens`."""

    texts: int
    tokens: int
    ragged: bool = False  # lengths uniform from 1 to `tokens`

    @classmethod
    def of(cls, name: str, *, ragged: bool) -> EmbedWorkload:
        """Return the workload that `name` states as TEXTSxTOKENS. Raises ValueError for any other text."""
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", name)
        if found is None:
            raise ValueError(f"workload is {name!r}; allowed: TEXTSxTOKENS, such as {', '.join(WORKLOADS)}")
        return cls(int(found[1]), int(found[2]), ragged)

    @property
    def name(self) -> str:
        """The workload as TEXTSxTOKENS, followed by "ragged" if lengths differ."""
        return f"{self.texts}x{self.tokens}{' ragged' if self.ragged else ''}"

    def make(self, vocab_size: int) -> Texts:
        """Return random texts as token ids. Every call returns the same texts."""
        generator = random.Random(self.name)
        lens = (generator.randint(1, self.tokens) if self.ragged else self.tokens for _ in range(self.texts))
        return [[generator.randrange(vocab_size) for _ in range(length)] for length in lens]


def measure(
    options: Mapping[str, Any],
    shape: str | None,
    workloads: Sequence[EmbedWorkload],
    beside: Sequence[str],
    targets: Mapping[str, Target],
    repeats: int,
    progress: Progress,
    variants: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure every workload with each contender in turn, `repeats` times after a warm-up.

    options: engine options, including the model. beside: contenders in this process, "transformers". targets:
    OpenAI-compatible servers by name; their model must have at least the engine's vocabulary. variants: names of
    variants of `bench ablation`; each runs as a further engine in this process.

    Returns a result whose results are a list with, for each workload: workload, texts, tokens, ratio (the engine's best
    rate divided by the best rate of transformers and the servers; None without these) and contenders (texts_per_s and
    tokens_per_s of each, with median and spread). Raises ValueError for an invalid option, RuntimeError if a contender
    fails or returns a wrong number of vectors.
    """
    for name in beside:
        if name not in BESIDE:
            raise ValueError(f"beside is {name!r}; allowed: {', '.join(BESIDE)}")
    servers = {name: _server(target) for name, target in targets.items()}
    from compiled_engine.bench.variants import chosen as choose  # imports torch
    from compiled_engine.bench.variants import variants as variants_of
    from compiled_engine.llm import LLM

    given: dict[str, Any] = {"runner": "pooling", "skip_tokenizer_init": True} | dict(options) | {"progress": False}
    with ExitStack() as engines:
        llm = engines.enter_context(LLM(**given))
        config = llm.config
        known = variants_of(config.device.type, config.compile.passes) if variants else []
        chosen = choose(known, variants)
        longest = max(workload.tokens for workload in workloads)
        if longest > config.model.max_model_len:
            raise ValueError(f"workload has texts of {longest} tokens; allowed: at most {config.model.max_model_len}")
        contenders: dict[str, Contender] = {"engine": partial(_engine, llm)}
        if "transformers" in beside:
            contenders["transformers"] = _transformers(llm)
        contenders |= servers
        others = [name for name in contenders if name != "engine"]
        for variant in chosen:
            engine = engines.enter_context(LLM(**variant.engine_options(given)))
            contenders[variant.name] = partial(_engine, engine)
        with progress.stage("embed", total=len(workloads) * (repeats + 1) * len(contenders)) as advance:
            results = [_measured(workload, config, contenders, others, repeats, advance) for workload in workloads]
        return {
            "benchmark": "embed",
            "results": results,
            "repeats": repeats,
            "servers": {name: target.url for name, target in targets.items()},
            **conditions(config, options, shape),
        }


def _measured(
    workload: EmbedWorkload,
    config: Any,
    contenders: Mapping[str, Contender],
    others: Sequence[str],
    repeats: int,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    texts = workload.make(config.model.vocab_size)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):  # the first is warm-up
        for name, contender in contenders.items():
            start = time.perf_counter()
            count = contender(texts)
            taken = time.perf_counter() - start
            if count != len(texts):
                raise RuntimeError(f"{name}: {len(texts)} texts were given, {count} vectors came")
            if repeat:
                seconds[name].append(taken)
            advance(1)
    tokens = sum(map(len, texts))
    rates = {
        name: {
            "texts_per_s": summary([len(texts) / each for each in taken]),
            "tokens_per_s": summary([tokens / each for each in taken]),
        }
        for name, taken in seconds.items()
    }
    best = {name: len(texts) / min(taken) for name, taken in seconds.items()}
    ratio = best["engine"] / max(best[name] for name in others) if others else None
    return {"workload": workload.name, "texts": len(texts), "tokens": tokens, "ratio": ratio, "contenders": rates}


def _engine(llm: LLM, texts: Texts) -> int:
    return len(llm.embed([{"prompt_token_ids": ids} for ids in texts]))


def _transformers(llm: LLM) -> Contender:
    """Return a contender that runs transformers' model of the same architecture, with random weights."""
    import torch
    from transformers import AutoConfig, AutoModel

    config = llm.config
    stated = json.loads((config.model.path / "config.json").read_text())
    theirs = AutoConfig.for_model(stated.pop("model_type"), **stated)
    model = AutoModel.from_config(theirs, dtype=config.model.dtype, attn_implementation="sdpa")
    model = model.eval().to(config.device)

    @torch.inference_mode()
    def run(texts: Texts) -> int:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        count = 0
        for start in range(0, len(order), BATCH):
            batch = [torch.tensor(texts[i]) for i in order[start : start + BATCH]]
            ids_NL = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
            lens_N1 = torch.tensor([[len(ids)] for ids in batch])
            mask_NL = (torch.arange(ids_NL.shape[1]) < lens_N1).long()
            ids_NL, mask_NL = ids_NL.to(config.device), mask_NL.to(config.device)
            hidden_NLD = model(input_ids=ids_NL, attention_mask=mask_NL)[0]
            sums_ND = (hidden_NLD * mask_NL.unsqueeze(-1)).sum(1) / mask_NL.sum(1, keepdim=True)
            count += len(torch.nn.functional.normalize(sums_ND, dim=1).float().cpu().numpy())
        return count

    return run


def _server(target: Target) -> Contender:
    from http.client import HTTPConnection, HTTPSConnection

    model, _ = find_model(target, None, ready_timeout_s=0)

    def send(part: Texts) -> int:
        connect = HTTPSConnection if target.scheme == "https" else HTTPConnection
        connection = connect(target.host, target.port)
        fields = {"model": model, "input": part, "encoding_format": "base64"}
        headers = dict(target.headers) | {"content-type": "application/json"}
        try:
            connection.request("POST", f"{target.path}/embeddings", json.dumps(fields), headers)
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"{target.url}/embeddings answers {response.status}: {answer[:200]!r}")
        return len(json.loads(answer)["data"])

    def run(texts: Texts) -> int:
        parts = [texts[start : start + PER_REQUEST] for start in range(0, len(texts), PER_REQUEST)]
        with ThreadPoolExecutor(AT_ONCE) as threads:
            return sum(threads.map(send, parts))

    return run

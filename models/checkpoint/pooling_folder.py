"""Read how the model of a checkpoint pools, and the tensors of its head.

The configuration is read from the files of sentence-transformers, or from config.json for classifiers and rerankers.
sentence-transformers lists modules in modules.json: a transformer, poolings, linears (Dense) and a normalisation. Only
the last part of a module's type name is compared, since versions of sentence-transformers differ in the other parts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from compiled_engine.config import ModelConfig
from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.checkpoint.safetensors_files import map_tensors
from compiled_engine.pooling import (
    CLASSIFY,
    EMBED,
    KINDS,
    LAST,
    NONE,
    NORMALISE,
    SIGMOID,
    SOFTMAX,
    Dense,
    PoolerConfig,
    Pooling,
)

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
# Older config files of the module Transformer are named after the model.
_NAMED = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
TRANSFORMERS = tuple(f"sentence_{name}_config.json" for name in _NAMED)
LENGTH = "max_seq_length"
TOKENIZER, TOKENIZER_LENGTH = "tokenizer_config.json", "model_max_length"
POOLING_FILES = (MODULES, PROMPTS, *TRANSFORMERS)
CAUSAL = "ForCausalLM"
LM_HEAD = "LMHeadModel"
CLASSIFIER = "ForSequenceClassification"
# Endings of architecture names, for the heads that the same model may have.
SUFFIXES = (CLASSIFIER, "ForTextEncoding", "ForMaskedLM", "ForPreTraining", "Model")
# Older configurations of sentence-transformers have one field per kind of pooling.
OLD_FIELDS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Tensor names: prefix of the head in the model, and heads and embeddings in checkpoints.
POOLER = "pooler.linears"
_OUTPUT = "lm_head.weight"
_OTHER_HEADS = (_OUTPUT, "score.weight", "score.bias")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")
WITHOUT_EFFECT = ("Dropout",)
# For each kind of module, the kinds that must not precede it: the order is pooling, linears, normalisation.
_NOT_AFTER = {"Pooling": ("Dense", "Normalize"), "Dense": ("Normalize",)}
_CROSS_ENCODERS = {"Identity": NONE, "Sigmoid": SIGMOID, "Softmax": SOFTMAX}  # activations of cross encoders
RERANKERS = ("Qwen3ForCausalLM",)
NO_YES = ("no", "yes")
TOKENS = "classifier_from_token"
# Template of Qwen3-Reranker: text before a pair, the pair, and text after it, each tokenised separately.
RERANKER_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)


class PoolingOptions(NamedTuple):
    """The user's options runner, convert and pooler_config, which EngineOptions has checked."""

    runner: str = "auto"
    convert: str = "auto"
    override: PoolerConfig = PoolerConfig()  # pooler_config


class _Stated(NamedTuple):
    kinds: tuple[str, ...]
    include_prompt: bool
    head: tuple[Dense, ...]
    normalises: bool
    score_tokens: tuple[int, ...] | None


def causal_name(architecture: str) -> str:
    """Return the name of the causal language model with the same decoder as `architecture`.

    Examples: Qwen3ForCausalLM for Qwen3Model, Gemma3ForCausalLM for Gemma3TextModel. The name of a causal language
    model, such as GPT2LMHeadModel, and a name with an unknown ending are returned unchanged.
    """
    if architecture.endswith(LM_HEAD):
        return architecture
    for suffix in SUFFIXES:
        if architecture.endswith(suffix):
            return architecture.removesuffix(suffix).removesuffix("Text") + CAUSAL
    return architecture


def headless_name(architecture: str, convert: str) -> str:
    """Return the name of the model without the head of `architecture`, such as BertModel for BertForMaskedLM.

    A classifier's name is returned unchanged, unless `convert` is "embed".
    """
    if architecture.endswith(CLASSIFIER) and convert != EMBED:
        return architecture
    for suffix in (*SUFFIXES, CAUSAL):
        if architecture.endswith(suffix):
            return architecture.removesuffix(suffix) + "Model"
    return architecture


def judged_by_tokens(fields: JsonFields, asked: PoolingOptions) -> tuple[JsonFields, PoolingOptions]:
    """Return the fields of config.json and the options, changed for a classifier whose scores are logits of tokens.

    Such a classifier names the tokens in the field `classifier_from_token` and has no other head. It is changed to a
    causal language model that runs as a pooling classifier. For other models, and if the option `convert` is "embed",
    the fields and options are returned unchanged.
    """
    architecture = fields.texts("architectures")[0]
    if TOKENS not in fields or not architecture.endswith(CLASSIFIER) or asked.convert == EMBED:
        return fields, asked
    return fields.replaced(architectures=[causal_name(architecture)]), asked._replace(
        runner="pooling", convert=CLASSIFY
    )


def why_pooling(architecture: str, path: Path, asked: PoolingOptions) -> str | None:
    """Return the reason why a checkpoint's model runs as a pooling model; None if it generates text.

    architecture: as config.json states it. path: the checkpoint's folder. asked: the user's options. Raises ValueError
    for conflicting options.
    """
    if asked.runner == "pooling":
        return "runner is 'pooling'"
    if asked.runner == "auto":
        if (path / MODULES).is_file():
            return f"the folder has {MODULES}"
        if causal_name(architecture) != architecture:
            return f"{architecture} generates no text"
        if asked.convert in (EMBED, CLASSIFY):
            return f"convert is {asked.convert!r}"
    elif asked.convert in (EMBED, CLASSIFY):
        raise ValueError(f"convert is {asked.convert!r}, but runner is 'generate'; allowed: auto, none")
    if asked.override != PoolerConfig():
        raise ValueError("pooler_config is given, but the model generates; allowed: None, or runner='pooling'")
    return None


def read_pooling(
    fields: JsonFields, path: Path, asked: PoolingOptions, hidden_size: int, reasons: dict[str, str], *, causal: bool
) -> Pooling:
    """Return how a pooling model computes its result from hidden states.

    fields: the fields of config.json. path: the checkpoint's folder. asked: the user's options. reasons: the reasons
    for chosen values are added to this dict. causal: False for an encoder. Raises ValueError for an option that the
    checkpoint does not allow, and for a field that is wrong or not supported.
    """
    architecture, convert = fields.texts("architectures")[0], asked.convert
    stated = _modules(path, hidden_size) if (path / MODULES).is_file() else None
    if convert not in (EMBED, CLASSIFY):
        classifies = architecture.endswith(CLASSIFIER) or (stated is not None and stated.score_tokens is not None)
        convert = CLASSIFY if classifies else EMBED
    if convert == EMBED:
        pooling = _embedding(stated, path, reasons, causal)
    elif architecture.endswith(CLASSIFIER):
        pooling = _classifier(fields, path, hidden_size, reasons, causal)
    else:
        pooling = _reranker(fields, path, stated, hidden_size, reasons)
    return _overridden(pooling, asked.override, hidden_size, reasons)


def _embedding(stated: _Stated | None, path: Path, reasons: dict[str, str], causal: bool) -> Pooling:
    if stated is None:
        usual = "the last token, as decoders are trained" if causal else "the mean, as sentence-transformers has it"
        reasons["model.pooling.kinds"] = f"no {MODULES}: {usual}"
        reasons["model.pooling.activation"] = f"no {MODULES}: vectors of length 1"
        return Pooling(EMBED, LAST if causal else ("mean",), (), NORMALISE)
    reasons["model.pooling.kinds"] = reasons["model.pooling.activation"] = f"from {MODULES}"
    values = _json(path / PROMPTS)
    prompts = values.section("prompts").values
    values.require("prompts", all(isinstance(text, str) for text in prompts.values()), "an object of strings")
    return Pooling(
        EMBED,
        stated.kinds,
        stated.head,
        NORMALISE if stated.normalises else NONE,
        prompts=tuple(prompts.items()),
        include_prompt=stated.include_prompt,
        lower_case=_transformer(path).boolean("do_lower_case", False),
    )


def _classifier(fields: JsonFields, path: Path, hidden_size: int, reasons: dict[str, str], causal: bool) -> Pooling:
    named = fields.section("id2label").values
    count = len(named) or fields.integer("num_labels", 2)
    labels = tuple(str(named.get(str(i), f"LABEL_{i}")) for i in range(count))
    problem = fields.text("problem_type", "")
    if problem == "regression":
        activation, why = NONE, "problem_type is regression"
    elif problem == "multi_label_classification" or (not problem and count == 1):
        activation, why = SIGMOID, f"problem_type is {problem}" if problem else "one label"
    else:
        activation, why = SOFTMAX, "labels exclude each other"
    reasons["model.pooling.activation"] = why
    activation = _of_cross_encoder(fields, path, reasons) or activation
    if causal:
        reasons["model.pooling.kinds"] = "classifiers of decoders read the last token"
        return Pooling(CLASSIFY, LAST, (Dense("score", hidden_size, count),), activation, labels)
    kind = fields.one_of("classifier_pooling", KINDS, "cls")
    reasons["model.pooling.kinds"] = "classifiers of encoders read the first token, unless classifier_pooling is stated"
    head = (Dense("classifier", hidden_size, count),)
    return Pooling(CLASSIFY, (kind,), head, activation, labels, own_head=True)


def _of_cross_encoder(fields: JsonFields, path: Path, reasons: dict[str, str]) -> str | None:
    """Return the activation that sentence-transformers has stored for a cross encoder; None if it has stored none.

    The activation is the name of a torch class, in config_sentence_transformers.json of the folder `path`; earlier
    versions store it in config.json (`fields`). Names of other classes are ignored. The reason for the activation is
    added to `reasons`. Raises ValueError for a torch class that is not supported.
    """
    name, old_name = "activation_fn", "sbert_ce_default_activation_function"
    stating = ((_json(path / PROMPTS), name), (fields.section("sentence_transformers"), name), (fields, old_name))
    for place, key in stating:
        if key in place and (stated := place.text(key)).startswith("torch."):
            if (known := _CROSS_ENCODERS.get(stated.rpartition(".")[2])) is None:
                raise place.error(key, f"one of {', '.join(_CROSS_ENCODERS)}")
            reasons["model.pooling.activation"] = f"{key} of the cross encoder is {stated}"
            return known
    return None


def _reranker(
    fields: JsonFields, path: Path, stated: _Stated | None, hidden_size: int, reasons: dict[str, str]
) -> Pooling:
    architecture = fields.texts("architectures")[0]
    words = fields.texts(TOKENS) if TOKENS in fields else [*NO_YES]
    fields.require(TOKENS, len(words) in (1, 2), "the token that affirms, or two, the one that denies first")
    if stated is not None and stated.score_tokens is not None:
        tokens: tuple[int, ...] = stated.score_tokens
    elif architecture in RERANKERS or TOKENS in fields:
        tokens = _token_ids(path, words)
    else:
        raise ValueError(
            f"convert is 'classify', but {architecture} has no head of a classifier, and no tokens that judge are "
            f"known for it; allowed: a {CLASSIFIER}, or a config.json with {TOKENS}"
        )
    reasons["model.pooling.kinds"] = "the logits after the last token judge"
    alone = len(tokens) == 1
    against = "alone, by its sigmoid" if alone else f"against {words[0]!r}"
    reasons["model.pooling.activation"] = f"the probability of {words[-1]!r} {against}"
    head = Dense("", hidden_size, len(tokens), tokens=tokens)
    activation = _of_cross_encoder(fields, path, reasons) or SIGMOID
    if activation == SIGMOID and not alone:
        activation = SOFTMAX  # the sigmoid of the difference of their logits
    template: tuple[str, ...] = RERANKER_TEMPLATE
    if architecture not in RERANKERS:
        template, transformer = (), _transformer(path)
        modalities = transformer.section("modality_config")
        no_pairs = f"absent, as chat templates write no pairs, unless the architecture is {RERANKERS[0]}"
        modalities.require("message", "message" not in modalities.values, no_pairs)
    return Pooling(CLASSIFY, LAST, (head,), activation, labels=(words[-1],), template=template)


def _overridden(pooling: Pooling, override: PoolerConfig, hidden_size: int, reasons: dict[str, str]) -> Pooling:
    why = "pooler_config"
    if override.kinds is not None:
        if pooling.head and len(pooling.kinds) > 1:
            raise ValueError(f"pooler_config: pooling_type is {override.kinds[0]!r}, but the head reads several kinds")
        pooling, reasons["model.pooling.kinds"] = replace(pooling, kinds=override.kinds), why
    if override.softmax is not None and pooling.task == CLASSIFY:
        pooling = replace(pooling, activation=SOFTMAX if override.softmax else SIGMOID)
        reasons["model.pooling.activation"] = why
    if (activates := override.activates) is not None:
        usual = NORMALISE if pooling.task == EMBED else pooling.activation
        pooling = replace(pooling, activation=usual, activates=activates)
        reasons["model.pooling.activation"] = reasons["model.pooling.activates"] = why
    if override.dimensions is not None:
        most = pooling.width(hidden_size)
        if pooling.task != EMBED or override.dimensions > most:
            allowed = f"1 to {most}" if pooling.task == EMBED else "null: the model classifies"
            raise ValueError(f"pooler_config: dimensions is {override.dimensions}; allowed: {allowed}")
        pooling, reasons["model.pooling.dimensions"] = replace(pooling, dimensions=override.dimensions), why
    return pooling


def stated_length(path: Path) -> tuple[int, str] | None:
    """Return the longest text, in tokens, that a folder of sentence-transformers states, and the field that states it.

    The field is max_seq_length of the module Transformer or, in later versions, model_max_length of the tokenizer.
    Returns None if neither exists.
    """
    fields = _transformer(path)
    if LENGTH in fields:
        return fields.integer(LENGTH), f"{LENGTH} of {Path(fields.source).name}"
    length = _json(path / TOKENIZER).values.get(TOKENIZER_LENGTH) if (path / MODULES).is_file() else None
    if isinstance(length, int | float) and math.isfinite(length) and length >= 1:
        return int(length), f"{TOKENIZER_LENGTH} of {TOKENIZER}"
    return None


def _transformer(path: Path) -> JsonFields:
    """Return the fields of the file that configures the module Transformer; an empty JsonFields if there is none."""
    return next((fields for name in TRANSFORMERS if (fields := _json(path / name)).values), JsonFields(str(path), {}))


def _modules(path: Path, hidden_size: int) -> _Stated:
    kinds: tuple[str, ...] = LAST
    include_prompt, normalises = True, False
    head: list[Dense] = []
    score_tokens: tuple[int, ...] | None = None
    done: list[str] = []  # kinds of the preceding modules
    for module in _list(path / MODULES):
        kind = module.text("type").rpartition(".")[2]
        folder = path / str(module.values.get("path") or "")
        before = [each for each in _NOT_AFTER.get(kind, ()) if each in done]
        module.require("type", not before, f"before {''.join(before[:1])}")
        if kind == "Pooling":
            kinds, include_prompt = _pooling_kinds(JsonFields.from_file(folder / "config.json"))
        elif kind == "Dense":
            width = head[-1].out_size if head else hidden_size * len(kinds)
            head.append(_dense(JsonFields.from_file(folder / "config.json"), folder.name, width))
        elif kind == "Normalize":
            normalises = True
        elif kind == "LogitScore":
            scores = JsonFields.from_file(folder / "config.json")
            ids: list[Any] = [scores.values.get(name) for name in ("false_token_id", "true_token_id")]
            false, true = ids
            are_ids = type(true) is int and type(false) in (int, type(None))
            scores.require("true_token_id", are_ids, "a token id, and false_token_id another one or null")
            score_tokens = (true,) if false is None else (false, true)
        elif kind != "Transformer" and kind not in WITHOUT_EFFECT:
            raise module.error("type", "a Transformer, Pooling, Dense, Normalize, LogitScore or Dropout")
        if kind in ("Dense", "Normalize"):
            _require_of_vector(_json(folder / "config.json"), pooled="Pooling" in done)
        done.append(kind)
    return _Stated(kinds, include_prompt, tuple(head), normalises, score_tokens)


def _require_of_vector(fields: JsonFields, *, pooled: bool) -> None:
    """Raise ValueError unless a module's input and output are the embedding of the text ("sentence_embedding").

    fields: the module's configuration. pooled: whether a pooling precedes the module; if not, token embeddings are
    allowed too.
    """
    allowed = ["sentence_embedding"] if pooled else ["sentence_embedding", "token_embeddings"]
    for name in ("module_input_name", "module_output_name"):
        fields.one_of(name, allowed, allowed[0])


def _pooling_kinds(fields: JsonFields) -> tuple[tuple[str, ...], bool]:
    """Return the kinds of pooling, and whether tokens of a prompt are pooled too.

    The results of several kinds are concatenated in the returned order. fields: the configuration of the module
    Pooling. Raises ValueError for kinds that are not supported.
    """
    stated = fields.values.get("pooling_mode")
    if stated is None:
        stated = [kind for name, kind in OLD_FIELDS.items() if fields.values.get(name) is True]
    found = [stated] if isinstance(stated, str) else stated
    if not isinstance(found, list) or not found or any(kind not in KINDS for kind in found):
        raise fields.error("pooling_mode", f"of {', '.join(KINDS)}")
    return tuple(found), fields.boolean("include_prompt", True)


def _dense(fields: JsonFields, folder: str, width: int) -> Dense:
    in_size, out_size = fields.integer("in_features"), fields.integer("out_features")
    fields.require("in_features", in_size == width, f"{width}, as many as come before")
    fields.require_values(use_residual=False)
    activation = fields.text("activation_function", "Tanh").rpartition(".")[2]
    fields.require("activation_function", activation in ACTIVATIONS, f"one of {', '.join(ACTIVATIONS)}")
    return Dense(folder, in_size, out_size, fields.boolean("bias", True), activation)


def _token_ids(path: Path, words: Sequence[str]) -> tuple[int, ...]:
    if (path / "vocab.json").is_file():
        vocabulary = _json(path / "vocab.json").values
    else:
        vocabulary = JsonFields.from_file(path / "tokenizer.json").section("model").section("vocab").values
    ids = tuple(each for word in words if type(each := vocabulary.get(word)) is int)
    if len(ids) < len(words):
        raise ValueError(f"{path}: its tokenizer must have the tokens {' and '.join(map(repr, words))}, which judge")
    return ids


def _json(path: Path) -> JsonFields:
    """Return the fields of a JSON file; an empty JsonFields if the file does not exist."""
    return JsonFields.from_file(path) if path.is_file() else JsonFields(str(path), {})


def _list(path: Path) -> list[JsonFields]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged, it is not JSON: {error}") from error
    if not isinstance(values, list) or not all(isinstance(each, dict) for each in values):
        raise ValueError(f"{path} must hold a list of objects")
    return [JsonFields(str(path), each) for each in values]


def pooling_tensors(
    tensors: Mapping[str, torch.Tensor], own: Collection[str], config: ModelConfig
) -> dict[str, torch.Tensor]:
    """Return a pooling checkpoint's tensors, by the model's parameter names.

    The head's tensors are added as those of the pooler, and a decoder's tensors of other heads are left out. own: the
    model's parameter names. Raises ValueError if tensors of the head are missing.
    """
    assert config.pooling is not None
    if not config.causal:
        linears = () if config.pooling.own_head else config.pooling.head
        return {**tensors, **_of_linears([_of_head(dense, tensors, config) for dense in linears])}
    found = {own_name(name, own): tensor for name, tensor in tensors.items()}
    heads = [_of_head(dense, found, config) for dense in config.pooling.head]
    return {name: tensor for name, tensor in found.items() if name not in _OTHER_HEADS} | _of_linears(heads)


def _of_linears(heads: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the tensors of the head's linears, by their names in the model.

    heads: the tensors of each linear, as `_of_head` returns them.
    """
    named = ((f"{POOLER}.{number}.{name}", t) for number, head in enumerate(heads) for name, t in head.items())
    return dict(named)


def own_name(name: str, own: Collection[str]) -> str:
    """Return the name that a decoder's tensor has in the model.

    If the checkpoint holds only the decoder, its names lack the prefix `model`, which is added. A scale, which is no
    parameter of the model, gets the prefix if its weight does. own: the model's parameter names.
    """
    weight = f"{name.rpartition('.')[0]}.weight"
    is_stored_alone = any(f"model.{each}" in own and each not in own for each in (name, weight))
    return f"model.{name}" if is_stored_alone else name


def _of_head(dense: Dense, tensors: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the tensors of one linear of the head: "weight" and, if the linear has a bias, "bias".

    They are read from the linear's folder, taken from the checkpoint's `tensors`, or, for a linear that gives the
    logits of some tokens, taken from rows of the output projection. Raises ValueError if they are missing.
    """
    if dense.tokens:
        names = (*([] if config.tie_word_embeddings else [_OUTPUT]), *_embeddings(tensors))
        output_VD = next((tensors[name] for name in names if name in tensors), None)
        if output_VD is None:
            raise ValueError(f"{config.path} must hold {_OUTPUT}, whose rows judge; it is missing")
        return {"weight": output_VD[list(dense.tokens)]}
    folder = config.path / dense.source
    prefix, found = ("linear.", map_tensors(folder)) if folder.is_dir() else (f"{dense.source}.", tensors)
    names = ("weight", "bias") if dense.bias else ("weight",)
    if missing := [f"{prefix}{name}" for name in names if f"{prefix}{name}" not in found]:
        raise ValueError(f"{config.path} must hold the head of the model; missing: {', '.join(missing)}")
    return {name: found[f"{prefix}{name}"] for name in names}


def _embeddings(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name in tensors if name.endswith(_EMBEDDINGS)]

"""Checkpoints with an MTP layer: tiny random ones of each layout, one that is exact, and the layer in transformers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from families import TINY, Family, family, write_checkpoint
from packed_checkpoints import PACKINGS, pack_weight, write_linears, write_section
from quantised_checkpoints import LAYOUTS, write_quantised
from safetensors.torch import load_file, save_file
from torch import nn

Tensors = dict[str, torch.Tensor]
FILE = "model.safetensors"
_KEPT = re.compile(r"^lm_head$|\.visual\.|\.(in_proj_(a|b|ba)|shared_expert_gate)$")


@dataclass(frozen=True)
class MtpCase:
    """A family's checkpoint with an MTP layer, whose tensors have the names of published checkpoints."""

    family: Family
    names: tuple[str, str, str, str]  # norms of the embedding and the hidden state, projection, last norm
    prefix: str = f"model.layers.{TINY['num_hidden_layers']}."
    decoder_layer: str = ""
    hidden_first: bool = False
    # Changed fields of the configuration with a single layer that computes the same as the MTP layer.
    single: tuple[tuple[str, Any], ...] = ()
    architecture: str = ""  # of config.json, if it is not that of the family in transformers
    offset: float = 0.0  # what norms add to their weights
    text: str = ""  # model type of the text model of a multimodal family

    @property
    def shares_norm(self) -> bool:
        """Whether the last norm is the model's, and hidden states are those before it."""
        return not self.names[3]

    def stored(self, name: str) -> str:
        """Return the name in the checkpoint of a tensor of the layer."""
        if not self.shares_norm:
            return self.prefix + name
        module, _, rest = name.partition(".")
        return f"model.{module}.0.{rest}"


_DEEPSEEK = "enorm", "hnorm", "eh_proj"
MIMO = MtpCase(
    Family("qwen2"),
    ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    "model.mtp_layers.0.",
    hidden_first=True,
    architecture="MiMoForCausalLM",
)
GLM = MtpCase(family("glm4_moe"), (*_DEEPSEEK, "shared_head.norm"), single=(("first_k_dense_replace", 0),))
DEEPSEEK = replace(GLM, family=family("deepseek_v3"))
GLM_LITE = replace(GLM, family=family("glm4_moe_lite"), single=(("mlp_layer_types", ["sparse"]),))
HY = MtpCase(
    Family("hy_v3", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}),
    (*_DEEPSEEK, "final_layernorm"),
    single=(("mlp_layer_types", ["sparse"]),),
)


def _qwen(name: str, text: str = "") -> MtpCase:
    return MtpCase(
        family(name),
        ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        *("mtp.", "layers.0."),
        single=(("layer_types", ["full_attention"]),),
        offset=1.0,
        text=text,
    )


ERNIE = MtpCase(
    family("ernie4_5_moe"),
    ("mtp_emb_norm", "mtp_hidden_norm", "mtp_linear_proj", ""),
    *("", "mtp_block."),
)
_SLIDING = {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
MELLUM = MtpCase(
    Family("mellum", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, **_SLIDING}),
    ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    *("mtp.", "layers.0."),
    single=(("layer_types", ["sliding_attention"]),),
)
QWEN3 = replace(_qwen("qwen3"), offset=0.0)
QWEN_NEXT, QWEN_VISION = _qwen("qwen3_next"), _qwen("qwen3_5", "qwen3_5_text")


@dataclass(frozen=True)
class Written:
    """A checkpoint in a folder, with its model in transformers and a reference for its MTP layer."""

    folder: Path
    model: Any
    single: Any  # the family's model with a single layer, with the last norm of the MTP layer
    tensors: Tensors  # of the layer, by the names after its prefix
    case: MtpCase

    def layer(self, token_ids: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states [T, D] of positions from 0 on, from the next tokens and the model's states there."""
        embedding_norm, hidden_norm, projection, _ = self.case.names
        embedded = self.model.get_input_embeddings()(torch.tensor(token_ids))
        norms = [
            self._normed(x, self.tensors[f"{name}.weight"])
            for x, name in ((embedded, embedding_norm), (hidden, hidden_norm))
        ]
        both = torch.cat(norms[::-1] if self.case.hidden_first else norms, -1)
        projected = both @ self.tensors[f"{projection}.weight"].T
        return self._hidden(self.single, inputs_embeds=projected[None])

    @torch.no_grad()
    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        """Return the `count` most probable tokens after token_ids, whose last token the model has not computed."""
        hidden = self._hidden(self.model, input_ids=torch.tensor([token_ids[:-1]]))
        behind, found = token_ids[1:], list[int]()
        for _ in range(count):
            hidden = torch.cat((hidden, self.layer(behind, hidden)[len(behind) - 1 :]))
            last = self.single.get_decoder().norm(hidden[-1:]) if self.case.shares_norm else hidden[-1:]
            found.append(int(self.model.lm_head(last).argmax()))
            behind = [*behind, found[-1]]
        return found

    def _hidden(self, model: Any, **given: torch.Tensor) -> torch.Tensor:
        """Return the model's hidden states [T, D] that the layer reads: after the last norm, or before it."""
        before: list[torch.Tensor] = []
        decoder = model.get_decoder()
        hook = decoder.norm.register_forward_pre_hook(lambda module, arguments: before.append(arguments[0]))
        after = decoder(**given, use_cache=False).last_hidden_state
        hook.remove()
        return (before[0] if self.case.shares_norm else after)[0]

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        eps = self.single.config.rms_norm_eps
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * (self.case.offset + weight)


def write_mtp_checkpoint(folder: Path, case: MtpCase) -> Written:
    """Write a random checkpoint of the family with an MTP layer."""
    model = write_checkpoint(folder, case.family)
    changes = {"num_hidden_layers": 1, **dict(case.single)}
    name = case.text or case.family.name
    changes = {each: value for each, value in {**case.family.changes, **changes}.items() if each != "model_type"}
    alone = replace(case.family, name=name, changes=changes, others={})
    single = write_checkpoint(folder / "single", alone, seed=1)
    size, generator = single.config.hidden_size, torch.Generator().manual_seed(2)
    embedding_norm, hidden_norm, projection, norm = case.names
    stored = load_file(folder / "single" / FILE)
    tensors = decoder_layer(stored, case) | {
        f"{embedding_norm}.weight": torch.rand(size, generator=generator) + 0.5,
        f"{hidden_norm}.weight": torch.rand(size, generator=generator) + 0.5,
        f"{projection}.weight": torch.randn(size, 2 * size, generator=generator) * size**-0.5,
    }
    if case.shares_norm:
        single.get_decoder().norm = model.get_decoder().norm
    else:
        tensors[f"{norm}.weight"] = stored["model.norm.weight"]
    add_mtp_layer(folder, case, tensors)
    return Written(folder, model, single, tensors, case)


def decoder_layer(single: Tensors, case: MtpCase) -> Tensors:
    """Return the tensors of an MTP layer's decoder layer, by the names after its prefix.

    single: the tensors of the model with that layer alone.
    """
    prefix = "model.layers.0."
    return {
        case.decoder_layer + name.removeprefix(prefix): tensor
        for name, tensor in single.items()
        if name.startswith(prefix)
    }


def write_quantised_mtp(written: Written, folder: Path, form: str, *, layer: bool) -> Written:
    """Write the checkpoint with quantised linears, also those of the MTP layer if `layer`.

    form: a name of LAYOUTS or PACKINGS. Rules name the linears of the model alone that are not quantised.
    """
    model = _write_quantised(written.folder, folder, form, written.model, written.case)
    if not layer:
        return replace(written, folder=folder, model=model)
    single = _write_quantised(written.folder / "single", folder / "single", form, written.single, written.case)
    plain, coded = (decoder_layer(load_file(each / "single" / FILE), written.case) for each in (written.folder, folder))
    tensors, stored = load_file(folder / FILE), {written.case.stored(name) for name in plain}
    others = {name: tensor for name, tensor in tensors.items() if name not in stored}
    save_file(others, folder / FILE, metadata={"format": "pt"})
    add_mtp_layer(folder, written.case, coded)
    return replace(written, folder=folder, model=model, single=single)


def _write_quantised(source: Path, folder: Path, form: str, model: Any, case: MtpCase) -> Any:
    """Write a model's checkpoint in a format, and return the oracle: all but the head, the tower, a projection of
    queries, linears of very few rows, and MTP layers."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    kept = [name for name in linears if _KEPT.search(name)]
    kept.append(next(name for name in linears if re.search(r"\.self_attn\.q(_a)?_proj$", name)))
    if form not in PACKINGS:
        return write_quantised(source, folder, LAYOUTS[form], kept, round_inputs=False, kind=type(model))
    packing = PACKINGS[form]
    pack, ignore = partial(pack_weight, packing=packing), [*kept, f"{case.prefix}*"]
    oracle = write_linears(source, folder, pack, ignore, kind=type(model))
    write_section(folder, packing.config(kept))
    return oracle


def add_mtp_layer(folder: Path, case: MtpCase, tensors: Tensors) -> None:
    """Write an MTP layer, by the names after its prefix, into a checkpoint."""
    whole = load_file(folder / FILE) | {case.stored(name): tensor.clone() for name, tensor in tensors.items()}
    save_file(whole, folder / FILE, metadata={"format": "pt"})
    if case.architecture:
        config = json.loads((folder / "config.json").read_text())
        config |= {"architectures": [case.architecture], "model_type": "mimo", "num_nextn_predict_layers": 1}
        (folder / "config.json").write_text(json.dumps(config))


def make_exact(written: Written) -> None:
    """Let a token's logits in the model depend on the token before it alone, and let the MTP layer draft the same."""
    file = written.folder / FILE
    tensors, (embedding_norm, _, projection, norm) = load_file(file), written.case.names
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor.zero_()
    size, stored = written.single.config.hidden_size, written.case.stored
    halves = [torch.eye(size), torch.zeros(size, size)]
    tensors[stored(f"{projection}.weight")] = torch.cat(halves[::-1] if written.case.hidden_first else halves, -1)
    tensors[stored(f"{embedding_norm}.weight")] = torch.full((size,), 1 - written.case.offset)
    last_norm = next(tensor for name, tensor in tensors.items() if re.fullmatch(r"model\.(\w+\.)?norm\.weight", name))
    if not written.case.shares_norm:
        tensors[stored(f"{norm}.weight")] = last_norm.clone()
    save_file(tensors, file, metadata={"format": "pt"})

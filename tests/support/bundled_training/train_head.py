"""Train an EAGLE-3 head of the bundled model: `PYTHONPATH=tests/support python -m bundled_training.train_head`.

The model is frozen and reads windows of the text that it was trained on. The head reads its hidden states, and learns
its distribution of the token behind the next one. As in EAGLE-3 ("training-time test"), it then takes further steps on
its own hidden states, so that it learns from what it will see. A run that was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from bundled_training.corpus import read_corpus
from bundled_training.held_out import cut_windows
from bundled_training.recipe import Recipe, learning_rate, make_optimizer, random_windows, say
from bundled_training.train import choose_device, machine_name, token_stream
from compiled_engine import LLM, SamplingParams
from compiled_engine.config import HeadConfig, ModelConfig
from compiled_engine.models.bundled import BUNDLED_MODEL_PATH
from compiled_engine.models.checkpoint.config_reader import read_model_config
from compiled_engine.models.textbook.eagle3 import EAGLE3, Eagle3Attention, Eagle3Head
from compiled_engine.models.textbook.layers import rotate

LAYERS = (1, 3, 5)
STATE, REPORT_SECONDS, SAVE_SECONDS = "training_state.pt", 5.0, 30.0
# Prompts of held-out text, and tokens generated for each, of which the acceptance is measured.
HELD_OUT_PROMPTS, PROMPT_CHARACTERS, GENERATED, MEASURED_DRAFTS = 24, 400, 64, 4
# Drafts a step, prompts, and the engine's mode, of which the speed is measured.
SPEED_DRAFTS, SPEED_PROMPTS, SPEED_MODE = 3, 6, "auto"


@dataclass(frozen=True)
class HeadRecipe:
    """Everything that determines the head besides model, corpus and machine; `metadata["help"]` describes each."""

    steps: int = field(default=6000, metadata={"help": "training steps"})
    batch_tokens: int = field(default=16_384, metadata={"help": "tokens a step"})
    window: int = field(default=512, metadata={"help": "length of the training windows"})
    test_steps: int = field(default=4, metadata={"help": "steps of the head in each training step, the first included"})
    decay: float = field(default=0.8, metadata={"help": "factor of the loss from each of these to the next"})
    learning_rate: float = field(default=1e-3, metadata={"help": "peak; ends at zero"})
    draft_vocab: int = field(default=2048, metadata={"help": "most frequent tokens of the corpus that the head knows"})
    intermediate_size: int = field(default=384, metadata={"help": "rows of the head's MLP"})
    seed: int = field(default=0, metadata={"help": "of initial weights and windows"})

    def __post_init__(self) -> None:
        """Raise ValueError for the first field that is out of range."""
        for name in ("steps", "test_steps", "draft_vocab", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.test_steps + 2 <= self.window <= self.batch_tokens:
            raise ValueError(f"window must be from test_steps + 2 to batch_tokens, got {self.window}")


def head_shape(recipe: HeadRecipe) -> ModelConfig:
    """The head's configuration: the model's with one layer, and fewer rows of MLP and logits."""
    model, _ = read_model_config(
        BUNDLED_MODEL_PATH, dtype="float32", max_model_len=None, load_format="auto", seed=0, device_type="cpu"
    )
    head = HeadConfig(target_size=model.hidden_size, num_aux_layers=len(LAYERS), vocab_size=recipe.draft_vocab)
    return replace(
        model,
        architecture=EAGLE3,
        num_layers=1,
        sliding_windows=(None,),
        intermediate_size=recipe.intermediate_size,
        tie_word_embeddings=False,
        head=head,
    )


def new_head(shape: ModelConfig, target: PreTrainedModel, known_V: Tensor, seed: int) -> Eagle3Head:
    """A head in fp32 on the CPU: the model's embedding and rows of its output projection, and random weights.

    known_V: the model's token for each token of the draft vocabulary.
    """
    assert shape.head is not None
    head, generator = Eagle3Head(shape, shape.head), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(0.0, 0.02, generator=generator) if parameter.ndim > 1 else parameter.fill_(1.0)
        head.embed_tokens.weight.copy_(target.get_input_embeddings().weight)  # type: ignore[arg-type]
        head.lm_head.weight.copy_(target.get_output_embeddings().weight[known_V])  # type: ignore[index]
    head.embed_tokens.requires_grad_(False)
    return head


class TrainingPasses:
    """The steps of a head on whole windows. Step k computes what pass k of a draft computes: of it the entries of
    keys and values before its chain come of the model's hidden states, and the last k of the steps before."""

    def __init__(self, head: Eagle3Head, ids_BT: Tensor, features_BTD: Tensor) -> None:
        """ids_BT: the token behind each position. features_BTD: of the model's hidden states."""
        self._head, self._features = head, features_BTD
        self._layer: Any = head.layers[0]
        self._embedded = self._layer.input_layernorm(head.embed_tokens(ids_BT))
        positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        cos_T1d, sin_T1d = head.rotary_emb(positions_T)
        self._rotation = cos_T1d.transpose(0, 1), sin_T1d.transpose(0, 1)
        self._positions = positions_T
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def step(self) -> Tensor:
        """The logits [B, T, Vd] of the next step; the first `number of the step` positions mean nothing."""
        layer = self._layer
        normalised = layer.hidden_norm(self._features)
        x = self._features + self._attended(layer.self_attn, torch.cat((self._embedded, normalised), -1))
        hidden = x + layer.mlp(layer.post_attention_layernorm(x))
        self._features = _later(hidden, 1, dim=1)
        return self._head.logits(hidden)

    def _attended(self, attention: Eagle3Attention, both: Tensor) -> Tensor:
        q, k, v = (
            project(both).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = rotate(q, *self._rotation), rotate(k, *self._rotation)
        repeats = q.shape[1] // k.shape[1]
        self._keys.append(k.repeat_interleave(repeats, 1))
        self._values.append(v.repeat_interleave(repeats, 1))
        number = len(self._keys) - 1
        scores = q @ self._keys[0].transpose(-1, -2)
        seen = self._positions[:, None] - number >= self._positions
        scores = scores.masked_fill(~seen, -torch.inf)
        chain = [_later(key, number - j, dim=2) for j, key in enumerate(self._keys) if j]
        own = [(q * key).sum(-1, keepdim=True) for key in chain]
        # A position before the chain has nothing to see but itself.
        shares = (torch.cat([scores, *own], -1).float() * attention.scale).softmax(-1).nan_to_num(0.0).to(q.dtype)
        length = q.shape[2]
        out = shares[..., :length] @ self._values[0]
        for index, value in enumerate(self._values[1:]):
            out = out + shares[..., length + index, None] * _later(value, number - 1 - index, dim=2)
        return attention.o_proj(out.transpose(1, 2).flatten(2))


def _later(values: Tensor, count: int, dim: int) -> Tensor:
    """The values of `count` positions before, zeros in front."""
    if not count:
        return values
    kept = values.narrow(dim, 0, values.shape[dim] - count)
    return torch.cat((torch.zeros_like(values.narrow(dim, 0, count)), kept), dim)


def losses(
    head: Eagle3Head, target: PreTrainedModel, ids_BT: Tensor, known_V: Tensor, test_steps: int
) -> tuple[list[Tensor], list[Tensor]]:
    """The cross-entropy of each step against the model's distribution, and the share of its best tokens that are the
    model's, if those of all steps before were."""
    with torch.no_grad():
        output = target(input_ids=ids_BT[:, :-1], output_hidden_states=True, use_cache=False)
        aux_hidden_states = torch.cat([output.hidden_states[layer] for layer in LAYERS], -1)[:, :-1]
        wanted = output.logits[:, 1:].float()  # behind the token that is the head's input
        best, shares = wanted.argmax(-1), wanted.softmax(-1)[..., known_V]
    passes = TrainingPasses(head, ids_BT[:, 1:-1], head.combine(aux_hidden_states))
    found: list[Tensor] = []
    agreed: list[Tensor] = []
    agrees: Tensor | None = None
    for number in range(test_steps):
        logits = passes.step().float()
        found.append(-(shares * logits.log_softmax(-1))[:, number:].sum(-1).mean())
        right = known_V[logits.argmax(-1)] == best
        agrees = right if agrees is None else right & _later(agrees, 1, dim=1)
        agreed.append(agrees[:, number:].float().mean())
    return found, agreed


def train(out: Path, recipe: HeadRecipe, device: torch.device, corpus_folder: Path) -> None:
    """Train, write the head to `out`, and measure it; goes on with the state that an interrupted run left there."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(BUNDLED_MODEL_PATH / "tokenizer.json"))
    corpus = read_corpus(corpus_folder, corpus_folder.name)
    train_ids, validation = token_stream(tokenizer, corpus.train), token_stream(tokenizer, corpus.validation)
    counts = Counter(train_ids)
    known_V = torch.tensor(sorted(token for token, _ in counts.most_common(recipe.draft_vocab)), device=device)
    recipe = replace(recipe, draft_vocab=len(known_V))
    shape = head_shape(recipe)
    target = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL_PATH, dtype=torch.float32).eval().requires_grad_(False)
    head = new_head(shape, target, known_V.cpu(), recipe.seed).to(device)
    target.to(device)
    schedule = Recipe(learning_rate=recipe.learning_rate)
    trained = nn.ModuleList([head.fc, head.layers, head.norm, head.lm_head])
    optimizer = make_optimizer(trained, schedule, fused=device.type == "cuda")
    windows = torch.Generator(device).manual_seed(recipe.seed)
    step, seconds = 0, 0.0
    if (out / STATE).exists():
        state = torch.load(out / STATE, map_location="cpu", weights_only=True)
        head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
        windows.set_state(state["windows"])
        step, seconds = state["step"], state["seconds"]
        say(f"goes on after step {step}")
    tokens_N = torch.tensor(train_ids, device=device)
    last_report = last_save = start = time.monotonic()
    while step < recipe.steps:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(schedule, step / recipe.steps)
        ids_BT = random_windows(tokens_N, recipe.batch_tokens // recipe.window, recipe.window + 1, windows)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            of_steps, agreed = losses(head, target, ids_BT, known_V, recipe.test_steps)
        loss = torch.stack([each * recipe.decay**number for number, each in enumerate(of_steps)]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(trained.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        now = time.monotonic()
        if now - last_report >= REPORT_SECONDS or step == recipe.steps:
            shares = " ".join(f"{share.item():.3f}" for share in agreed)
            say(f"step {step:6}  loss {loss.item():.4f}  agreement {shares}  {seconds + now - start:.0f} s")
            last_report = now
        if now - last_save >= SAVE_SECONDS:
            state = {"head": head.state_dict(), "optimizer": optimizer.state_dict(), "windows": windows.get_state()}
            torch.save(state | {"step": step, "seconds": seconds + now - start}, out / STATE)
            last_save = now
    seconds += time.monotonic() - start
    agreement = agreement_on(head, target, cut_windows(validation), known_V, recipe.test_steps)
    save_head(out, head, shape, known_V)
    record = {
        "validation_agreement": agreement,
        "acceptance": {str(temperature): acceptance(out, temperature) for temperature in (0.0, 0.8)},
        "cpu_tokens_per_second": cpu_speed(out),
        "recipe": asdict(recipe),
        "layers": list(LAYERS),
        "known_share": sum(counts[token] for token in known_V.tolist()) / len(train_ids),
        "seconds": seconds,
        "machine": machine_name(device),
    }
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (out / STATE).unlink(missing_ok=True)
    say(json.dumps(record["acceptance"], indent=2))


@torch.no_grad()
def agreement_on(
    head: Eagle3Head, target: PreTrainedModel, windows: Sequence[list[int]], known_V: Tensor, test_steps: int
) -> list[float]:
    """Return for each step the share of positions at which its best token, and those of all earlier steps, are the
    model's."""
    whole = [window for window in windows if len(window) == len(windows[0])][:64]
    ids_BT = torch.tensor(whole, device=known_V.device)
    shares = [losses(head, target, part, known_V, test_steps)[1] for part in ids_BT.split(8)]
    return [float(torch.stack(step).mean()) for step in zip(*shares, strict=True)]


def save_head(out: Path, head: Eagle3Head, shape: ModelConfig, known_V: Tensor) -> None:
    """Write the head in the original's spelling, in bf16, without the embedding, which is the model's."""
    tensors = {
        name.replace("layers.0.", "midlayer."): parameter.detach().cpu().bfloat16().contiguous()
        for name, parameter in head.named_parameters()
        if not name.startswith("embed_tokens.")
    }
    distances = known_V.cpu() - torch.arange(len(known_V))
    save_file(tensors | {"d2t": distances}, out / "model.safetensors", metadata={"format": "pt"})
    fields_of_shape = {
        "architectures": [EAGLE3],
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": len(known_V),
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope.theta,
        "hidden_act": "silu",
        "eagle_aux_hidden_state_layer_ids": list(LAYERS),
        "torch_dtype": "bfloat16",
    }
    (out / "config.json").write_text(json.dumps(fields_of_shape, indent=2) + "\n", encoding="utf-8")


def held_out_prompts() -> list[str]:
    """Return prompts of text that neither the model nor the head was trained on."""
    text = (BUNDLED_MODEL_PATH / "held_out.txt").read_bytes().decode()
    distance = (len(text) - PROMPT_CHARACTERS) // HELD_OUT_PROMPTS
    return [text[distance * i : distance * i + PROMPT_CHARACTERS] for i in range(HELD_OUT_PROMPTS)]


def cpu_speed(head: Path) -> dict[str, float]:
    """Tokens a second of one request at a time on this CPU, behind held-out text, without and with drafts of the head.
    `compiled-engine demo` uses the head if it is no slower."""
    drafts = {"method": "eagle3", "model": str(head), "num_speculative_tokens": SPEED_DRAFTS}
    prompts, params = held_out_prompts()[:SPEED_PROMPTS], SamplingParams(max_tokens=GENERATED, ignore_eos=True, seed=0)
    found = {}
    for name, config in (("without", None), ("with", drafts)):
        with LLM(device="cpu", mode=SPEED_MODE, max_model_len=512, progress=False, speculative_config=config) as llm:
            llm.generate(prompts[0], params, use_tqdm=False)
            llm.reset_prefix_cache()
            start = time.perf_counter()
            for prompt in prompts:
                llm.generate(prompt, params, use_tqdm=False)
            found[name] = len(prompts) * GENERATED / (time.perf_counter() - start)
    return found


def acceptance(head: Path, temperature: float) -> dict[str, Any]:
    """Measure the engine's acceptance of the head's drafts after prompts of held-out text: mean tokens a step, and for
    each position the share of steps in which the drafts up to there were right."""
    prompts = held_out_prompts()
    shared = SamplingParams(temperature=temperature, max_tokens=GENERATED, ignore_eos=True)
    params = [shared.clone() for _ in prompts]
    for seed, each in enumerate(params):
        each.seed = seed
    drafts = {"method": "eagle3", "model": str(head), "num_speculative_tokens": MEASURED_DRAFTS}
    with LLM(device="cpu", mode="eager", max_model_len=512, progress=False, speculative_config=drafts) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        metrics = llm.metrics()
    steps, by_position = metrics["drafted_requests"], metrics["accepted_by_position"]
    shares = [by_position.get(str(position), 0) / steps for position in range(MEASURED_DRAFTS)]
    length = 1 + metrics["accepted_tokens"] / steps
    return {"length": length, "by_position": shares, "sharpness": metrics["draft_sharpness"]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a wrong option or an unusable corpus ends it with status 2 and the reason."""
    parser = argparse.ArgumentParser(
        prog="python -m bundled_training.train_head",
        description="Train an EAGLE-3 head for the bundled model and write its folder.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the head, and of an interrupted run's state")
    stdlib = Path(sysconfig.get_path("stdlib"))
    parser.add_argument("--corpus", type=Path, default=stdlib, help="folder with Python source, read at any depth")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train")
    for option in fields(HeadRecipe):
        name = "--" + option.name.replace("_", "-")
        parser.add_argument(name, type=type(option.default), default=option.default, help=option.metadata["help"])
    args = parser.parse_args(arguments)
    try:
        recipe = HeadRecipe(**{option.name: getattr(args, option.name) for option in fields(HeadRecipe)})
        train(args.out, recipe, choose_device(args.device), args.corpus)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()

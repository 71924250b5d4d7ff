"""Train an EAGLE-3 head or an MTP layer of the bundled model: `PYTHONPATH=tests/support python -m
bundled_training.train_head`.

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
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from bundled_training.corpus import read_corpus
from bundled_training.head_methods import METHODS, HeadRecipe, TrainedHead, engine_options
from bundled_training.held_out import cut_windows
from bundled_training.recipe import Recipe, learning_rate, make_optimizer, random_windows, say
from bundled_training.train import choose_device, machine_name, token_stream
from compiled_engine import LLM, SamplingParams
from compiled_engine.models.bundled import BUNDLED_MODEL_PATH
from compiled_engine.models.textbook.layers import rotate
from compiled_engine.models.textbook.llama import Attention

STATE, REPORT_SECONDS, SAVE_SECONDS = "training_state.pt", 5.0, 30.0
# Prompts of held-out text, and tokens generated for each, of which the acceptance is measured.
HELD_OUT_PROMPTS, PROMPT_CHARACTERS, GENERATED, MEASURED_DRAFTS = 24, 400, 64, 4
# Drafts a step, prompts, and the engine's mode, of which the speed is measured.
SPEED_DRAFTS, SPEED_PROMPTS, SPEED_MODE = 3, 6, "auto"


class TrainingPasses:
    """The steps of a head on whole windows. Step k computes what pass k of a draft computes: of it the entries of
    keys and values before its chain come of the model's hidden states, and the last k of the steps before."""

    def __init__(self, head: TrainedHead, ids_BT: Tensor, features_BTD: Tensor) -> None:
        """ids_BT: the token behind each position. features_BTD: of the model's hidden states."""
        self._head, self._features = head, features_BTD
        self._embedded = head.embed(ids_BT)
        positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        cos_T1d, sin_T1d = head.angles(positions_T)
        self._rotation = cos_T1d.transpose(0, 1), sin_T1d.transpose(0, 1)
        self._positions = positions_T
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def step(self) -> Tensor:
        """The logits [B, T, V] of the next step; the first `number of the step` positions mean nothing."""
        hidden = self._head.run(self._embedded, self._features, self._attended)
        self._features = _later(hidden, 1, dim=1)
        return self._head.logits(hidden)

    def _attended(self, attention: Attention, inputs: Tensor) -> Tensor:
        q, k, v = (
            project(inputs).unflatten(-1, (-1, attention.head_dim))
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = attention.normalise_heads(q, k)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
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
        attended: Tensor = attention.o_proj(out.transpose(1, 2).flatten(2))
        return attended


def _later(values: Tensor, count: int, dim: int) -> Tensor:
    """The values of `count` positions before, zeros in front."""
    if not count:
        return values
    kept = values.narrow(dim, 0, values.shape[dim] - count)
    return torch.cat((torch.zeros_like(values.narrow(dim, 0, count)), kept), dim)


def losses(
    head: TrainedHead, target: PreTrainedModel, ids_BT: Tensor, test_steps: int
) -> tuple[list[Tensor], list[Tensor]]:
    """The cross-entropy of each step against the model's distribution, and the share of its best tokens that are the
    model's, if those of all steps before were."""
    with torch.no_grad():
        output = target(input_ids=ids_BT[:, :-1], output_hidden_states=True, use_cache=False)
        hidden_states = tuple(each[:, :-1] for each in output.hidden_states)
        wanted = output.logits[:, 1:].float()  # behind the token that is the head's input
        best, shares = wanted.argmax(-1), wanted.softmax(-1)[..., head.known_V]
    passes = TrainingPasses(head, ids_BT[:, 1:-1], head.features(hidden_states))
    found: list[Tensor] = []
    agreed: list[Tensor] = []
    agrees: Tensor | None = None
    for number in range(test_steps):
        logits = passes.step().float()
        found.append(-(shares * logits.log_softmax(-1))[:, number:].sum(-1).mean())
        right = head.known_V[logits.argmax(-1)] == best
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
    known_V = torch.tensor(sorted(token for token, _ in counts.most_common(recipe.draft_vocab)))
    target = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL_PATH, dtype=torch.float32).eval().requires_grad_(False)
    head: TrainedHead = METHODS[recipe.method](recipe, target, known_V)
    recipe = replace(recipe, draft_vocab=len(head.known_V))
    head.model.to(device)
    head.known_V = head.known_V.to(device)
    target.to(device)
    schedule = Recipe(learning_rate=recipe.learning_rate)
    optimizer = make_optimizer(head.trained, schedule, fused=device.type == "cuda")
    windows = torch.Generator(device).manual_seed(recipe.seed)
    step, seconds = 0, 0.0
    if (out / STATE).exists():
        state = torch.load(out / STATE, map_location="cpu", weights_only=True)
        head.model.load_state_dict(state["head"])
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
        with torch.autocast(device.type, torch.bfloat16):
            of_steps, agreed = losses(head, target, ids_BT, recipe.test_steps)
        loss = torch.stack([each * recipe.decay**number for number, each in enumerate(of_steps)]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(head.trained.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        now = time.monotonic()
        if now - last_report >= REPORT_SECONDS or step == recipe.steps:
            shares = " ".join(f"{share.item():.3f}" for share in agreed)
            say(f"step {step:6}  loss {loss.item():.4f}  agreement {shares}  {seconds + now - start:.0f} s")
            last_report = now
        if now - last_save >= SAVE_SECONDS:
            state = {
                "head": head.model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "windows": windows.get_state(),
            }
            torch.save(state | {"step": step, "seconds": seconds + now - start}, out / STATE)
            last_save = now
    seconds += time.monotonic() - start
    agreement = agreement_on(head, target, cut_windows(validation), recipe.test_steps)
    head.save(out)
    record = {
        "validation_agreement": agreement,
        "acceptance": {str(temperature): acceptance(recipe.method, out, temperature) for temperature in (0.0, 0.8)},
        "cpu_tokens_per_second": cpu_speed(recipe.method, out),
        "recipe": asdict(recipe),
        "parameters": sum(each.numel() for each in head.trained.parameters()),
        "known_share": sum(counts[token] for token in head.known_V.tolist()) / len(train_ids),
        "seconds": seconds,
        "machine": machine_name(device),
    }
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (out / STATE).unlink(missing_ok=True)
    say(json.dumps(record["acceptance"], indent=2))


@torch.no_grad()
def agreement_on(
    head: TrainedHead, target: PreTrainedModel, windows: Sequence[list[int]], test_steps: int
) -> list[float]:
    """Return for each step the share of positions at which its best token, and those of all earlier steps, are the
    model's."""
    whole = [window for window in windows if len(window) == len(windows[0])][:64]
    ids_BT = torch.tensor(whole, device=head.known_V.device)
    shares = [losses(head, target, part, test_steps)[1] for part in ids_BT.split(8)]
    return [float(torch.stack(step).mean()) for step in zip(*shares, strict=True)]


def held_out_prompts() -> list[str]:
    """Return prompts of text that neither the model nor the head was trained on."""
    text = (BUNDLED_MODEL_PATH / "held_out.txt").read_bytes().decode()
    distance = (len(text) - PROMPT_CHARACTERS) // HELD_OUT_PROMPTS
    return [text[distance * i : distance * i + PROMPT_CHARACTERS] for i in range(HELD_OUT_PROMPTS)]


def cpu_speed(method: str, head: Path) -> dict[str, float]:
    """Tokens a second of one request at a time on this CPU, behind held-out text, without and with drafts of the head.
    `compiled-engine demo` uses the head if it is no slower."""
    prompts, params = held_out_prompts()[:SPEED_PROMPTS], SamplingParams(max_tokens=GENERATED, ignore_eos=True, seed=0)
    found = {}
    for name, options in (("without", {}), ("with", engine_options(method, head, SPEED_DRAFTS))):
        with LLM(device="cpu", mode=SPEED_MODE, max_model_len=512, progress=False, **options) as llm:
            llm.generate(prompts[0], params, use_tqdm=False)
            llm.reset_prefix_cache()
            start = time.perf_counter()
            for prompt in prompts:
                llm.generate(prompt, params, use_tqdm=False)
            found[name] = len(prompts) * GENERATED / (time.perf_counter() - start)
    return found


def acceptance(method: str, head: Path, temperature: float) -> dict[str, Any]:
    """Measure the engine's acceptance of the head's drafts after prompts of held-out text: mean tokens a step, and for
    each position the share of steps in which the drafts up to there were right."""
    prompts = held_out_prompts()
    shared = SamplingParams(temperature=temperature, max_tokens=GENERATED, ignore_eos=True)
    params = [shared.clone() for _ in prompts]
    for seed, each in enumerate(params):
        each.seed = seed
    options = engine_options(method, head, MEASURED_DRAFTS)
    with LLM(device="cpu", mode="eager", max_model_len=512, progress=False, **options) as llm:
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
        description="Train an EAGLE-3 head or an MTP layer for the bundled model and write its folder.",
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

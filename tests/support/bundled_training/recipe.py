"""Training of the bundled model: its shape, the recipe, and the training loop."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

from bundled_training.held_out import mean_nats_per_token
from bundled_training.tokenizer import END_OF_TEXT_ID, VOCAB_SIZE

MAX_POSITIONS = 2048
REPORT_SECONDS = 5.0


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the result besides corpus and machine; `metadata["help"]` describes each field.

    The window lengths alternate so that short contexts are frequent and every position is trained.
    """

    minutes: float = field(default=6.0, metadata={"help": "wall-clock limit of the whole run"})
    steps: int = field(default=15_000, metadata={"help": "most training steps, whatever the time"})
    batch_tokens: int = field(default=16_384, metadata={"help": "tokens a step"})
    windows: tuple[int, ...] = field(
        default=(512, 1024, 2048),
        metadata={"help": "lengths of the training windows, a step has one, they take turns"},
    )
    learning_rate: float = field(default=3e-3, metadata={"help": "peak, reached after the warm-up; ends at zero"})
    warmup: float = field(default=0.03, metadata={"help": "share of the run over which the learning rate rises"})
    weight_decay: float = field(default=0.1, metadata={"help": "of matrices; norm weights have none"})
    dropout: float = field(default=0.1, metadata={"help": "of the embedding and of each block's output"})
    evaluations: int = field(default=20, metadata={"help": "validations in a run; the best weights are kept"})
    validation_windows: int = field(default=128, metadata={"help": "most windows of 512 tokens to validate with"})
    seed: int = field(default=0, metadata={"help": "of initial weights, windows, dropout and samples"})

    def __post_init__(self) -> None:
        """Raise ValueError for the first field that is out of range."""
        for name in ("minutes", "learning_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be greater than 0, got {getattr(self, name)}")
        for name in ("steps", "evaluations", "validation_windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("warmup", "dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must be at least 0, got {self.weight_decay}")
        if not self.windows or min(self.windows) < 2 or max(self.windows) > MAX_POSITIONS:
            raise ValueError(f"windows must be lengths from 2 to {MAX_POSITIONS}, got {self.windows}")
        if self.batch_tokens < max(self.windows):
            raise ValueError(f"batch_tokens must be at least the longest window, got {self.batch_tokens}")


@dataclass(frozen=True)
class TrainingResult:
    """The result of a run; `curve` has one entry per evaluation, the kept weights are those of `best_step`."""

    steps: int
    tokens: int
    seconds: float
    best_step: int
    validation_loss: float
    curve: list[dict[str, float]]


def model_config() -> Qwen3Config:
    """5.2 million parameters, of which 1.0 million are the tied embedding."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=END_OF_TEXT_ID,
    )


def add_dropout(model: Qwen3ForCausalLM, probability: float) -> None:
    """Drop values of the embedding and of everything added to the residual stream, in training mode only."""

    def drop(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return F.dropout(output, probability, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)


def learning_rate(recipe: Recipe, progress: float) -> float:
    """Linear warm-up, then a cosine to zero; `progress` is the finished share of the run."""
    if progress < recipe.warmup:
        return recipe.learning_rate * max(progress / recipe.warmup, 1e-2)
    share = (progress - recipe.warmup) / (1 - recipe.warmup)
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


def make_optimizer(model: nn.Module, recipe: Recipe, *, fused: bool) -> torch.optim.AdamW:
    """AdamW that decays matrices, the embedding among them, and leaves norm weights alone."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": recipe.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        fused=fused,
    )


def train(
    model: Qwen3ForCausalLM,
    tokens_N: Tensor,
    validation: list[list[int]],
    recipe: Recipe,
    *,
    seconds: float,
    compile_model: bool = False,
) -> TrainingResult:
    """Train `model` in place and leave the weights of the best evaluation in it.

    Args:
        model: fp32 weights, on the device to train on; bf16 autocast is used on CUDA.
        tokens_N: the token stream, int64, on the same device.
        validation: windows whose loss picks the best weights.
        recipe: its schedule follows the steps or `seconds`, whichever is further along.
        seconds: wall-clock limit; at least one step is made.
        compile_model: run the training steps through torch.compile.

    Raises:
        RuntimeError: no evaluation had a finite loss.
    """
    device = tokens_N.device
    on_cuda = device.type == "cuda"
    optimizer = make_optimizer(model, recipe, fused=on_cuda)
    offsets = torch.Generator(device).manual_seed(recipe.seed)
    training_forward = torch.compile(model, dynamic=False) if compile_model else model

    def autocast() -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16, enabled=on_cuda)

    def training_loss(ids_BT: Tensor) -> Tensor:
        with autocast():
            logits_BTV = training_forward(input_ids=ids_BT[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), ids_BT[:, 1:].flatten())

    def validation_loss() -> float:
        model.eval()
        with autocast():
            loss = mean_nats_per_token(
                lambda ids_BT: model(input_ids=ids_BT, use_cache=False).logits, validation, device=device
            )
        model.train()
        return loss

    best_loss, best_step, best_weights = math.inf, 0, {}
    curve: list[dict[str, float]] = []
    step = tokens = reported_step = 0
    progress, next_evaluation = 0.0, 1 / recipe.evaluations
    loss_sum = torch.zeros((), device=device)  # read when it is reported only, so as not to wait for the GPU
    start = last_report = time.monotonic()
    model.train()
    while progress < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, progress)
        window = recipe.windows[step % len(recipe.windows)]
        ids_BT = random_windows(tokens_N, recipe.batch_tokens // window, window + 1, offsets)
        loss = training_loss(ids_BT)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        step += 1
        tokens += ids_BT.shape[0] * window
        loss_sum += loss.detach()
        now = time.monotonic()
        progress = max(step / recipe.steps, (now - start) / seconds)
        due = progress >= min(next_evaluation, 1.0)
        if not due and now - last_report < REPORT_SECONDS:
            continue
        mean_loss = loss_sum.item() / (step - reported_step)
        line = f"step {step:6}  {min(progress, 1):4.0%}  loss {mean_loss:.4f}"
        if due:
            next_evaluation = (math.floor(progress * recipe.evaluations) + 1) / recipe.evaluations
            validated = validation_loss()
            curve.append({"step": step, "train_loss": mean_loss, "validation_loss": validated})
            line += f"  validation {validated:.4f}"
            if validated < best_loss:
                best_loss, best_step = validated, step
                best_weights = {name: value.clone() for name, value in model.state_dict().items()}
        elapsed = time.monotonic() - start
        say(f"{line}  {tokens / elapsed:,.0f} tokens/s  {elapsed:.0f} s of at most {seconds:.0f} s")
        loss_sum.zero_()
        reported_step, last_report = step, time.monotonic()
    if not best_weights:
        raise RuntimeError(f"training diverged: no finite validation loss in {step} steps")
    model.load_state_dict(best_weights)
    return TrainingResult(step, tokens, time.monotonic() - start, best_step, best_loss, curve)


def random_windows(tokens_N: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """`count` windows of `length` tokens from uniformly random offsets, on the stream's device."""
    starts_B = torch.randint(len(tokens_N) - length + 1, (count,), generator=generator, device=tokens_N.device)
    return tokens_N[starts_B[:, None] + torch.arange(length, device=tokens_N.device)]


def say(line: str) -> None:
    """Print a line of progress to stderr."""
    print(line, file=sys.stderr, flush=True)

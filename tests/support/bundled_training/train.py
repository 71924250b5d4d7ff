"""Train the bundled model on a Python standard library: `PYTHONPATH=tests/support python -m bundled_training.train`.

Files are split by name, a tokenizer is learned, a small Qwen3 model is trained on random windows of the token
stream until steps or minutes are used up, and a complete model folder is written. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3ForCausalLM

from bundled_training.corpus import END_OF_TEXT, Corpus, Document, join, read_corpus
from bundled_training.folder import TrainingRecord, write_licence, write_record
from bundled_training.held_out import (
    HELD_OUT_DEFINITION,
    cut_windows,
    held_out_windows,
    mean_nats_per_token,
    scored_tokens,
)
from bundled_training.recipe import (
    MAX_POSITIONS,
    Recipe,
    TrainingResult,
    add_dropout,
    model_config,
    say,
    train,
)
from bundled_training.tokenizer import END_OF_TEXT_ID, save_tokenizer, train_tokenizer

SAMPLE_PROMPTS = ("def __init__(self,", "import os\n", "class Test", "for i in range(")
SAMPLE_TOKENS = 96
# Part of the limit reserved for loading, measuring and sampling after the last step: a share, and at most this many
# seconds.
FINISHING_SECONDS = 30.0
FINISHING_SHARE = 0.15


def build(out: Path, corpus: Corpus, recipe: Recipe, device: torch.device, *, compile_model: bool) -> TrainingRecord:
    """Train, write tokenizer, weights, configurations and held-out text to `out`, and measure the result.

    Raises:
        ValueError: the training text is shorter than a window of the recipe.
    """
    start = time.monotonic()
    tokenizer = build_tokenizer(out, corpus)
    train_ids = token_stream(tokenizer, corpus.train)
    validation = cut_windows(token_stream(tokenizer, corpus.validation))
    validation = validation[:: math.ceil(len(validation) / recipe.validation_windows)]
    if len(train_ids) <= max(recipe.windows):
        raise ValueError(
            f"windows must be shorter than the training text ({len(train_ids)} tokens), got {recipe.windows}"
        )
    say(f"{len(train_ids):,} tokens to train on, {scored_tokens(validation):,} to validate with, on {device}")

    torch.manual_seed(recipe.seed)
    model = Qwen3ForCausalLM(model_config())
    model.to(device)  # type: ignore[arg-type]  # transformers hides the signature
    add_dropout(model, recipe.dropout)
    limit = recipe.minutes * 60
    seconds = limit - min(FINISHING_SECONDS, FINISHING_SHARE * limit) - (time.monotonic() - start)
    tokens_N = torch.tensor(train_ids, device=device)
    result = train(model, tokens_N, validation, recipe, seconds=max(seconds, 1.0), compile_model=compile_model)
    save_model(model, out)
    (out / "held_out.txt").write_text(join(corpus.held_out), encoding="utf-8", newline="")
    return measure(out, corpus, train_tokens=len(train_ids), recipe=recipe, result=result, device=device)


def build_tokenizer(out: Path, corpus: Corpus) -> tokenizers.Tokenizer:
    """Learn the tokenizer from the training files and write its two files to `out`."""
    tokenizer = train_tokenizer(document.text for document in corpus.train)
    out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, out, max_length=MAX_POSITIONS)
    say(f"{len(corpus.documents):,} files read, {tokenizer.get_vocab_size():,} tokens in the vocabulary")
    return tokenizer


def token_stream(tokenizer: tokenizers.Tokenizer, documents: Sequence[Document]) -> list[int]:
    """The ids of all documents, each followed by END_OF_TEXT."""
    encodings = tokenizer.encode_batch_fast([document.text + END_OF_TEXT for document in documents])
    return [token for encoding in encodings for token in encoding.ids]


def save_model(model: Qwen3ForCausalLM, out: Path) -> None:
    """Round the weights to bf16 and write them with config.json and generation_config.json."""
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=END_OF_TEXT_ID,
    )
    model.cpu().bfloat16().save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # some versions write it for the owner alone


def measure(
    out: Path,
    corpus: Corpus,
    *,
    train_tokens: int,
    recipe: Recipe,
    result: TrainingResult,
    device: torch.device,
) -> TrainingRecord:
    """Load the written folder as a user would, in fp32 on the CPU; compute held-out loss and samples."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = (out / "held_out.txt").read_bytes().decode()
    windows = held_out_windows(tokenizer, text)
    loss = mean_nats_per_token(lambda ids_BT: model(input_ids=ids_BT, use_cache=False).logits, windows)
    say(f"held-out loss {loss:.4f} nats per token")
    return TrainingRecord(
        held_out_loss=loss,
        held_out_bits_per_byte=loss * scored_tokens(windows) / math.log(2) / len(text.encode()),
        held_out_tokens_scored=scored_tokens(windows),
        held_out_definition=HELD_OUT_DEFINITION,
        held_out_files=[document.path for document in corpus.held_out],
        validation_loss=result.validation_loss,
        parameters=model.num_parameters(),
        steps=result.steps,
        best_step=result.best_step,
        tokens_seen=result.tokens,
        epochs=result.tokens / train_tokens,
        seconds=result.seconds,
        corpus={
            "name": corpus.name,
            "files": len(corpus.documents),
            "bytes": sum(document.num_bytes for document in corpus.documents),
            "train_tokens": train_tokens,
            "sha256": corpus.digest(),
        },
        recipe=asdict(recipe),
        machine=machine_name(device),
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        curve=result.curve,
        samples=[sample(model, tokenizer, prompt, recipe.seed) for prompt in SAMPLE_PROMPTS],
    )


def sample(
    model: Qwen3ForCausalLM, tokenizer: transformers.PreTrainedTokenizerBase, prompt: str, seed: int
) -> dict[str, str]:
    """A seeded continuation of `prompt` at the folder's own sampling defaults."""
    torch.manual_seed(seed)
    inputs = tokenizer(prompt, return_tensors="pt")
    ids_1T = model.generate(**inputs, max_new_tokens=SAMPLE_TOKENS)  # type: ignore[misc]  # its own mixin
    completion = tokenizer.decode(ids_1T[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return {"prompt": prompt, "completion": str(completion)}


def machine_name(device: torch.device) -> str:
    """The GPU, or the kind of CPU and how much of it was used."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} GPU"
    return f"{platform.machine()} CPU ({torch.get_num_threads()} threads on {os.cpu_count()} cores)"


def choose_device(name: str) -> torch.device:
    """Resolve the device: `auto` is CUDA if torch sees a GPU, otherwise the CPU.

    Raises:
        ValueError: `cuda` is requested but not available.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be 'cpu' or 'auto' here, got 'cuda' and torch sees no GPU")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def command_line() -> argparse.ArgumentParser:
    """The options; one for each field of Recipe."""
    parser = argparse.ArgumentParser(
        prog="python -m bundled_training.train",
        description="Train the bundled model on Python source and write a complete model folder.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, required=True, default=argparse.SUPPRESS, help="folder to write the model to"
    )
    parser.add_argument(
        "--corpus",
        type=Path,
        default=Path(sysconfig.get_path("stdlib")),
        help="folder with Python source, read at any depth",
    )
    parser.add_argument(
        "--corpus-name",
        default=f"CPython {platform.python_version()} standard library",
        help="what the README calls the corpus",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train")
    parser.add_argument("--compile", action="store_true", help="train through torch.compile")
    parser.add_argument("--tokenizer-only", action="store_true", help="write the tokenizer and stop")
    for option in fields(Recipe):
        default: Any = option.default
        several = isinstance(default, tuple)
        parser.add_argument(
            "--" + option.name.replace("_", "-"),
            type=type(default[0] if several else default),
            nargs="+" if several else None,
            default=default,
            help=option.metadata["help"],
        )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a wrong option or an unusable corpus ends it with status 2 and the reason."""
    parser = command_line()
    args = parser.parse_args(arguments)
    choices = {option.name: getattr(args, option.name) for option in fields(Recipe)}
    try:
        recipe = Recipe(**choices | {"windows": tuple(args.windows)})
        device = choose_device(args.device)
        corpus = read_corpus(args.corpus, args.corpus_name)
    except ValueError as error:
        parser.error(str(error))
    if args.tokenizer_only:
        build_tokenizer(args.out, corpus)
        return
    record = build(args.out, corpus, recipe, device, compile_model=args.compile)
    write_licence(args.out, args.corpus)
    write_record(args.out, record)


if __name__ == "__main__":
    main()

"""Write the files next to the bundled model's weights: the record, the README and the licence."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template

from compiled_engine.models.bundled import BUNDLED_MODEL_PATH

LICENCE_FILE = "LICENSE-PSF.txt"


@dataclass(frozen=True)
class TrainingRecord:
    """The content of training.json. Losses are in nats per token."""

    held_out_loss: float
    held_out_bits_per_byte: float
    held_out_tokens_scored: int
    held_out_definition: str
    held_out_files: list[str]
    validation_loss: float
    parameters: int
    steps: int
    best_step: int
    tokens_seen: int
    epochs: float
    seconds: float
    corpus: dict[str, str | int]
    recipe: dict[str, object]
    machine: str
    versions: dict[str, str]
    curve: list[dict[str, float]]
    samples: list[dict[str, str]]


def write_record(folder: Path, record: TrainingRecord) -> None:
    """Write training.json and the README.md made from it."""
    (folder / "training.json").write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(_readme(folder, record), encoding="utf-8")


def write_licence(folder: Path, corpus_folder: Path) -> None:
    """Copy the corpus' licence, or the licence of this package if there is none."""
    source = corpus_folder / "LICENSE.txt"
    if not source.is_file():
        source = BUNDLED_MODEL_PATH / LICENCE_FILE
    target = folder / LICENCE_FILE
    if source.resolve() != target.resolve():
        shutil.copyfile(source, target)


def _readme(folder: Path, record: TrainingRecord) -> str:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    options = " ".join(f"--{name.replace('_', '-')} {_option(value)}" for name, value in record.recipe.items())
    sample = record.samples[0]
    return README.substitute(
        config,
        rope_theta=f"{config['rope_parameters']['rope_theta']:g}",
        parameters=f"{record.parameters:,}",
        loss=f"{record.held_out_loss:.4f}",
        bits=f"{record.held_out_bits_per_byte:.3f}",
        scored=f"{record.held_out_tokens_scored:,}",
        definition=record.held_out_definition,
        corpus=record.corpus["name"],
        files=f"{record.corpus['files']:,}",
        train_tokens=f"{record.corpus['train_tokens']:,}",
        steps=f"{record.steps:,}",
        seen=f"{record.tokens_seen:,}",
        epochs=f"{record.epochs:.1f}",
        minutes=f"{record.seconds / 60:.1f}",
        machine=record.machine,
        options=options,
        prompt=sample["prompt"],
        sample=sample["prompt"] + sample["completion"],
    )


def _option(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


README = Template("""\
# The bundled model

A small causal language model of Python source, in the Qwen3 architecture and the Hugging Face layout. It lets
every example, test and start-up check of the engine run offline on a real checkpoint. It imitates Python for
a few lines; it is no assistant. Its chat template (ChatML) lets chat interfaces run, but no conversation was
trained on.

| | |
|---|---|
| parameters | $parameters (embedding and output tied) |
| hidden size, layers | $hidden_size, $num_hidden_layers |
| heads, key-value heads, head size | $num_attention_heads, $num_key_value_heads, $head_dim |
| feed-forward size | $intermediate_size (SwiGLU) |
| rotary base, positions | $rope_theta, $max_position_embeddings |
| vocabulary | $vocab_size, byte-level BPE; no begin token; `<|endoftext|>` ends a document |
| stored as | bfloat16 |

## Held-out loss

**$loss nats per token** ($bits bits per byte) over $scored scored tokens of `held_out.txt`.

Definition: $definition.

`tests/support/bundled_training/held_out.py` does exactly this. The files in `held_out.txt` are named in
`training.json`; they are whole and unchanged, each followed by `<|endoftext|>`. None was trained on or helped to
pick a checkpoint.

## Training

Corpus: $corpus, $files files, $train_tokens tokens to train on;
without generated tables, data files and site-packages. The hash of its path puts a file into training,
validation (which picks the best checkpoint) or held out. AdamW with warm-up and cosine decay:
$steps steps, $seen tokens, $epochs epochs, $minutes minutes on one $machine.
`training.json` has the recipe, the curve, the versions and more samples.

To repeat it (figures vary a little with hardware and versions):

    PYTHONPATH=tests/support python -m bundled_training.train --out DIR $options

## A sample

Prompt `$prompt`, temperature 0.8, top-p 0.95:

```python
$sample
```

A space belongs to the word after it: prompts that end in one do worse.

## Licence

The text comes from CPython, copyright Python Software Foundation. `LICENSE-PSF.txt` holds its licence, which
covers `held_out.txt` and under which the weights are passed on.
""")

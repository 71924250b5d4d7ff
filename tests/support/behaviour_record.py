"""A record of what the engine makes of models, to compare a change of code with what was before it.

    python tests/support/behaviour_record.py write before.json
    python tests/support/behaviour_record.py write after.json
    python tests/support/behaviour_record.py compare before.json after.json

For each family and layout: the plan and the pieces of each compile range and what these call, how often each pass
matched, the graphs' names, a digest of every parameter's bytes on every rank, and the tokens that come out with their
log-probabilities to four digits. On a machine with a GPU one rank is recorded there too. Digests are of one version of
torch: both files have to be written in the same environment. `compare` prints each difference and ends with status 1 if
there is one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from compiled_engine.bench.families import family, write_checkpoint
from compiled_engine.config import EngineConfig
from compiled_engine.graphs.compiled_model import compile_model
from compiled_engine.llm import LLM
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.parallel.stages import stages_of
from compiled_engine.process.progress import SilentProgress
from compiled_engine.process.timeline import Timeline
from compiled_engine.runner.model_forward import load_model
from compiled_engine.sampling.params import SamplingParams

# Textbook and foreign, dense and experts; with windows and soft caps, norms behind blocks, and packed weights.
FAMILIES = ("qwen3", "gemma2", "qwen3_moe", "glm4", "olmo2", "gpt_oss")
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "TP 2": {"tensor_parallel_size": 2},
    "PP 2": {"pipeline_parallel_size": 2},
}
OPTIONS: dict[str, Any] = {
    "progress": False,
    "dtype": "float32",
    "num_blocks": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 128,
    "skip_tokenizer_init": True,
}
PROMPTS = [[(7 * place + 3 * number) % 60 for place in range(length)] for number, length in enumerate((1, 5, 33, 70))]
PARAMS = (
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=1, detokenize=False),
    SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=8, ignore_eos=True, detokenize=False),
)


class _Alone:
    """In a group's place where only the rank's number is asked for."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def least(self, value: int) -> int:
        return value


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def record_of(folder: Path, options: dict[str, Any], cache_dir: Path) -> dict[str, Any]:
    """Of the checkpoint in the folder, by an engine with these options."""
    with LLM(folder, cache_dir=cache_dir, **OPTIONS | options) as llm:
        given = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = [output for params in PARAMS for output in llm.generate(given, params, use_tqdm=False)]
        metrics, config = llm.metrics(), llm.config
    found = {
        "passes": {name: {p: c["matches"] for p, c in passes.items()} for name, passes in metrics["passes"].items()},
        "graphs": sorted(metrics["graph_bytes_by_key"]),
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "log-probabilities": [_rounded(output.outputs[0].logprobs) for output in outputs[: len(PROMPTS)]],
        "of prompts": [_rounded(output.prompt_logprobs) for output in outputs[: len(PROMPTS)]],
    }
    return found | _compiled(Path(metrics["cache_entry"])) | {"parameters": dict(_parameters(config))}


def _rounded(entries: Any) -> list[dict[str, float]]:
    return [{str(key): round(one.logprob, 4) for key, one in (entry or {}).items()} for entry in entries]


def _compiled(entry: Path) -> dict[str, Any]:
    """Digests of plans, digests of pieces, and how often all pieces of the entry call each op."""
    called: Counter[str] = Counter()
    pieces = sorted(entry.rglob("pieces/*.json"))
    for piece in pieces:
        called.update(_targets(json.loads(piece.read_text())))
    plans = {path.relative_to(entry).as_posix(): digest(path.read_bytes()) for path in entry.rglob("*plan*.json")}
    return {"plans": plans, "pieces": [path.stem for path in pieces], "called": dict(sorted(called.items()))}


def _targets(value: Any) -> Iterator[str]:
    """Names of the ops in a piece's JSON."""
    if isinstance(value, str) and "::" in value:
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _targets(inner)


def _parameters(config: EngineConfig) -> Iterator[tuple[str, dict[str, str]]]:
    """By rank, by name: a digest of the bytes, with shape and dtype."""
    size = config.parallel.tensor_parallel_size
    stages = stages_of(config.parallel.stage_layers, config.model.num_layers)
    compiled = compile_model(config, build_model, SilentProgress(), Timeline())
    for stage in stages:
        for rank in range(size):
            group: Any = _Alone(rank, size)
            _, named = load_model(config, compiled.for_stage(stage), group, SilentProgress())
            yield f"stage {stage.index}, rank {rank}", {name: _described(named[name]) for name in sorted(named)}


def _described(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{list(tensor.shape)} {tensor.dtype} {digest(data)}"


def write(path: Path, families: list[str]) -> None:
    """Record the families in every layout."""
    layouts = {f"cpu, {name}": options | {"device": "cpu"} for name, options in LAYOUTS.items()}
    if torch.cuda.is_available():
        layouts["cuda, one rank"] = {"device": "cuda"}
    record = {}
    for name in families:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            write_checkpoint(folder, family(name))
            for layout, options in layouts.items():
                try:
                    record[f"{name}, {layout}"] = record_of(folder, options, Path(temporary) / "cache")
                except ValueError as error:  # not every model can be divided in every way
                    record[f"{name}, {layout}"] = {"refused": str(error)}
                print(f"{name}, {layout}", file=sys.stderr)
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """Each value that differs, by its place."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from differences(before.get(key), after.get(key), f"{place} / {key}" if place else key)
    elif before != after:
        yield f"{place}: {json.dumps(before)[:300]} -> {json.dumps(after)[:300]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="record the code as it is")
    writing.add_argument("file", type=Path)
    writing.add_argument("--family", action="append", choices=FAMILIES, help="may be repeated; default: all")
    comparing = commands.add_parser("compare", help="print what differs")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "write":
        write(arguments.file, arguments.family or list(FAMILIES))
        return 0
    found = list(differences(*(json.loads(path.read_text()) for path in (arguments.before, arguments.after))))
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

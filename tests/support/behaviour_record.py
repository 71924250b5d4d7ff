"""A record of what the engine makes of models and requests, to compare a change of code with what was before it.

    python tests/support/behaviour_record.py write before.json
    python tests/support/behaviour_record.py write after.json
    python tests/support/behaviour_record.py compare before.json after.json

The parts, each of which `--part` may choose:

models: for each family and layout the plan and the pieces of each compile range and what these call, how often each
pass matched, the graphs' names, a digest of every parameter's bytes on every rank, and the tokens that come out with
their log-probabilities to four digits. On a machine with a GPU one rank is recorded there too.
features: for each feature of behaviour_features.py what comes of its requests, eagerly, with graphs of recorded work,
compiled and on a GPU: outputs, digests of the messages between scheduler and runner, metrics, and what a steady step
costs in calls and ops. `--quick` leaves out what is compiled.
scheduler: digests of the messages of its property tests.

Digests are of one version of torch and Hypothesis: both files have to be written in the same environment. `compare`
prints each difference and ends with status 1 if there is one. Three things are printed and are no difference: a digest
that has moved to another name, a step that costs less, and lines of code.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from behaviour_features import FEATURES, QUICK, record_feature
from families import family, write_checkpoint
from folders import REPOSITORY
from message_record import recorded_loads, recorded_properties

from compiled_engine.config import EngineConfig
from compiled_engine.engine.load_model import load_model
from compiled_engine.graphs.compiled_model import compile_model
from compiled_engine.graphs.stage_model import stage_model
from compiled_engine.llm import LLM
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.parallel.stages import stages_of
from compiled_engine.process.progress import SilentProgress
from compiled_engine.process.timeline import Timeline
from compiled_engine.sampling.params import SamplingParams

# Textbook and foreign, dense and experts; with windows and soft caps, norms behind blocks, and packed weights.
FAMILIES = ("qwen3", "gemma2", "qwen3_moe", "glm4", "olmo2", "gpt_oss")
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "TP 2": {"tensor_parallel_size": 2},
    "PP 2": {"pipeline_parallel_size": 2},
}
PARTS = ("models", "features", "scheduler")
# What a step costs may become less.
COSTS, NO_DIFFERENCE = "a step", "no difference: "
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
    """Takes the place of a group where only the rank's number and the group's size are needed."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce_min(self, value: int) -> int:
        return value


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def record_of(folder: Path, options: dict[str, Any], cache_dir: Path) -> dict[str, Any]:
    """Return the record of a checkpoint, made by an engine with these options."""
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
    """Return digests of plans and of pieces, and how often all pieces of the entry call each op."""
    called: Counter[str] = Counter()
    pieces = sorted(entry.rglob("pieces/*.json"))
    for piece in pieces:
        called.update(_targets(json.loads(piece.read_text())))
    plans = {path.relative_to(entry).as_posix(): digest(path.read_bytes()) for path in entry.rglob("*plan*.json")}
    return {"plans": plans, "pieces": [path.stem for path in pieces], "called": dict(sorted(called.items()))}


def _targets(value: Any) -> Iterator[str]:
    """Yield the names of the ops in a piece's JSON."""
    if isinstance(value, str) and "::" in value:
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _targets(inner)


def _parameters(config: EngineConfig) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (rank, parameter name -> digest of its bytes, with shape and dtype)."""
    size = config.parallel.tensor_parallel_size
    stages = stages_of(config.parallel.stage_layers, config.model.num_layers)
    compiled = compile_model(config, build_model, SilentProgress(), Timeline())
    for stage in stages:
        for rank in range(size):
            group: Any = _Alone(rank, size)
            of_stage = stage_model(compiled, stage, config.scheduler.max_num_batched_tokens, config.device)
            named = load_model(config, of_stage, group, SilentProgress()).tensors
            yield f"stage {stage.index}, rank {rank}", {name: _described(named[name]) for name in sorted(named)}


def _described(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{list(tensor.shape)} {tensor.dtype} {digest(data)}"


def of_models(families: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Record the families in every layout."""
    layouts = {f"cpu, {name}": options | {"device": "cpu"} for name, options in LAYOUTS.items()}
    if torch.cuda.is_available():
        layouts["cuda, one rank"] = {"device": "cuda"}
    for name in families:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            write_checkpoint(folder, family(name))
            for layout, options in layouts.items():
                try:
                    yield f"{name}, {layout}", record_of(folder, options, Path(temporary) / "cache")
                except ValueError as error:  # not every model can be divided in every way
                    yield f"{name}, {layout}", {"refused": str(error)}


def of_features(names: Sequence[str], *, quick: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Record the features in every way."""
    with tempfile.TemporaryDirectory() as cache:
        for name in names:
            ways = [way for way in FEATURES[name].ways if way in QUICK or not quick]
            for way in [*ways, *(["cuda"] if torch.cuda.is_available() and FEATURES[name].on_gpu else [])]:
                with tempfile.TemporaryDirectory() as folder:
                    yield f"{name}, {way}", record_feature(name, way, Path(folder), Path(cache))


def of_scheduler(examples: int = 200, seeds: Sequence[int] = range(4)) -> Iterator[tuple[str, dict[str, Any]]]:
    """Record the scheduler's property tests."""
    sys.path.insert(0, str(REPOSITORY / "tests" / "engine"))
    from test_scheduler_properties import SchedulerMachine, test_a_heavy_load_is_served_in_full

    yield "scheduler, random work", recorded_properties(SchedulerMachine, examples)
    yield "scheduler, heavy loads", recorded_loads(test_a_heavy_load_is_served_in_full, seeds)


def differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """Yield each difference of two records, with its place in them.

    Lines that begin with NO_DIFFERENCE only inform, for instance of a step that costs less.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        gone, new = before.keys() - after.keys(), after.keys() - before.keys()
        for name in sorted(gone):
            same = [other for other in sorted(new) if is_digest(before[name]) and after[other] == before[name]]
            if same:
                yield f"{NO_DIFFERENCE}{place}: {name} is now {same[0]}"
                gone, new = gone - {name}, new - {same[0]}
        for key in sorted((before.keys() & after.keys()) | gone | new):
            yield from differences(before.get(key), after.get(key), f"{place} / {key}" if place else key)
    elif before != after:
        told = f" / {COSTS} / " in place and isinstance(before, int) and isinstance(after, int)
        told = told and (after < before or place.rpartition(" / ")[2].startswith("lines"))
        yield f"{NO_DIFFERENCE * told}{place}: {json.dumps(before)[:300]} -> {json.dumps(after)[:300]}"


def is_digest(value: Any) -> bool:
    """Return whether a value is a digest of messages or of bytes."""
    return isinstance(value, str) and re.search(r"\b[0-9a-f]{16}$", value) is not None


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="record the code as it is")
    writing.add_argument("file", type=Path)
    writing.add_argument("--part", action="append", choices=PARTS, help="may be repeated; default: all")
    writing.add_argument("--family", action="append", choices=FAMILIES, help="of models; may be repeated; default: all")
    writing.add_argument("--feature", action="append", choices=FEATURES, help="may be repeated; default: all")
    writing.add_argument("--quick", action="store_true", help="no features that are compiled")
    comparing = commands.add_parser("compare", help="print what differs")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    arguments = parser.parse_args(words)
    if arguments.command == "write":
        torch.set_num_threads(1)  # more would divide sums in other ways
        parts = {
            "models": lambda: of_models(arguments.family or FAMILIES),
            "features": lambda: of_features(arguments.feature or list(FEATURES), quick=arguments.quick),
            "scheduler": of_scheduler,
        }
        record = {}
        for part in arguments.part or PARTS:
            for name, found in parts[part]():
                record[f"{part}: {name}"] = found
                print(name, file=sys.stderr)
        arguments.file.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        return 0
    found = list(differences(*(json.loads(path.read_text()) for path in (arguments.before, arguments.after))))
    print(*found, sep="\n", end="\n" if found else "")
    return int(not all(line.startswith(NO_DIFFERENCE) for line in found))


if __name__ == "__main__":
    sys.exit(main())

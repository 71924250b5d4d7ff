"""Each way in which people start the engine on a GPU, cold and warm, beside transformers.

Starts in processes of their own import, fork, compile and capture what a user's script does. Starts that differ in the
compiled model alone follow one another in the process of the tests, which has imported everything. All share one folder
of kernels; each has a token budget of its own, so that its first start finds no compiled model.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import gpu_start
import pytest
import torch
from families import Family, family, load_oracle, write_checkpoint
from family_comparison import BF16_FACTOR, TOLERANCE
from folders import SUPPORT

from compiled_engine.passes.registry import registered_passes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]

SCRIPT = SUPPORT / "gpu_start.py"
LONGEST_S = 240
# Blocks are given, since many starts share the GPU.
OPTIONS: dict[str, Any] = {"num_blocks": 256, "max_num_seqs": 4, "max_model_len": 256}
# One token, a chunk, several chunks; below and above the windows of models that have them.
PROMPT_LENS = (1, 6, 33, 90, 150)
# The default is another start's.
GRAPH_MODES = ("none", "piecewise", "full_decode_only", "full_and_piecewise")
OF_RANKS = ("all_reduce_residual_rms_norm", "sequence_parallel")
# In the models here they find nothing.
OF_OTHER_MODELS = ("gated_convolution", "quantise_activations", "reorder_codes")


@dataclass(frozen=True)
class Start:
    """options: of `LLM`. cold_apart, warm_apart: in a process of its own; other starts compile without further
    processes. empty: without the kernels of other starts. dtypes: of the cold starts, the last that of the warm one;
    drawn: others, which the seed draws. changes: of the family's configuration, as sorted items."""

    family: str = "qwen3"
    options: dict[str, Any] = field(default_factory=dict)
    cold_apart: bool = False
    warm_apart: bool = False
    empty: bool = False
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    drawn: tuple[str, ...] = ()
    changes: tuple[tuple[str, Any], ...] = ()


def separate(family: str = "qwen3", **options: Any) -> Start:
    return Start(family, options, cold_apart=True, warm_apart=True)


def exact(start: Start) -> Start:
    """A start of which other starts show what is of bf16 alone: it compares tokens, and in bf16 runs where it is
    drawn."""
    return replace(start, dtypes=("float32",), drawn=("bfloat16",))


def without(name: str) -> Start:
    """In a model of one layer in which the pass finds something.

    Inductor compiles what the pass leaves, in the pieces before attention and behind it: other starts have the piece
    between two layers. It does so for all batches at once, except where the pass works on small batches alone: other
    starts have Inductor's code in both ranges.
    """
    having = {"experts": "qwen3_moe", "layer_norm": "starcoder2"}
    options: dict[str, Any] = {"disable_passes": [name]}
    if name != "small_batch_linear":
        options["compile_ranges"] = []
    return exact(Start(having.get(name, "qwen3"), options, changes=(("num_hidden_layers", 1),)))


# Starts that Inductor compiles take longest, and begin first.
STARTS = {
    "default, nothing kept": replace(separate(), empty=True),
    "foreign, Inductor": exact(separate("olmo2")),
    "foreign, Inductor, windows": exact(Start("cohere2")),
    **{
        f"without {p.name}": without(p.name) for p in registered_passes() if p.name not in (*OF_RANKS, *OF_OTHER_MODELS)
    },
    "foreign, no Inductor": exact(Start("granite")),
    "experts": separate("qwen3_moe"),
    "foreign experts": Start("gpt_oss"),
    "compiled, cuda:0": exact(separate(mode="compiled", device="cuda:0")),
    "a worker process": exact(separate(distributed_executor="multiprocess")),
    "eager": separate(mode="eager"),
    **{f"graphs: {mode}": exact(Start(options={"graph_mode": mode}, warm_apart=True)) for mode in GRAPH_MODES},
    # Its kernels are compiled by their launches, which write nothing if a test before has launched them.
    "graphs: breakable": separate(mode="eager", graph_mode="breakable"),
    # Reduced builds of flash-attn have the common sizes of heads alone.
    "flash_attn": Start(options={"attention_backend": "flash_attn"}, dtypes=("bfloat16",), changes=(("head_dim", 64),)),
    "torch attention": Start(options={"attention_backend": "torch"}),
    "nothing scheduled ahead": exact(Start(options={"async_scheduling": False})),
    "windows": exact(Start("mistral")),
    "soft caps and windows": Start("gemma2"),
    "foreign, norms behind": exact(Start("glm4")),
    "latent attention": exact(Start("deepseek_v3")),
    "heads of two sizes, experts beside an MLP": exact(Start("gemma4_text", changes=(("global_head_dim", 512),))),
    "state spaces, experts": exact(Start("granitemoehybrid")),
    "distances in scores": exact(Start("bloom")),
    "textbook's model by transformers' code": exact(Start(options={"model_impl": "transformers"})),
}


@dataclass(frozen=True)
class Checkpoint:
    """oracle: transformers' model in fp32, on the CPU."""

    folder: Path
    oracle: Any
    prompts: list[list[int]]

    def logprobs(self, token_ids: list[int], oracle: Any = None) -> torch.Tensor:
        """Of each token behind those before it [T - 1]."""
        ids = torch.tensor([token_ids])
        with torch.inference_mode():
            logits_TV = (self.oracle if oracle is None else oracle)(ids).logits[0, :-1].float()
        return logits_TV.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]

    def next_tokens(self, token_ids: list[int], count: int) -> list[int]:
        """The likeliest continuation, and those that are as likely within roundings."""
        ids = list(token_ids)
        for _ in range(count):
            with torch.inference_mode():
                ids.append(int(self.oracle(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(token_ids) :]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def made(name: str, changes: tuple[tuple[str, Any], ...] = ()) -> Checkpoint:
        folder = tmp_path_factory.mktemp(name)
        case: Family = family(name)
        case = replace(case, changes={**case.changes, **dict(changes)})
        oracle = write_checkpoint(folder, case)
        choose = random.Random(0)
        size = oracle.config.get_text_config().vocab_size
        return Checkpoint(folder, oracle, [[choose.randrange(size) for _ in range(n)] for n in PROMPT_LENS])

    return made


def run(
    checkpoint: Checkpoint, *options: dict[str, Any], apart: bool, root: Path | None = None
) -> list[dict[str, Any]]:
    """Engines in one process, by their options: in one of their own, or in this one."""
    if not apart:
        return [gpu_start.start(str(checkpoint.folder), each, checkpoint.prompts) for each in options]
    environment = os.environ if root is None else os.environ | {"COMPILED_ENGINE_CACHE_DIR": str(root)}
    arguments = [str(checkpoint.folder), json.dumps(options), json.dumps(checkpoint.prompts)]
    command = [sys.executable, str(SCRIPT), *arguments]
    started = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=LONGEST_S)
    assert started.returncode == 0, started.stderr[-3000:]
    assert "fork" not in started.stderr
    found: list[dict[str, Any]] = json.loads(started.stdout.splitlines()[-1])
    return found


def check_start(name: str, dtypes: tuple[str, ...], checkpoint: Checkpoint, root: Path | None, device: str) -> None:
    """Cold in each type, then warm in the last: the tokens and log-probabilities of transformers."""
    start = STARTS[name]
    options = OPTIONS | {"device": device, "max_num_batched_tokens": 64 + list(STARTS).index(name)} | start.options
    compiled = options.get("mode") != "eager"
    if compiled and not start.cold_apart:
        options["compile_workers"] = 0
    given = [options | {"dtype": dtype} for dtype in dtypes]
    cold = run(checkpoint, *given, apart=start.cold_apart, root=root)
    warm = run(checkpoint, given[-1], apart=start.warm_apart, root=root)
    for found, first in [*((each, True) for each in cold), (warm[0], False)]:
        if compiled:
            assert found["cache"] == ("miss" if first else "hit")
            assert (found["traces"] > 0) == (found["compiles"] > 0) == first
    assert warm[0]["kernels_compiled_here"] == []
    for dtype, found in zip((*dtypes, dtypes[-1]), (*cold, *warm), strict=True):
        (check_equal if dtype == "float32" else check_close)(checkpoint, found["outputs"])


def check_equal(checkpoint: Checkpoint, outputs: list[dict[str, Any]]) -> None:
    """In fp32: the same tokens, with the same log-probabilities but for roundings."""
    for prompt, output in zip(checkpoint.prompts, outputs, strict=True):
        token_ids = prompt + output["token_ids"]
        difference = (checkpoint.logprobs(token_ids) - torch.tensor(output["logprobs"])).abs().max()
        assert difference <= TOLERANCE
        assert output["token_ids"] == checkpoint.next_tokens(prompt, len(output["token_ids"]))


def check_close(checkpoint: Checkpoint, outputs: list[dict[str, Any]]) -> None:
    """In bf16: log-probabilities about as far from fp32's as those of transformers in bf16 are."""
    narrow = load_oracle(checkpoint.folder, torch.bfloat16)
    differences, of_transformers = [], []
    for prompt, output in zip(checkpoint.prompts, outputs, strict=True):
        token_ids = prompt + output["token_ids"]
        exact = checkpoint.logprobs(token_ids)
        differences.append((exact - torch.tensor(output["logprobs"])).abs())
        of_transformers.append((exact - checkpoint.logprobs(token_ids, narrow)).abs())
    assert torch.cat(differences).mean() <= BF16_FACTOR * torch.cat(of_transformers).mean()


# A few of these are drawn: passes that are left out have tests on a CPU too, and other files compare the tokens of each
# attention backend, graph mode and number of steps in flight.
SHOWN = re.compile(r"without |graphs: .*(full|piecewise)|flash_attn|torch attention|nothing scheduled ahead")
CHECKED = [
    *(
        pytest.param(name, start.dtypes, id=name, marks=pytest.mark.product(one_in=6) if SHOWN.match(name) else ())
        for name, start in STARTS.items()
    ),
    *(
        pytest.param(name, start.drawn, id=f"{name}, {', '.join(start.drawn)}", marks=pytest.mark.product(one_in=12))
        for name, start in STARTS.items()
        if start.drawn
    ),
]


@pytest.mark.parametrize(("name", "dtypes"), CHECKED)
def test_a_start_gives_what_transformers_gives(
    name: str, dtypes: tuple[str, ...], checkpoints: Any, tmp_path: Path
) -> None:
    if "flash_attn" in name:
        pytest.importorskip("flash_attn", reason="the package flash-attn is not installed")
    start = STARTS[name]
    root = tmp_path / "root" if start.empty else None
    check_start(name, dtypes, checkpoints(start.family, start.changes), root, "cuda")


OUT_OF_MEMORY = """
import itertools, tempfile
from pathlib import Path
import torch
from compiled_engine.llm import LLM
from compiled_engine.bench.shapes import write_shape
from compiled_engine.graphs.cuda_graphs.capture import CudaCapture

captures, whole = itertools.count(1), CudaCapture.whole

def short_of_memory(self, work):
    if next(captures) != 3:
        return whole(self, work)
    return whole(self, lambda: (torch.empty(1 << 45, dtype=torch.uint8, device="cuda"), work())[1])

CudaCapture.whole = short_of_memory
with tempfile.TemporaryDirectory() as folder:
    options = {"load_format": "dummy", "num_blocks": 64, "max_model_len": 1024, "progress": False}
    shape = write_shape(Path(folder), "qwen3-0.6b")
    try:
        LLM(shape, **options)
    except torch.OutOfMemoryError:
        print("refused")
    torch.cuda.empty_cache()
    print(torch.cuda.memory_reserved() < 1 << 30)
    with LLM(shape, **options) as llm:
        (output,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], use_tqdm=False)
        print(llm.metrics()["captures"] > 3, len(output.outputs[0].token_ids) > 0)
"""


def test_out_of_memory_while_capturing_ends_the_start_and_nothing_else() -> None:
    """In the third graph. Its memory is free again, and the next engine of the process starts and captures."""
    run = subprocess.run(
        [sys.executable, "-P", "-c", OUT_OF_MEMORY], check=False, capture_output=True, text=True, timeout=LONGEST_S
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split() == ["refused", "True", "True", "True"]

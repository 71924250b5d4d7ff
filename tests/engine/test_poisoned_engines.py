"""Random requests for engines of many kinds in poisoned memory: each gets its tokens, whatever stood there before."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from encoder_folders import make_encoder
from poisoned_engines import KINDS, Kind, poison_caches, start
from pooling_folders import make_embedder

from compiled_engine import LLM

pytestmark = pytest.mark.usefixtures("one_thread")
# Of batches, and of the requests of each.
ROUNDS, COUNT = 2, 12
# Compiled kinds run on a GPU and with --all; other tests of compiled engines are poisoned too.
SHOWN = pytest.mark.shown_by(
    "engine/test_poisoned_engines.py::test_requests_together_get_the_tokens_of_each_alone",
    "engine/test_coded_cache_engine.py::test_fp8_takes_the_scales_of_a_checkpoint",
    "engine/test_adapters.py::test_a_batch_of_adapters_and_none",
)
DRAWN = pytest.mark.product(one_in=1000)


def marks_of(kind: Kind) -> tuple[pytest.MarkDecorator, ...]:
    compiled, drawn = kind.options.get("mode") != "eager", kind.drawn
    return (SHOWN,) * compiled + (DRAWN,) * drawn


EVERY = [pytest.param(name, marks=marks_of(kind)) for name, kind in KINDS.items()]


@pytest.mark.parametrize("name", EVERY)
def test_requests_together_get_the_tokens_of_each_alone(name: str, tmp_path: Path) -> None:
    engine = start(KINDS[name], tmp_path, "cpu")
    with engine.llm:
        for seed in range(ROUNDS):
            requests = engine.random_requests(seed, COUNT)
            together = engine.results(requests)
            few = slice(None) if seed == 0 else slice(0, 2)
            assert together[few] == [engine.results([request])[0] for request in requests[few]]
        engine.llm.core.check_integrity()


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_texts_together_get_the_vectors_of_each_alone(kind: str, tmp_path: Path) -> None:
    if kind == "encoder":
        make_encoder(tmp_path, kinds=("mean",))
    else:
        make_embedder(tmp_path, kinds=("lasttoken",))
    words = ["def", "add", "return", "class", "import", "the", "fox", "hello", "world"]
    draw = random.Random(0)
    texts = [" ".join(draw.choices(words, k=draw.choice([1, 2, 9, draw.randint(1, 25)]))) for _ in range(20)]
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 5, "max_model_len": 64}
    with LLM(tmp_path, device="cpu", mode="eager", progress=False, **options) as llm:
        poison_caches(llm)
        together = [output.outputs.embedding for output in llm.embed(texts)]
        alone = [llm.embed([text])[0].outputs.embedding for text in texts]
    torch.testing.assert_close(torch.tensor(together), torch.tensor(alone), rtol=1e-4, atol=1e-5)

"""A callable of one's own, with its own arguments and results, goes the way from a module to functions that run."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_models import tiny_config
from torch import nn

from compiled_engine.attention.inputs import StepTensor
from compiled_engine.graphs.compiled_model import load_piece
from compiled_engine.graphs.compiler.build import EntryBuilder
from compiled_engine.graphs.compiler.compiled_range import read_compiled_ranges
from compiled_engine.graphs.compiler.signature import Signature
from compiled_engine.graphs.compiler.stitch import stitch
from compiled_engine.graphs.compiler.trace import without_storage
from compiled_engine.passes.framework.graph_pass import CompileRange
from compiled_engine.process.progress import SilentProgress
from compiled_engine.process.timeline import Timeline

NUM_FEATURES, SMALL, LARGE = 6, CompileRange(1, 4, small=True), CompileRange(1, 32)


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(NUM_FEATURES, 8)
        self.outer = nn.Linear(8, 1, bias=False)

    def forward(self, hidden_RD: torch.Tensor, weights_R: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(hidden_RD)) * weights_R[:, None]

    def score(self, inner_RF: torch.Tensor) -> torch.Tensor:
        return self.outer(inner_RF).squeeze(-1)


SIGNATURE = Signature(
    ("hidden_RD", "weights_R"),
    (
        StepTensor("hidden_RD", ("tokens", NUM_FEATURES), torch.float32),
        StepTensor("weights_R", ("tokens",), torch.float32),
    ),
    {"inner_RF": "model(hidden_RD, weights_R)", "score_R": "model.score(inner_RF)"},
    returns=("score_R", "inner_RF"),
    ranges=(SMALL, LARGE),
    small_returns=("score_R",),
)


def test_a_callable_is_compiled_with_its_own_arguments_and_results(tmp_path: Path) -> None:
    config = tiny_config()
    model = Scorer()
    with torch.device("meta"):
        traceable = without_storage(Scorer(), config.device)
    builder = EntryBuilder(config, tmp_path, SilentProgress(), Timeline())
    builder.compile_callable("scorer", traceable, SIGNATURE)
    assert builder.finish(traceable) == 2
    small, large = read_compiled_ranges(tmp_path)
    assert [small.name, large.name] == ["scorer/1-4", "scorer/1-32"]
    assert (small.returns, large.returns) == (("score_R",), ("score_R", "inner_RF"))
    parameters = dict(model.named_parameters())
    functions = []
    for compiled in (small, large):
        assert compiled.plan.arguments == ("hidden_RD", "weights_R")
        assert {parameter.name for parameter in compiled.plan.parameters} == parameters.keys()
        pieces = {key: load_piece(tmp_path, key, "cpu") for key in compiled.plan.piece_keys()}
        functions.append(stitch(compiled.plan, pieces, parameters))
    of_small, of_large = functions
    with torch.inference_mode():
        for num_rows in (1, 3, 32):
            given = torch.randn(num_rows, NUM_FEATURES), torch.randn(num_rows)
            inner_RF = model(*given)
            expected = model.score(inner_RF), inner_RF
            torch.testing.assert_close(of_large(*given), expected)
            if num_rows in SMALL:
                torch.testing.assert_close(of_small(*given), expected[0])

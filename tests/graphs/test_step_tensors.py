"""A step tensor that a pass asks for: filled, padded, traced, stitched, divided into stages, recorded and captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from fused_forward import BLOCK_SIZE, fuse
from hypothesis import given
from hypothesis import strategies as st
from pass_cases import CPU, QWEN3, RANGES
from planned_models import NUM_LAYERS, config_of, inputs, planned
from recorded_capture import RecordedCapture
from torch import fx

from compiled_engine.attention.inputs import FIELDS, STEP_TENSORS, StepTensor
from compiled_engine.config import EngineConfig, GraphConfig, GraphMode
from compiled_engine.engine import runner as model_runner
from compiled_engine.engine.input_batch import InputBuffers, empty_batch, make_batch, prepare, step_of_batch
from compiled_engine.engine.messages import EngineRequest, NewRequest, SchedulerOutput
from compiled_engine.engine.request_states import RequestStates
from compiled_engine.graphs.cache.key import cache_factors
from compiled_engine.graphs.compiler.signature import forward_signature
from compiled_engine.graphs.compiler.stage_plan import StageForward, stage_plan
from compiled_engine.graphs.compiler.stitch import forward_source, stitch
from compiled_engine.graphs.cuda_graphs.dispatcher import GraphKey, GraphKind, decode_key, mixed_key
from compiled_engine.llm import LLM
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.models.checkpoint.loader import fill_with_random_weights
from compiled_engine.models.checkpoint.parameters import materialize, parameters_of
from compiled_engine.options import EngineOptions
from compiled_engine.parallel.rank_share import local_model
from compiled_engine.parallel.stages import stages_of
from compiled_engine.passes.framework.graph_inputs import argument
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult
from compiled_engine.passes.framework.matching import arg, emit
from compiled_engine.passes.framework.op_library import define_op
from compiled_engine.passes.images.whole_images import KEYS_AHEAD
from compiled_engine.passes.registry import register_pass, step_tensors, unregister_pass
from compiled_engine.process.progress import SilentProgress
from compiled_engine.processes.start_cores import start_core
from compiled_engine.resolve.engine import resolve
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.tune.pass_gains import make_step_inputs

NO_SLOT = 7


def slots_of(step: Mapping[str, torch.Tensor], states: RequestStates) -> torch.Tensor:
    """Slot 0 for prompts of an odd number of tokens, 1 for others."""
    return 1 - states.prefill_len_S[step["rows_R"]] % 2


SLOTS = StepTensor("slots_R", ("requests",), torch.int32, padding=NO_SLOT, fill=slots_of)


def _signed(x_TD: torch.Tensor, starts_R1: torch.Tensor, slots_R: torch.Tensor) -> torch.Tensor:
    """-x for the tokens of requests with slot 0, x for all others."""
    row_T = torch.searchsorted(starts_R1[1:], torch.arange(x_TD.shape[0], device=x_TD.device), right=True)
    slots_T = slots_R[row_T.clamp(max=slots_R.shape[0] - 1)]
    return x_TD * torch.where(slots_T == 0, -1.0, 1.0)[:, None].to(x_TD.dtype)


def _fake(x_TD: torch.Tensor, starts_R1: torch.Tensor, slots_R: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x_TD)


SIGNED = define_op(
    "signed_by_slot(Tensor x_TD, Tensor starts_R1, Tensor slots_R) -> Tensor", cpu=_signed, cuda=_signed, fake=_fake
)


class SignBySlot(GraphPass):
    """Negates what the model returns, hidden states or logits, for the requests of slot 0."""

    name = "sign_by_slot"

    def __init__(self, asked: StepTensor = SLOTS) -> None:
        self._asked = asked

    def step_tensors(self) -> tuple[StepTensor, ...]:
        return (self._asked,)

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        return 1

    def run(self, graph: fx.Graph) -> PassResult:
        output = graph.output_node()
        (x_TD,) = arg(output, 0)
        starts_R1 = argument(graph, "attention_inputs.query_start_loc_R1")
        with graph.inserting_before(output):
            output.args = ((emit(graph, SIGNED, x_TD, starts_R1, argument(graph, self._asked.name)),),)
        return PassResult(1)


@pytest.fixture
def registered() -> Iterator[None]:
    register_pass(SignBySlot())
    yield
    unregister_pass(SignBySlot.name)


def without(config: EngineConfig) -> EngineConfig:
    passes = tuple(name for name in config.compile.passes if name != SignBySlot.name)
    return replace(config, compile=replace(config.compile, passes=passes))


def test_all_that_attention_reads_is_declared() -> None:
    declared = {tensor.name.removeprefix("attention_inputs.") for tensor in STEP_TENSORS if "." in tensor.name}
    assert declared | {"backend", KEYS_AHEAD.name} == set(FIELDS)  # the latter is declared by its pass


# Engines

OPTIONS: dict[str, Any] = {"device": "cpu", "progress": False, "max_num_seqs": 6, "max_num_batched_tokens": 32}
PROMPTS = [[7 * number + place for place in range(1, 3 + 5 * number)] for number in range(5)]
PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False)


def answers(llm: LLM) -> list[list[int]]:
    given: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [list(output.outputs[0].token_ids) for output in llm.generate(given, PARAMS, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """By an engine that knows no slots: prompts of an odd length go on with the least likely token each time."""
    everything = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=-1)
    found = []
    with LLM(**OPTIONS, mode="eager") as llm:
        for prompt in PROMPTS:
            text = list(prompt)
            for _ in range(5):
                (output,) = llm.generate([{"prompt_token_ids": text}], everything, use_tqdm=False)
                logprobs = {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}
                choose: Callable[..., int] = min if len(prompt) % 2 else max
                text.append(choose(logprobs, key=logprobs.__getitem__))
            found.append(text[len(prompt) :])
    return found


@pytest.mark.usefixtures("registered")
def test_compiled_and_recorded_engines_read_it(expected: list[list[int]]) -> None:
    with LLM(**OPTIONS, mode="compiled") as llm:
        assert answers(llm) == expected
        metrics = llm.metrics()
    assert metrics["passes"]["1-32"][SignBySlot.name] == {"matches": 1, "contract": 1}
    entry = Path(metrics["cache_entry"])
    assert "kv_caches, slots_R):" in (entry / "1-32" / "forward.py").read_text()
    with LLM(**OPTIONS) as llm:
        assert [answers(llm), answers(llm)] == [expected, expected]
        metrics = llm.metrics()
    assert (metrics["cache"], metrics["traces"]) == ("hit", 0)
    assert metrics["recorded_replays"] > 0


@pytest.mark.usefixtures("registered")
def test_measurements_of_a_forward_and_the_verifier_give_it_padding(tmp_path: Path) -> None:
    """Which changes nothing."""
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=2)
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 32}
    config = resolve(
        EngineOptions(
            model=tmp_path, device="cpu", block_size=BLOCK_SIZE, strict_passes=True, verify_passes=True, **limits
        )
    )
    assert SignBySlot.name in config.compile.passes
    model = fuse(config, verify=True)
    (report,) = (each for each in model.reports if each.name == SignBySlot.name)
    assert report.matches == report.contract == 1
    assert report.verified
    given, expected = (each.logprobs(PROMPTS[1:3], [(7, 12)]) for each in (model, fuse(without(config))))
    torch.testing.assert_close(given, expected)
    assert make_step_inputs(config, 4, 9, decodes=True).arguments[-1].tolist() == [NO_SLOT] * 4


@pytest.mark.usefixtures("registered")
def test_padded_graphs_read_it(expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "CudaCapture", RecordedCapture)
    options = OPTIONS | {"mode": "compiled", "num_blocks": 64}
    del options["progress"]
    config = resolve(EngineOptions(**options))
    core = start_core(replace(config, graph=GraphConfig(GraphMode.FULL, (4, 6), (16, 32))), SilentProgress())
    found: dict[str, list[int]] = {}
    for number, prompt in enumerate(PROMPTS):
        core.add(EngineRequest(str(number), tuple(prompt), replace(PARAMS, seed=0)))
    while core.has_unfinished():
        for output in core.step():
            found.setdefault(output.request_id, []).extend(output.new_token_ids)
    assert [found[str(number)] for number in range(len(PROMPTS))] == expected
    metrics = core.metrics()
    assert metrics["graph_padded_tokens"] > 0
    assert {name.split()[0] for name in metrics["graph_replays_by_key"]} == {"decode", "full"}
    with pytest.raises(
        ValueError, match="graph_mode is 'piecewise', but step tensor slots_R has a value for each request"
    ):
        start_core(replace(config, graph=GraphConfig(GraphMode.PIECEWISE, (), (16,))), SilentProgress())


@pytest.mark.gpu
@pytest.mark.usefixtures("registered", "exact_float32")
def test_captured_graphs_read_it(expected: list[list[int]]) -> None:
    options = OPTIONS | {"device": "cuda", "dtype": "float32", "num_blocks": 200}
    with LLM(**options, mode="compiled") as llm:
        called = answers(llm)
    with LLM(**options, mode="graphed") as llm:
        assert answers(llm) == called
        assert llm.metrics()["graph_replays"] > 0
    for prompt, found, tokens in zip(PROMPTS, called, expected, strict=True):
        # The least likely token is a close decision.
        assert len(prompt) % 2 or found == tokens


# The fixed buffers


def two_of(step: Mapping[str, torch.Tensor], states: RequestStates) -> torch.Tensor:
    positions_T = step["positions_T"]
    return torch.stack([positions_T, 2 * positions_T], 1)


KEYS = (None, decode_key(8, 32), mixed_key(24, 6, 32), GraphKey(GraphKind.PIECEWISE, 24))


@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=6),
    st.sampled_from(KEYS),
    st.booleans(),
)
def test_real_rows_have_their_values_and_padding_has_its_own(
    requests: list[tuple[int, bool]], key: GraphKey | None, warm: bool
) -> None:
    """requests: the length of each prompt, and whether all of it is computed or its last token."""
    doubled = StepTensor("doubled_T2", ("tokens", 2), torch.int64, padding=-1, fill=two_of)
    states = RequestStates(6, 32, 4, CPU)
    buffers = InputBuffers(64, 9, 8, states.writes, CPU, asked=(SLOTS, doubled))
    if warm:
        for _, _, tensor in buffers.step[""]:
            tensor.fill_(31)  # of another batch
    lens = [1 if key is not None and key.is_decode else length if whole else 1 for length, whole in requests]
    if sum(lens) > (24 if key is not None else 64):
        lens = [1] * len(lens)
    shares = sorted(range(len(lens)), key=lambda number: lens[number] > 1)
    for number, (length, _) in enumerate(requests):
        tokens = tuple(range(length))
        request = NewRequest(str(number), tokens, length, SamplingParams(seed=1), frozenset(), ((number,),))
        states.add(request, length - lens[number])
    starts = [requests[number][0] - lens[number] for number in shares]
    step = SchedulerOutput(
        1, (), (), [str(n) for n in shares], starts, [lens[n] for n in shares], [True] * len(shares), {}
    )
    batch = make_batch(step, states, buffers, key)
    states.writes.apply()
    prepare(batch, states, buffers)
    made = step_of_batch(batch, buffers)
    slots = [1 - requests[int(request_id)][0] % 2 for request_id in batch.request_of_row]
    assert made["slots_R"].tolist() == slots + [NO_SLOT] * (batch.num_rows - len(slots))
    positions = made["positions_T"].tolist()[: batch.num_tokens]
    rows = [[position, 2 * position] for position in positions]
    assert made["doubled_T2"].tolist() == rows + [[-1, -1]] * (batch.padded_tokens - len(rows))


def test_values_of_another_shape_are_an_error() -> None:
    states = RequestStates(6, 32, 4, CPU)
    wrong = replace(SLOTS, fill=lambda step, states: states.prefill_len_S)
    buffers = InputBuffers(64, 7, 8, states.writes, CPU, asked=(wrong,))
    batch = empty_batch(buffers, 2, 2, (2, 1, 32))
    with pytest.raises(
        ValueError, match=r"step tensor slots_R: its fill has returned values of shape \[6\] instead of"
    ):
        prepare(batch, states, buffers)


# Declarations


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (replace(SLOTS, name="positions_T", dims=("tokens",)), "'positions_T': name .* be none of input_ids_T"),
        (replace(SLOTS, name="slots_T"), "'slots_T': name must end in its shape"),
        (replace(SLOTS, name="received"), "'received': name must end in its shape"),
        (replace(SLOTS, dims=()), "allowed: 'tokens' or 'requests', then numbers"),
        (replace(SLOTS, dims=("blocks",)), "dims is .*'blocks'.*; allowed: 'tokens' or 'requests', then numbers"),
        (replace(SLOTS, dims=("tokens", "requests")), "allowed: 'tokens' or 'requests', then numbers"),
        (replace(SLOTS, fill=None), "fill must be a function"),
    ],
)
def test_a_declaration_that_is_not_allowed(asked: StepTensor, message: str) -> None:
    register_pass(SignBySlot(asked))
    try:
        with pytest.raises(ValueError, match=f"pass sign_by_slot: .*{message}"):
            step_tensors([SignBySlot.name])
        assert step_tensors(["rms_norm"]) == ()
    finally:
        unregister_pass(SignBySlot.name)


@pytest.mark.usefixtures("registered")
def test_two_passes_may_ask_for_the_same_and_for_nothing_else() -> None:
    class Other(SignBySlot):
        name = "other_sign"

    for asked, allowed in ((SLOTS, True), (replace(SLOTS, padding=0), False)):
        register_pass(Other(asked))
        try:
            if allowed:
                assert step_tensors([SignBySlot.name, Other.name]) == (SLOTS,)
            else:
                with pytest.raises(ValueError, match=r"pass other_sign: .*another pass declares it differently"):
                    step_tensors([SignBySlot.name, Other.name])
        finally:
            unregister_pass(Other.name)


@pytest.mark.usefixtures("registered")
def test_it_is_in_the_cache_key_and_exists_nowhere_else() -> None:
    config = config_of(QWEN3)
    assert cache_factors(config)["step_tensors"] == {"slots_R": [["requests"], "torch.int32", NO_SLOT]}
    assert "step_tensors" not in cache_factors(without(config))
    assert forward_signature(without(config)).asked == ()
    plan, _ = planned(without(config), RANGES[1])
    assert forward_source(plan).startswith("def forward(input_ids_T, positions_T, attention_inputs, kv_caches):\n")


# Stages


@pytest.mark.usefixtures("registered")
def test_stages_have_it() -> None:
    """The last one reads it, the first does not."""
    config = config_of(QWEN3)
    model = build_model(local_model(config))
    caches = [torch.zeros(shape, dtype=config.model.dtype) for shape in config.model.kv_shapes(1, 16)]
    for compile_range in RANGES:
        plan, pieces = planned(config, compile_range)
        weights = materialize(model, (*parameters_of(model), *plan.parameters), CPU)
        fill_with_random_weights(weights, 0)
        given = weights.tensors
        asked = torch.tensor([0], dtype=torch.int32)
        plain, plain_pieces = planned(without(config), compile_range)
        expected = stitch(plain, plain_pieces, given)(*inputs(), caches) * -1
        found = None
        for stage in stages_of((1, 3), NUM_LAYERS):
            part = stage_plan(plan, stage)
            forward = StageForward(stitch(part.plan, pieces, given), part, found)
            found = forward(*inputs(), [torch.zeros_like(caches[layer]) for layer in stage.layers], asked)
        assert torch.equal(found, expected)

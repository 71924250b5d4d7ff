"""rope_attend: the op against the two that it stands for, interpreted and on a GPU, and the pass that makes it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import CASES, PADDING, PLAIN, Case, Request, build, decodes, interpreted, near_cache
from interpreting_process import interpret
from test_rope_kv_write import traced_model

from compiled_engine.attention.backends.decode_splits import GRAIN, SMALL, Splits
from compiled_engine.attention.backends.triton_rope_decode import rope_decode
from compiled_engine.attention.backends.wide_tiles import is_wide
from compiled_engine.attention.inputs import Rotation, Scoring
from compiled_engine.attention.op import attend
from compiled_engine.kv_format import is_coded
from compiled_engine.passes.linear.merge_linears import MergeLinears
from compiled_engine.passes.rope import rope_attend as op
from compiled_engine.passes.rope import rope_kv_write
from compiled_engine.passes.rope.rope_attend import RopeAttend
from compiled_engine.passes.rope.rope_kv_write import RopeKVWrite

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
# Splits that one, several and all programs find keys for, a tile and more than one, both sides of a window's border.
FURTHER = (
    Case("decodes in splits", decodes(1, 33, 400, 900), num_heads=8),
    Case("one long decode", decodes(1100), num_heads=4, head_dim=128),
    Case("decodes of large groups", (*decodes(65, 260), PADDING), num_heads=14, num_kv_heads=1, head_dim=128),
    Case("decodes, head size 256", decodes(5, 90, 300), head_dim=256),
    Case("decodes, head size 80", decodes(5, 90, 300), head_dim=80),
    Case("window, decodes in splits", decodes(5, 199, 200, 201, 500), sliding_window=200, bound=1000),
)
DECODES = (
    *FURTHER,
    *(case for case in CASES if all(r.query_len == 1 for r in case.requests) and not is_wide(case.head_dim)),
)
NAMES = [case.name for case in DECODES]


def arguments_of(case: Case, dtype: torch.dtype, device: str, normed: bool, garbage: float = math.nan) -> list[Any]:
    """Of the op, with q, k and v as views of one tensor, and an output that is NaN."""
    batch = build(case, dtype, device, garbage)
    generator = torch.Generator().manual_seed(len(case.requests))

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    parts = [batch.q_THd, batch.k_TKd, batch.v_TKd]
    q, k, v = (
        part.unflatten(-1, (-1, case.head_dim))
        for part in torch.cat([part.flatten(1) for part in parts], 1).split([p[0].numel() for p in parts], 1)
    )
    weights = (normal(case.head_dim), normal(case.head_dim)) if normed else (None, None)
    angles = torch.rand(len(case.requests), 1, case.head_dim, generator=generator).mul(7)
    cos, sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    out = torch.full_like(batch.q_THd, math.nan)
    norm = (0.5, True) if normed and len(case.requests) % 2 else (0.0, False)
    inputs = replace(batch.inputs, backend="triton")
    return [
        q,
        k,
        v,
        batch.kv_cache_N2PKd,
        out,
        *Rotation(*weights, 3e-4, cos, sin, *norm),
        *batch.scoring,
        *inputs.flat(),
    ]


def copied(arguments: list[Any]) -> list[Any]:
    return [*arguments[:3], arguments[3].clone(), arguments[4].clone(), *arguments[5:]]


def difference(arguments: list[Any]) -> str | None:
    """What the op does otherwise than the two ops that it stands for; None where it is the same."""
    one, two = copied(arguments), copied(arguments)
    in_one(one)
    op.unfused(attend, *two)
    tolerance = TOLERANCE[arguments[4].dtype]
    slots = op.inputs_of(tuple(arguments)).slot_mapping_T
    for what, index in (("cache", 3), ("output", 4)):
        if what == "cache" and is_coded(one[index].dtype):
            if not near_cache(one[index], two[index]):
                return "the cache differs by more than a code"
            continue
        found, expected = one[index].double(), two[index].double()
        if not torch.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=what == "cache"):
            return f"the {what} is off by {(found - expected).abs().max().item():.3g}"
    return "padding rows are not zeros" if one[4][slots < 0].any() else None


def in_one(arguments: list[Any], most_splits: int = 8) -> None:
    """The kernel, also for batches in which it does not pay."""
    q, k, v, cache, out = arguments[:5]
    scoring, inputs = Scoring(*arguments[16:21]), op.inputs_of(tuple(arguments))
    splits = Splits(min(most_splits, -(-int(inputs.host_3[2]) // GRAIN) or 1), GRAIN, programs=SMALL)
    num_requests = inputs.seq_lens_R.shape[0]
    rotation = Rotation(*arguments[5:16])
    rope_decode(q, k, v, rotation, cache, out, inputs, num_requests, splits, scoring)


def depends_on_garbage(case: Case, device: str, dtype: torch.dtype) -> bool:
    """Whether a real row changes in any bit with what padding rows, unused slots and unused blocks hold."""
    outputs = []
    for garbage in (math.nan, 1e4):
        arguments = arguments_of(case, dtype, device, True, garbage)
        in_one(arguments)
        outputs.append(arguments[4][op.inputs_of(tuple(arguments)).slot_mapping_T >= 0])
    return not torch.equal(*outputs)


def depends_on_neighbours(device: str, dtype: torch.dtype) -> bool:
    """Whether a request changes in any bit with the lengths of the other requests of its batch."""
    outputs = []
    for others in ((40, 900, 3), (700, 1, 350)):
        case = Case("", decodes(700, *others), num_heads=8, bound=1000)
        arguments = arguments_of(case, dtype, device, True)
        first = arguments_of(Case("", decodes(700), num_heads=8, bound=1000), dtype, device, True)
        blocks = -(-700 // 16)
        # The first request has the same q, k, v and keys in each batch, wherever its blocks are.
        for index in range(3):
            arguments[index][0] = first[index][0]
        arguments[5:10] = [*first[5:8], first[8].expand(4, -1, -1), first[9].expand(4, -1, -1)]
        table, first_table = op.inputs_of(tuple(arguments)).block_table_RB, op.inputs_of(tuple(first)).block_table_RB
        arguments[3][table[0, :blocks].long()] = first[3][first_table[0, :blocks].long()]
        in_one(arguments)
        outputs.append(arguments[4][0])
    return not torch.equal(*outputs)


# Long contexts, and those whose branches others take.
WITH_ALL = (
    "one decode",
    "decodes of long contexts",
    "window of 2048, decodes",
    "soft cap, one decode",
    "sinks, one decode",
)


def main(every: bool) -> None:
    """Run by the next test in a process whose Triton interprets."""
    # Tiles depend on the type too, but not on what is masked or added to scores: in fp16 without --all the smallest and
    # the largest run.
    cases = [case for case in DECODES if every or case.name not in WITH_ALL]
    in_half = {case.name for case in ((*FURTHER[:5], *PLAIN) if every else (FURTHER[0], FURTHER[3]))}
    found = {
        f"{case.name}, {dtype}": difference(arguments_of(case, dtype, "cpu", normed=number % 3 > 0))
        for number, case in enumerate(interpreted(*cases, every=every))
        for dtype in (torch.float32, torch.float16)
        if dtype == torch.float32 or case.name in in_half
    }
    found["garbage"] = depends_on_garbage(WITH_PADDING, "cpu", torch.float32) or None
    found["neighbours"] = depends_on_neighbours("cpu", torch.float32) or None
    print(json.dumps(found))


WITH_PADDING = Case("", (*decodes(40, 300), PADDING), num_heads=8)


def test_in_the_interpreter(pytestconfig: pytest.Config) -> None:
    script = [__file__, *(["--all"] if pytestconfig.getoption("--all") else [])]
    run = interpret(__file__, *script)
    assert run.returncode == 0, run.stderr[-2000:]
    assert {name: what for name, what in json.loads(run.stdout).items() if what is not None} == {}


@pytest.mark.gpu
@pytest.mark.product(one_in=100, each=("case",))
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", DECODES, ids=NAMES)
def test_on_a_gpu(case: Case, dtype: torch.dtype, normed: bool) -> None:
    assert difference(arguments_of(case, dtype, "cuda", normed)) is None


@pytest.mark.gpu
def test_garbage_and_neighbours_do_not_matter_on_a_gpu() -> None:
    assert not depends_on_garbage(WITH_PADDING, "cuda", torch.bfloat16)
    assert not depends_on_neighbours("cuda", torch.bfloat16)


@pytest.mark.gpu
def test_splits_arrive_anew_in_each_launch() -> None:
    """What counts the splits is left as it was found: layer after layer, and after a launch with other requests."""
    for _ in range(3):
        for case in (FURTHER[0], FURTHER[1]):
            assert difference(arguments_of(case, torch.bfloat16, "cuda", True)) is None


def test_other_batches_take_both_ways() -> None:
    """Mixed batches, and backends without such a kernel, get the two ops."""
    case = Case("", (*decodes(20, 7), Request(40, 12)))
    batch = build(case)
    q = batch.q_THd
    cos, sin = torch.ones(2, q.shape[0], 1, q.shape[2])
    sin = torch.zeros_like(sin)
    out = torch.full_like(q, math.nan)
    inputs = replace(batch.inputs, backend="torch")
    op.rope_attend(
        *(q, batch.k_TKd, batch.v_TKd, batch.kv_cache_N2PKd, out, *Rotation(None, None, 0.0, cos, sin)),
        *(*batch.scoring, *inputs.flat()),
    )
    torch.testing.assert_close(out.double(), batch.expected_THd, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(batch.kv_cache_N2PKd, batch.expected_cache_N2PKd, rtol=0, atol=0, equal_nan=True)


def test_it_needs_rope_kv_write() -> None:
    module = traced_model("Qwen3ForCausalLM", torch.float32)
    assert RopeAttend().run(module.graph).matches == 0
    assert RopeAttend().requires == ("rope_kv_write",)


def other_slots(attend_call: torch.fx.Node) -> None:
    rotated = attend_call.args[0]
    assert isinstance(rotated, torch.fx.Node)
    rotated.update_arg(4, rotated.args[3])


def other_cache(attend_call: torch.fx.Node) -> None:
    attend_call.update_arg(1, attend_call.args[0])


def another_reader(attend_call: torch.fx.Node) -> None:
    with attend_call.graph.inserting_after(attend_call):
        attend_call.graph.call_function(torch.ops.aten.add_.Tensor, (attend_call.args[0], 1.0))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (other_slots, "the slots that are written are not those of the batch"),
        (other_cache, "the cache that is written is not the one that is read"),
        (another_reader, "the rotated q is used elsewhere too"),
    ],
)
def test_what_only_looks_like_it_stays_and_is_named(change: Callable[[torch.fx.Node], None], reason: str) -> None:
    module = traced_model("Qwen3ForCausalLM", torch.float32)
    for graph_pass in (MergeLinears(), RopeKVWrite()):
        graph_pass.run(module.graph)
    change(module.graph.find_nodes(op="call_function", target=rope_kv_write.ATTEND)[1])
    result = RopeAttend().run(module.graph)
    assert result.matches == 2
    assert [miss.partition(": ")[2] for miss in result.near_misses] == [reason]


if __name__ == "__main__":
    main("--all" in sys.argv[1:])

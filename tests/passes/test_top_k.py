"""Top-k over short rows: the kernel against torch's, what the pass replaces, and how many are left in routers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hopper_compilation import compiled_for_hopper
from interpreting_process import interpret
from pass_cases import CPU, DYNAMIC, GLM4_MOE, Family, count, graph_for, graph_of, random_tensors, rewrite, run, run_on
from small_batch_linear_cases import nan_in_new_tensors

from compiled_engine.passes.experts import top_k
from compiled_engine.passes.experts.top_k import TopK
from compiled_engine.passes.framework.verifier import VerificationError
from compiled_engine.passes.invariance.batch_invariance import BatchInvariance
from compiled_engine.passes.invariance.row_moves import mixes_tokens
from compiled_engine.passes.registry import registered_passes

aten = torch.ops.aten
ours = torch.ops.compiled_engine

# Shapes of x, and k.
CASES = [((1, 1), 1), ((3, 8), 8), ((2, 3, 5), 2), ((4, 100), 32), ((5, 64), 4), ((2, 1024), 8), ((3, 4, 2), 1)]


def assert_chooses_as_torch(x: torch.Tensor, k: int) -> None:
    with nan_in_new_tensors():
        values, indices = top_k.launch(x, k)
    # A stable sort on the CPU has the first of equal elements first; on a GPU, NaN of both signs differ.
    expected, order = torch.sort(x.cpu(), dim=-1, descending=True, stable=True)
    torch.testing.assert_close(values.cpu(), expected[..., :k], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(indices.cpu(), order[..., :k])
    torch.testing.assert_close(values.cpu(), torch.topk(x.cpu(), k).values, rtol=0, atol=0, equal_nan=True)


def check(shape: tuple[int, ...], k: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Check random rows, and rows of few numbers: zeros of both signs, infinities and NaN."""
    generator = torch.Generator().manual_seed(0)
    few = torch.tensor([0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), -float("nan")])
    drawn = few[torch.randint(len(few), shape, generator=generator)]
    for x in (torch.randn(shape, generator=generator), drawn, torch.full(shape, -float("inf"))):
        assert_chooses_as_torch(x.to(device, dtype), k)
    wide = torch.randn((*shape[:-1], 2 * shape[-1]), generator=generator).to(device, dtype)
    part = wide[..., : shape[-1]]
    for x in (part, wide[..., ::2], part.transpose(0, -1).contiguous().transpose(0, -1)):
        assert_chooses_as_torch(x, k)


def test_indices_are_in_range_where_the_kernel_is_only_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's ops that gather by them still run."""

    class Compiled:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *arguments, **options: None

    monkeypatch.setattr(top_k, "top_k_kernel", Compiled())
    monkeypatch.setattr(top_k, "leaves_out_launches", lambda: True)
    with nan_in_new_tensors():
        _, indices = top_k.launch(torch.ones(3, 8), 2)
    assert indices.tolist() == [[0, 0]] * 3


INTERPRETED = """
import torch
from test_top_k import CASES, check

for shape, k in CASES:
    for dtype in (torch.float32, torch.bfloat16):
        check(shape, k, dtype)
print("right")
"""


def test_in_the_interpreter() -> None:
    process = interpret(__file__, "-c", INTERPRETED)
    assert process.stdout.strip() == "right", process.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("shape", "k"), [*CASES, ((513, 256), 8)])
def test_on_a_gpu(shape: tuple[int, ...], k: int, dtype: torch.dtype) -> None:
    check(shape, k, dtype, "cuda")


@pytest.mark.parametrize(("num_elements", "k"), [(64, 4), (1024, 32)])
def test_compiled_for_hopper(num_elements: int, k: int) -> None:
    """Needs no GPU."""
    constants = {"NUM_ELEMENTS": num_elements, "TOP_K": k, "BLOCK_E": num_elements, "BLOCK_X": k}
    types = {"x_ptr": "*fp32", "values_ptr": "*fp32", "indices_ptr": "*i64"}
    program = compiled_for_hopper(
        top_k.top_k_kernel, constants | {"DEPENDENT_LAUNCH": 1}, types, aligned=tuple(types), num_warps=1
    )
    assert "griddepcontrol.wait" in program.asm["ptx"]


Choice = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
CHOICES: dict[str, Choice] = {
    "of the last dimension": lambda x: torch.topk(x, 3),
    "by its number, in no order": lambda x: torch.topk(x, 3, dim=2, sorted=False),
    "of 16 bits": lambda x: torch.topk(x.bfloat16(), 8),
}
OTHERS: dict[str, tuple[Choice, str]] = {
    "the smallest": (lambda x: torch.topk(x, 3, largest=False), "smallest"),
    "of another dimension": (lambda x: torch.topk(x, 1, dim=1), "dimension 1"),
    "of 64 bits": (lambda x: torch.topk(x.double(), 3), "float64"),
    "of integers": (lambda x: torch.topk(x.long(), 3), "int64"),
    "many": (lambda x: torch.topk(x.expand(2, 7, 8).reshape(1, 112), 33), "33 of 112"),
    "of a long row": (lambda x: torch.topk(x.repeat(1, 1, 200), 3), "3 of 1600"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_top_k_is_replaced(name: str) -> None:
    x = random_tensors(x=(2, 7, 8))
    module = graph_of(CHOICES[name], x, {})
    assert rewrite(TopK(), module).matches == 1
    assert (count(module, aten.topk.default), count(module, ours.top_k.default)) == (0, 1)
    expected = CHOICES[name](**x)
    values, indices = run(module, x)
    assert torch.equal(values, expected[0].sort(descending=True).values)
    assert (indices.dtype, indices.shape) == (torch.int64, expected[1].shape)


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name: str) -> None:
    choice, reason = OTHERS[name]
    result = rewrite(TopK(), graph_of(choice, random_tensors(x=(2, 7, 8)), {}))
    assert result.matches == 0
    assert reason in result.near_misses[0]


def the_largest_twice(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, indices = torch.topk(x, 1)
    return values.expand(-1, -1, k), indices.expand(-1, -1, k)


WRONG: dict[str, Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]] = {
    "the smallest": lambda x, k: torch.topk(x, k, largest=False),
    "indices of others": lambda x, k: (torch.topk(x, k).values, torch.topk(x, k).indices.flip(-1)),
    "the largest twice": the_largest_twice,
}


@pytest.mark.parametrize("name", WRONG)
def test_an_op_that_chooses_others_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = graph_of(CHOICES["of the last dimension"], random_tensors(x=(2, 7, 8)), {})
    result = TopK().run(module.graph)
    assert TopK().verify(module.graph, result, DYNAMIC, CPU) == 1
    monkeypatch.setattr(top_k, "top_k", WRONG[name])
    with pytest.raises(VerificationError, match="chooses other elements"):
        TopK().verify(module.graph, result, DYNAMIC, CPU)


def test_batch_invariant_models_may_have_it() -> None:
    """A row is a token, or a group of its experts; tokens are not chosen among."""
    module = graph_of(CHOICES["of the last dimension"], random_tensors(x=(2, 7, 8)), {})
    assert TopK().run(module.graph).matches == 1
    assert BatchInvariance().run(module.graph).matches == 0
    graph = graph_for(GLM4_MOE, torch.float32, DYNAMIC)
    assert TopK().run(graph).matches == 3
    assert not any(map(mixes_tokens, graph.find_nodes(op="call_function", target=ours.top_k.default)))


ONE_GROUP = (("n_group", 1), ("topk_group", 1))


@pytest.mark.parametrize(
    ("family", "num_left"),
    [
        (GLM4_MOE, 1),
        (Family("Glm4MoeLiteForCausalLM", foreign="glm4_moe_lite", changes=ONE_GROUP), 1),
        (Family("DeepseekV3ForCausalLM", foreign="deepseek_v3", changes=ONE_GROUP), 1),
        (Family("DeepseekV3ForCausalLM", foreign="deepseek_v3"), 3),
    ],
    ids=str,
)
def test_choosing_the_only_group_costs_nothing(family: Family, num_left: int) -> None:
    """The graph has one layer with experts."""
    graph = graph_for(family, torch.float32, DYNAMIC)
    assert len(graph.find_nodes(op="call_function", target=aten.topk.default)) == 3
    run_on(graph, DYNAMIC, registered_passes(), verify=False)
    assert TopK().run(graph).matches == num_left

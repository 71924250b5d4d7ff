"""The slots that the pass adapters gives linears, whose adapters they hold, and which slot a token has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from pass_cases import DYNAMIC, Tensors, graph_of, random_tensors
from torch import fx

from compiled_engine.config import AdapterConfig
from compiled_engine.passes.framework.graph_inputs import is_parameter, parameter_of, source_of
from compiled_engine.passes.framework.matching import named
from compiled_engine.passes.framework.parameter import KEPT, Parameter
from compiled_engine.passes.linear.adapter_add import adapter_add, reference
from compiled_engine.passes.linear.adapters import ADAPTER_SLOT, ADAPTER_SLOTS, Adapters, site_of
from compiled_engine.passes.linear.merge_linears import MergeLinears

SLOTS, RANK = 3, 4
Q, K, OUT, HEAD = "layers.0.q.weight", "layers.0.k.weight", "layers.0.o.weight", "lm_head.weight"


def block(x: torch.Tensor, adapter_slots_T: torch.Tensor, **w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    q, k = x @ w[Q].t(), torch.nn.functional.linear(x, w[K], w.get("layers.0.k.bias"))
    return q, (k.exp() @ w[OUT].t()) @ w[HEAD].t()


def adapted() -> tuple[fx.GraphModule, Any, Tensors]:
    arguments: Tensors = random_tensors(x=(5, 8)) | {ADAPTER_SLOTS.name: torch.tensor([0, -1, 2, 2, 1]).int()}
    weights = random_tensors(**{Q: (12, 8), K: (6, 8), OUT: (10, 6), HEAD: (7, 10)})
    module = graph_of(block, arguments, weights)
    MergeLinears().run(module.graph)
    graph_pass = Adapters(AdapterConfig(max_loras=SLOTS, max_lora_rank=RANK, max_cpu_loras=SLOTS))
    assert graph_pass.contract(module.graph, DYNAMIC) == 3
    result = graph_pass.run(module.graph)
    module.graph.lint()
    return module, result, arguments | weights


def described(graph: fx.Graph) -> dict[str, Parameter]:
    return {parameter_of(node).name: parameter_of(node) for node in graph.nodes if is_parameter(node)}


def test_each_linear_has_slots_of_its_size() -> None:
    module, result, _ = adapted()
    assert (result.matches, result.near_misses, len(result.replacements)) == (3, (), 3)
    found = described(module.graph)
    both = "layers.0.{q,k}.weight"
    for name, members, rows, k in ((both, 2, 18, 8), (OUT, 1, 10, 6), (HEAD, 1, 7, 10)):
        assert found[f"{name}.lora_a"] == Parameter(f"{name}.lora_a", (SLOTS, members * RANK, k), "float32", KEPT)
        assert found[f"{name}.lora_b"] == Parameter(f"{name}.lora_b", (SLOTS, rows, RANK), "float32", KEPT)
        assert found[f"{name}.lora_ranks"] == Parameter(f"{name}.lora_ranks", (SLOTS, members), "int32", KEPT)
    sizes = [list(named(call)["sizes"]) for call in module.graph.find_nodes(op="call_function", target=adapter_add)]
    assert sizes == [[12, 6], [10], [7]]


def test_a_graph_with_slots_adds_the_adapters_of_its_tokens() -> None:
    module, _, given = adapted()
    generator = torch.Generator().manual_seed(0)
    found = described(module.graph)
    kept: Tensors = {
        name: torch.randint(RANK + 1, each.shape, generator=generator).int()
        if each.dtype == "int32"
        else torch.randn(each.shape, generator=generator)
        for name, each in found.items()
        if each.role == KEPT
    }
    both = "layers.0.{q,k}.weight"
    packed = {both: torch.cat((given[Q], given[K]))}
    values = [(given | kept | packed)[source_of(n).name] for n in module.graph.find_nodes(op="placeholder")]
    q, last = fx.GraphModule({}, module.graph)(*values)

    def slots(name: str) -> tuple[torch.Tensor, ...]:
        return kept[f"{name}.lora_a"], kept[f"{name}.lora_b"], kept[f"{name}.lora_ranks"]

    x, slots_T = given["x"], given[ADAPTER_SLOTS.name]
    qk = reference(x @ packed[both].t(), x, *slots(both), slots_T, [12, 6])
    hidden = qk[:, 12:].exp()
    out = reference(hidden @ given[OUT].t(), hidden, *slots(OUT), slots_T, [10])
    expected = reference(out @ given[HEAD].t(), out, *slots(HEAD), slots_T, [7])
    torch.testing.assert_close(q, qk[:, :12])
    torch.testing.assert_close(last, expected, rtol=1e-4, atol=1e-4)


def test_the_runner_finds_whose_adapters_a_slot_holds() -> None:
    found = described(adapted()[0].graph)
    sites = {name: site_of(each, found) for name, each in found.items()}
    both = "layers.0.{q,k}.weight"
    assert {name: [leaf.name for leaf in site] for name, site in sites.items() if site is not None} == {
        f"{both}.lora_a": [Q, K],
        f"{OUT}.lora_a": [OUT],
        f"{HEAD}.lora_a": [HEAD],
    }
    # A parameter of the model may be called so too.
    assert site_of(Parameter("layers.0.w.lora_a", (2, 2), "float32"), found) is None


def test_a_linear_that_is_not_known_is_a_near_miss() -> None:
    arguments: Tensors = random_tensors(x=(5, 8), y=(5, 12)) | {ADAPTER_SLOTS.name: torch.zeros(5).int()}
    module = graph_of(
        lambda x, y, adapter_slots_T, **w: (torch.addmm(y, x, w[Q].t()),), arguments, random_tensors(**{Q: (12, 8)})
    )
    graph_pass = Adapters(AdapterConfig(max_loras=SLOTS, max_lora_rank=RANK, max_cpu_loras=SLOTS))
    assert graph_pass.contract(module.graph, DYNAMIC) == 1
    result = graph_pass.run(module.graph)
    assert (result.matches, result.near_misses) == (0, ("addmm: what is added is not a bias vector",))


def test_a_token_has_the_slot_of_its_request() -> None:
    """Padding rows take any."""
    states = SimpleNamespace(fields={ADAPTER_SLOT: torch.tensor([5, -1, 7, 9], dtype=torch.int32)})
    step = {
        "rows_R": torch.tensor([2, 1, 3, -1], dtype=torch.int32),
        "positions_T": torch.zeros(6, dtype=torch.int64),
        "attention_inputs.query_start_loc_R1": torch.tensor([0, 1, 3, 6, 6], dtype=torch.int32),
    }
    assert ADAPTER_SLOTS.fill is not None
    slots_T = ADAPTER_SLOTS.fill(step, states)
    assert (slots_T.tolist(), slots_T.dtype) == ([7, -1, -1, 9, 9, 9], torch.int32)
    assert (ADAPTER_SLOTS.padding, ADAPTER_SLOTS.variants, ADAPTER_SLOTS.dims) == (-1, ("adapted",), ("tokens",))

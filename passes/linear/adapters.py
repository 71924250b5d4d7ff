"""Adds the requests' LoRA adapters to each linear: B(Ax) with A and B from the slot of the token's adapter.

The pass runs right after merge_linears, so that q, k and v, or gate and up, share one matrix product with A. It runs
before the passes that fuse a linear with its neighbours, since the adapter is added after a norm and before an
activation. If a linear's input is sharded, the columns of A are too, and the linear's all-reduce completes both.

Slots are parameters that the engine's model runner fills (see `site_of`). The pass only runs in a separate variant of
the forward (graphs/compiler/signature.py), so steps without adapters run unchanged code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from compiled_engine.attention.inputs import StepTensor, request_of_tokens
from compiled_engine.config import AdapterConfig
from compiled_engine.passes.framework.graph_inputs import add_parameter, argument, parameter_of
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import emit, named
from compiled_engine.passes.framework.parameter import KEPT, Parameter
from compiled_engine.passes.framework.verifier import VerificationError, difference
from compiled_engine.passes.linear.adapter_add import TOKEN_COUNTS, adapter_add, reference
from compiled_engine.passes.linear.linears import linear_of, multiplied_values, why_no_linear

# The forward's variant for steps in which a request has an adapter.
ADAPTED = "adapted"
# Row field: the slot of a request's adapter, -1 without one.
ADAPTER_SLOT = "adapter_slot"
# Suffixes of a linear's kept parameters, after its weight's name.
MATRIX_A, MATRIX_B, RANKS = ".lora_a", ".lora_b", ".lora_ranks"
# Most tokens in a check.
_MOST_TOKENS = 32


def _slots_of_tokens(step: Mapping[str, torch.Tensor], states: Any) -> torch.Tensor:
    slots_R = states.fields[ADAPTER_SLOT][step["rows_R"].clamp(min=0).long()]
    return slots_R[request_of_tokens(step)]


ADAPTER_SLOTS = StepTensor(
    "adapter_slots_T",
    ("tokens",),
    torch.int32,
    padding=-1,
    fill=_slots_of_tokens,
    variants=(ADAPTED,),
    by_logits=True,
)


class Adapters(GraphPass):
    name = "adapters"
    required = True
    kernel_token_counts = TOKEN_COUNTS

    def __init__(self, config: AdapterConfig):
        self._config = config

    def step_tensors(self) -> tuple[StepTensor, ...]:
        return (ADAPTER_SLOTS,)

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return the number of values that are multiplied by a weight matrix.

        merge_linears leaves one linear, and so one match, per value.
        """
        return len(multiplied_values(graph))

    def run(self, graph: fx.Graph) -> PassResult:
        slots_T = argument(graph, ADAPTER_SLOTS.name)
        near_misses: list[str] = []
        replacements: list[Replacement] = []
        for node in list(graph.nodes):
            linear = linear_of(node)
            if linear is None:
                near_misses += [] if (reason := why_no_linear(node)) is None else [f"{node.name}: {reason}"]
                continue
            weight = parameter_of(linear.weight)
            kept = slots_of(weight, linear.x.meta["val"].shape[1], linear.x.meta["val"].dtype, self._config)
            slots = [add_parameter(graph, parameter) for parameter in kept]
            with graph.inserting_after(node):
                sizes = [leaf.shape[0] for leaf in _members(weight)]
                added = emit(graph, adapter_add, node, linear.x, *slots, slots_T, sizes)
            node.replace_all_uses_with(added, delete_user_cb=lambda user, added=added: user is not added)
            replacements.append(Replacement(node.name, added))
        return PassResult(len(replacements), tuple(near_misses), tuple(replacements))

    def verify(
        self, graph: fx.Graph, result: PassResult, compile_range: CompileRange, device: torch.device
    ) -> int | None:
        """Check that each adapter op reads its linear's slots and input, and that its kernels are right on random data.

        Raises VerificationError otherwise. Returns None, so that the caller compares the replacements too. That
        comparison alone would not show these errors, since batches for verification have no adapters.
        """
        for node in graph.find_nodes(op="call_function", target=adapter_add):
            _verify(node, min(compile_range.high, _MOST_TOKENS), device)
        return None


def site_of(parameter: Parameter, described: Mapping[str, Parameter]) -> tuple[Parameter, ...] | None:
    """Return the weights whose adapters `parameter` holds, if it is a matrix A that this pass added; otherwise None.

    For a merged linear these are the weights of all its members, in order. described: the graph's parameters by name.
    """
    name = parameter.name.removesuffix(MATRIX_A)
    return _members(described[name]) if parameter.role == KEPT and name != parameter.name else None


def slots_of(weight: Parameter, k: int, dtype: torch.dtype, config: AdapterConfig) -> tuple[Parameter, ...]:
    """Return descriptions of the parameters that hold the adapters of a linear: A, B and the ranks in use.

    weight: the linear's weight. k: number of the linear's inputs. dtype: dtype of A and B.
    """
    slots, rank, members = config.max_loras, config.max_lora_rank, len(_members(weight))
    name = str(dtype).removeprefix("torch.")
    return (
        Parameter(weight.name + MATRIX_A, (slots, members * rank, k), name, KEPT),
        Parameter(weight.name + MATRIX_B, (slots, weight.shape[0], rank), name, KEPT),
        Parameter(weight.name + RANKS, (slots, members), "int32", KEPT),
    )


def _verify(node: fx.Node, num_tokens: int, device: torch.device) -> None:
    arguments = named(node)
    linear = linear_of(arguments["y_TN"])
    if linear is None or linear.x is not arguments["x_TK"]:
        raise VerificationError(f"pass adapters: {node.name} adds to the linear of another input")
    weight = parameter_of(linear.weight)
    slots = [parameter_of(arguments[name]) for name in ("a_SRK", "b_SNR", "ranks_SM")]
    sizes = [leaf.shape[0] for leaf in _members(weight)]
    names = [weight.name + suffix for suffix in (MATRIX_A, MATRIX_B, RANKS)]
    if [each.name for each in slots] != names or list(arguments["sizes"]) != sizes:
        raise VerificationError(f"pass adapters: {node.name} has slots of another linear than {weight.name}")
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype) / shape[-1] ** 0.5

    a, b, ranks = slots
    x_TK = normal(num_tokens, a.shape[2], dtype=a.torch_dtype)
    y_TN = normal(num_tokens, b.shape[1], dtype=a.torch_dtype)
    a_SRK, b_SNR = (normal(*each.shape, dtype=each.torch_dtype) for each in (a, b))
    ranks_SM = torch.randint(b.shape[2] + 1, ranks.shape, generator=generator, dtype=torch.int32).to(device)
    slots_T = torch.randint(-1, len(ranks_SM), (num_tokens,), generator=generator, dtype=torch.int32).to(device)
    expected, found = (
        function(y_TN, x_TK, a_SRK, b_SNR, ranks_SM, slots_T, sizes) for function in (reference, adapter_add)
    )
    wide = y_TN.float(), x_TK.float(), a_SRK.float(), b_SNR.float()
    problem = difference(expected, reference(*wide, ranks_SM, slots_T, sizes), found)
    if problem is not None:
        raise VerificationError(f"pass adapters: {node.name} {problem}")


def _members(weight: Parameter) -> tuple[Parameter, ...]:
    return tuple(weight.leaves())

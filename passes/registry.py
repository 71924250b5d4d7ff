"""The ordered list of passes, built-in and registered by users."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Sequence
from importlib import import_module

from compiled_engine.attention.inputs import FORWARD_ARGUMENTS, StepTensor
from compiled_engine.attention.op import ATTENTION_OPS
from compiled_engine.config import EngineConfig
from compiled_engine.passes.experts.experts import Experts
from compiled_engine.passes.experts.top_k import TopK
from compiled_engine.passes.framework.graph_pass import GraphPass, SplittingOp
from compiled_engine.passes.invariance.batch_invariance import BatchInvariance
from compiled_engine.passes.layout.no_op_elimination import NoOpElimination
from compiled_engine.passes.linear.adapters import Adapters
from compiled_engine.passes.linear.gated_linear import GatedLinear
from compiled_engine.passes.linear.merge_linears import MergeLinears
from compiled_engine.passes.linear.silu_mul import SiluMul
from compiled_engine.passes.linear.small_batch_linear import SmallBatchLinear
from compiled_engine.passes.norm.layer_norm import LayerNorm
from compiled_engine.passes.norm.residual_rms_norm import ResidualRMSNorm
from compiled_engine.passes.norm.rms_norm import RMSNorm
from compiled_engine.passes.parallel.all_reduce_residual_rms_norm import AllReduceResidualRMSNorm
from compiled_engine.passes.parallel.sequence_parallel import SequenceParallel
from compiled_engine.passes.parallel.tensor_parallel import TensorParallel
from compiled_engine.passes.quantised.quantise import Quantise
from compiled_engine.passes.quantised.quantise_activations import QuantiseActivations
from compiled_engine.passes.quantised.reorder_codes import ReorderCodes
from compiled_engine.passes.recurrence.gated_convolution import GatedConvolution
from compiled_engine.passes.rope.rope_angles import RopeAngles
from compiled_engine.passes.rope.rope_attend import RopeAttend
from compiled_engine.passes.rope.rope_kv_write import RopeKVWrite
from compiled_engine.recurrence.op import RECURRENCE_OPS

DEFAULT_PASSES: tuple[GraphPass, ...] = (
    NoOpElimination(),
    MergeLinears(),
    Experts(),
    TopK(),
    ResidualRMSNorm(),
    AllReduceResidualRMSNorm(),
    SequenceParallel(),
    RMSNorm(),
    LayerNorm(),
    RopeAngles(),
    RopeKVWrite(),
    RopeAttend(),
    GatedConvolution(),
    SiluMul(),
    SmallBatchLinear(),
    GatedLinear(),
    QuantiseActivations(),
    ReorderCodes(),
)

# Suffix of a step tensor's name, by its first dimension.
_SUFFIXES: dict[tuple[int | str, ...], str] = {("tokens",): "T", ("requests",): "R"}

# Modules of ops that models call, and that Inductor leaves as they are.
_OPS_OF_MODELS = ("compiled_engine.passes.speech.cross_attention",)

# The list that register_pass changes, the only mutable global of the project.
_registered: list[GraphPass] = list(DEFAULT_PASSES)


def registered_passes() -> tuple[GraphPass, ...]:
    """Return all passes, in the order in which they run."""
    return tuple(_registered)


def load_plugins(modules: Sequence[str]) -> None:
    """Import modules that call register_pass. Raises ValueError if a module cannot be imported."""
    for name in modules:
        try:
            import_module(name)
        except Exception as error:
            raise ValueError(
                f"plugins has {name!r}, which cannot be imported ({type(error).__name__}: {error}); "
                "allowed: modules on Python's path"
            ) from error


def check_registered(names: Collection[str]) -> None:
    """Raise ValueError if an enabled pass is not registered in this process. names: the enabled passes' names."""
    known = [graph_pass.name for graph_pass in _registered]
    if missing := [name for name in names if name not in known]:
        raise ValueError(
            f"passes has {missing[0]!r}, which was registered in another process than this one; "
            "allowed: with plugins=('the module that registers it',)"
        )


def passes_of_ranks() -> frozenset[str]:
    """Return the names of the passes that apply only under tensor parallelism (they require `tensor_parallel`)."""
    return frozenset(p.name for p in _registered if TensorParallel.name in p.requires)


def passes_of_quantised() -> frozenset[str]:
    """Return the names of the passes that apply only to models with quantised linears (they require `quantise`)."""
    return frozenset(p.name for p in _registered if Quantise.name in p.requires)


def kernel_token_counts(config: EngineConfig) -> tuple[int, ...]:
    """Return the token counts, ascending, at which an enabled pass switches to another kernel.

    A count is the largest number of tokens that one kernel serves; a batch of one more token uses the next kernel.
    """
    enabled: list[GraphPass] = [p for p in _registered if p.name in config.compile.passes]
    if config.adapters is not None:
        enabled.append(Adapters(config.adapters))
    if config.batch_invariant:
        enabled.append(BatchInvariance())
    return tuple(sorted({count for p in enabled for count in p.kernel_token_counts}))


def splitting_ops() -> dict[str, SplittingOp]:
    """Return the ops that graphs are split at, because they write to their arguments, by op name.

    The attention and recurrence ops, which models call, come first; ops that passes insert follow.
    """
    of_models = [SplittingOp(name, function, attends=True) for name, function in ATTENTION_OPS.items()]
    of_models += [SplittingOp(name, function) for name, function in RECURRENCE_OPS.items()]
    of_passes = [op for graph_pass in _registered for op in graph_pass.splitting_ops]
    return {op.name: op for op in (*of_models, *of_passes)}


def step_tensors(names: Collection[str]) -> tuple[StepTensor, ...]:
    """Return descriptions of the inputs that the passes named `names` add to the forward, without duplicates.

    Raises ValueError for an invalid description, or if two passes describe a tensor of the same name differently.
    """
    found: dict[str, StepTensor] = {}
    for graph_pass in _registered:
        for tensor in graph_pass.step_tensors() if graph_pass.name in names else ():
            place = f"pass {graph_pass.name}: step tensor {tensor.name!r}"
            suffix = _SUFFIXES.get(tensor.dims[:1])
            if suffix is None or any(isinstance(dim, str) for dim in tensor.dims[1:]):
                raise ValueError(f"{place}: dims is {tensor.dims}; allowed: 'tokens' or 'requests', then numbers")
            if not re.fullmatch(rf"[a-z]\w*_{suffix}\w*", tensor.name) or tensor.name in FORWARD_ARGUMENTS:
                taken = ", ".join(FORWARD_ARGUMENTS)
                raise ValueError(f"{place}: name must end in its shape, as slots_R does, and be none of {taken}")
            if tensor.fill is None or tensor.on_host:
                raise ValueError(f"{place}: fill must be a function, and on_host False")
            if found.setdefault(tensor.name, tensor) != tensor:
                raise ValueError(f"{place}: another pass declares it differently")
    return tuple(found.values())


def register_pass(graph_pass: GraphPass, *, after: str | None = None) -> None:
    """Add a pass to every engine built from now on. It runs directly after the pass named `after`; None: last.

    Raises ValueError if the name is taken or `after` is unknown, TypeError if `graph_pass` is not a pass.
    """
    if not isinstance(graph_pass, GraphPass) or not hasattr(graph_pass, "name"):
        raise TypeError(f"graph_pass is {graph_pass!r}; allowed: a GraphPass with a name; see docs/passes.md")
    names = [known.name for known in _registered]
    if graph_pass.name in names:
        raise ValueError(f"name is {graph_pass.name!r}, which is taken; allowed: none of {', '.join(names)}")
    if after is not None and after not in names:
        raise ValueError(f"after is {after!r}; allowed: {', '.join(names)}")
    _registered.insert(len(names) if after is None else names.index(after) + 1, graph_pass)


def unregister_pass(name: str) -> None:
    """Undo `register_pass`. Raises ValueError if no user registered a pass of this name."""
    own = [graph_pass for graph_pass in _registered if graph_pass not in DEFAULT_PASSES]
    found = next((graph_pass for graph_pass in own if graph_pass.name == name), None)
    if found is None:
        raise ValueError(f"name is {name!r}; allowed: {', '.join(p.name for p in own) or 'nothing is registered'}")
    _registered.remove(found)


def op_modules() -> tuple[str, ...]:
    """Return the names of the modules that define passes, their ops, and other ops of compiled graphs, sorted.

    Processes that compile parts of a graph import these modules. Passes from a script or notebook (`__main__`) are left
    out, since other processes cannot import them.
    """
    modules = {type(graph_pass).__module__ for graph_pass in _registered}
    found = (name for name in modules if name != "__main__" and hasattr(sys.modules[name], "__file__"))
    return tuple(sorted((*found, *_OPS_OF_MODELS)))

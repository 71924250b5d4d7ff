"""Replaces the linears that the model's quantisation rules name by quantised ones.

Why: with few tokens a linear costs the read of its weight, which is half in FP8 and a quarter in four bits; with many,
FP8 matrix products are twice as fast. Model files need no change: codes and scales take the place of their weights as
parameters, read from the checkpoint or made from its weight while loading.

The pass changes what the graph computes, so it runs before the fusing passes, which see an ordinary linear, and cannot
be disabled. It runs after tensor_parallel and sees a rank's part of each weight. Tiles, whose elements share a scale,
are cut smaller if the part does not end with a tile. This changes no value of a checkpoint that is quantised already.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import fx

from compiled_engine.attention.op import LATENT_ATTENTION
from compiled_engine.parallel.shards import Section, Shard
from compiled_engine.passes.framework.graph_inputs import is_parameter, parameter_of
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import aten, fake_mode_of
from compiled_engine.passes.framework.op_library import PLAIN
from compiled_engine.passes.framework.parameter import CODES, COLUMNS, INPUT_SCALE, SCALES, WEIGHT, ZEROS, Parameter
from compiled_engine.passes.linear.linears import Linear, Quantised, emit_linear, linear_of
from compiled_engine.passes.linear.quantised_kernels import capability_of, describe_kernels
from compiled_engine.passes.parallel.tensor_parallel import vocabulary_part
from compiled_engine.quantisation import LinearScheme, Quantisation, Rounding


class Quantise(GraphPass):
    name = "quantise"
    required = True  # ignoring a rule makes results wrong

    def __init__(self, quantisation: Quantisation, num_ranks: int = 1, before: fx.Graph | None = None):
        """Make the pass. num_ranks: tensor-parallel ranks. before: a copy of the graph, which only `verify` reads."""
        self._quantisation, self._num_ranks, self._before = quantisation, num_ranks, before

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return the number of weight matrices that the rules name: one match each.

        Matrices that are decoded while loading are not counted: embeddings, and matrices of which the graph reads
        parts, as in latent attention.
        """
        inputs = graph.find_nodes(op="placeholder")
        weights = [node for node in inputs if scheme_of(self._quantisation, node) is not None]
        return sum(not is_looked_up(weight) and not is_read_in_parts(weight) for weight in weights)

    def run(self, graph: fx.Graph) -> PassResult:
        replacements: list[Replacement] = []
        notes: list[str] = []
        for node in list(graph.nodes):
            linear = linear_of(node)
            if linear is None or linear.format != PLAIN:
                continue
            weight = parameter_of(linear.weight)
            module = weight.name.removesuffix(".weight")
            stated = self._quantisation.of_parameter(weight.name, (module,))
            reason = stated if isinstance(stated, str) else _obstacle(stated, weight)
            scheme = scheme_of(self._quantisation, linear.weight)
            if scheme is None:
                notes.append(f"{module}: stays {weight.dtype}: {reason}")
                continue
            scheme = scheme.dividing(*_sizes(weight))
            new = _rewrite(graph, linear, scheme, self._quantisation.is_online)
            replacements.append(Replacement(node.name, new))
            notes.append(self._note(module, weight, scheme, linear))
        _erase_unused(graph)
        return PassResult(len(replacements), (), tuple(replacements), tuple(notes))

    def _note(self, module: str, weight: Parameter, scheme: LinearScheme, linear: Linear) -> str:
        rows, k = weight.shape
        tiles = math.prod(scheme.weight.grid(rows, k))
        nbytes = math.prod(scheme.weight.stored(rows, k)) + (4 + scheme.weight.format.has_zeros) * tiles
        x_TK, kernels = linear.x.meta["val"], "plain torch"
        if x_TK.device.type == "cuda":
            capability = capability_of(x_TK.device)
            kernels = describe_kernels(capability, rows, k, linear.bias is not None, scheme, x_TK.dtype)
        source = "made while it is loaded" if self._quantisation.is_online else self._quantisation.method
        alone = "; weights alone, inputs are not rounded" if scheme.inputs is None else ""
        return f"{module}: {scheme}{alone}; {source}; {nbytes:,} bytes; {kernels}"

    def verify(self, graph: fx.Graph, result: PassResult, compile_range: CompileRange, device: torch.device) -> int:
        """Compare each quantised linear, on each rank, with the values of a random checkpoint; see quantise_verifier.

        Returns the number of linears compared.
        """
        from compiled_engine.passes.quantised.quantise_verifier import verify_quantised

        assert self._before is not None
        return verify_quantised(self._before, result, self._quantisation, self._num_ranks, device)


def scheme_of(quantisation: Quantisation, node: fx.Node) -> LinearScheme | None:
    """Return the scheme that the rules give the weight matrix of a linear. node: the matrix, an input of the graph.

    Returns None for other inputs of the graph, for a matrix that no rule names, and for one that cannot stay quantised.
    """
    if not is_parameter(node) or node.meta["val"].dim() != 2 or not parameter_of(node).name.endswith(".weight"):
        return None
    name = parameter_of(node).name
    scheme = quantisation.of_parameter(name, (name.removesuffix(".weight"),))
    return None if isinstance(scheme, str) or _obstacle(scheme, parameter_of(node)) else scheme


def _obstacle(scheme: LinearScheme, weight: Parameter) -> str | None:
    """Return why a weight that the rules name is decoded when it is loaded; None if it stays quantised."""
    columns, per_byte = weight.shape[1], scheme.weight.format.per_byte
    if columns % per_byte:
        return f"{columns} columns do not fill bytes of {per_byte} codes"
    if scheme.reordered and weight.shard is not None and weight.shard.divides_input:
        return "its columns are divided among ranks, and reordered"
    return None


def is_looked_up(weight: fx.Node) -> bool:
    """Return whether an embedding or an index reads rows of the parameter. Tied linears may read the parameter, too."""
    return any(user.target in _EMBEDDINGS for user in weight.users)


def is_read_in_parts(weight: fx.Node) -> bool:
    """Return whether an op reads parts of the matrix, as latent attention does, instead of multiplying by it."""
    return any(user.target is LATENT_ATTENTION for user in weight.users)


_EMBEDDINGS = (aten.embedding.default, aten.index.Tensor, vocabulary_part)


def _sizes(weight: Parameter) -> tuple[int, int]:
    """Return the (rows, columns) that a tile's rows and columns must divide; 0: any size is allowed.

    The rows of a merged weight are sections, one for each linear, and every rank has a part of each section. A tile
    must not cross the border between two parts, or between two ranks' columns.
    """
    shard = weight.shard
    if shard is None or shard.dim is None:
        return weight.shape[0], 0
    if shard.divides_input:
        return weight.shape[0], weight.shape[1]
    return math.gcd(*(length // parts for length, parts in shard.sections)), 0


def _rewrite(graph: fx.Graph, linear: Linear, scheme: LinearScheme, is_online: bool) -> fx.Node:
    weight, like = parameter_of(linear.weight), linear.weight.meta["val"]
    grid, text = scheme.weight.grid(*weight.shape), str(scheme)
    stored = scheme.weight.stored(*weight.shape)
    codes = Parameter(f"{weight.name}.{CODES}", stored, _name(scheme.weight.dtype), CODES, scheme=text)
    scales = Parameter(f"{weight.name}.{SCALES}", grid, "float32", SCALES, scheme=text)
    if is_online:
        codes, scales = (
            replace(each, role=WEIGHT, members=(weight,), make=((each.role, text),), scheme="")
            for each in (codes, scales)
        )
    elif weight.shard is not None:
        codes = replace(codes, shard=shard_of_tiles(weight.shard, 1, scheme.weight.format.per_byte))
        scales = replace(scales, shard=scales_shard(weight.shard, scheme))
    with graph.inserting_before(linear.weight):
        nodes = [_placeholder(graph, each, like) for each in (codes, scales)]
        zeros = input_scale = None
        if scheme.weight.format.has_zeros:
            own = replace(scales, name=f"{weight.name}.{ZEROS}", dtype="uint8", role=ZEROS)
            zeros = _placeholder(graph, own, like)
        if scheme.inputs is not None and scheme.inputs.static:
            own = Parameter(f"{weight.name}.{INPUT_SCALE}", (1,), "float32", INPUT_SCALE, scheme=text)
            input_scale = _placeholder(graph, own, like)
        columns = None
        if scheme.reordered:
            own = Parameter(f"{weight.name}.{COLUMNS}", (1, weight.shape[1]), "int32", COLUMNS, scheme=text)
            columns = _placeholder(graph, own, like)
    with graph.inserting_before(linear.node):
        quantised = Quantised(nodes[1], zeros, input_scale, scheme, columns)
        new = emit_linear(graph, linear.x, nodes[0], linear.bias, quantised)
    linear.node.replace_all_uses_with(new)
    graph.erase_node(linear.node)
    return new


def scales_shard(shard: Shard, scheme: LinearScheme) -> Shard:
    """Return the shard of the scales that belongs to a shard of their weight, [N, K], or [E, N, K] with E undivided.

    Tiles, whose elements share a scale, must end where the shard does.
    """
    return shard_of_tiles(shard, scheme.weight.rows, scheme.weight.columns)


def shard_of_tiles(shard: Shard, rows: int, columns: int) -> Shard:
    """Return the shard of a matrix with one element for each quantisation tile of a weight, such as scales.

    shard: the shard of the weight. rows, columns: sizes of a tile; 0: all rows or columns.
    """
    grid = Rounding("", rows, columns).grid(*shard.whole[-2:])
    whole = *shard.whole[:-2], *grid
    if shard.dim is None:
        return Shard(whole)
    tile = (rows, columns)[shard.dim - len(shard.whole)]
    if not tile:  # scales of whole rows are on every rank
        return Shard(whole)
    return Shard(whole, shard.dim, tuple(Section(s.length // tile, s.parts) for s in shard.sections))


def _placeholder(graph: fx.Graph, parameter: Parameter, like: torch.Tensor) -> fx.Node:
    node = graph.placeholder(parameter.name.replace(".", "_"))
    with fake_mode_of(like):
        node.meta["val"] = torch.empty(parameter.shape, dtype=parameter.torch_dtype, device=like.device)
    node.meta["source"] = parameter
    return node


def _erase_unused(graph: fx.Graph) -> None:
    """Erase the weights that codes replaced, and their transposes."""
    graph.eliminate_dead_code()
    for node in graph.find_nodes(op="placeholder"):
        if is_parameter(node) and not node.users:
            graph.erase_node(node)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

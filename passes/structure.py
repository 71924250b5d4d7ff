"""What a graph is made of: what the contracts of the passes follow from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Structure:
    """How often each of these is in a graph.

    batched_values: tensors with a batch of one in front. attention_values: calls of attention in foreign code.
    derived_parameters: arithmetic on one parameter alone. linear_inputs, linear_groups: values that linears read, and
    of these those that several read. sum_norms, norms: root mean square norms of whole tokens, of sums of two values
    (with that of an addend, where it has one) and of others. inner_norms: such addends. layer_norms: those of whole
    tokens, written out or not. angles: cosines of positions. turned_attentions: calls of attention whose queries come
    from such. gated_products: activations of tokens that are multiplied with another value. routers: weights
    that are put where a choice of the largest says. scalings_by_one: what it says.
    """

    batched_values: int
    attention_values: int
    derived_parameters: int
    linear_inputs: int
    linear_groups: int
    sum_norms: int
    inner_norms: int
    norms: int
    layer_norms: int
    angles: int
    turned_attentions: int
    gated_products: int
    routers: int
    scalings_by_one: int

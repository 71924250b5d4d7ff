"""Products of queries and keys in a chunk of tokens, where each element of a key decays by a number of its own.

The product of token i with an earlier token j is the sum over the elements of x_i * k_j * exp(g_{j+1} + ... + g_i).
The exponential is no factor of whole rows, so it must be divided among x_i and k_j, and exp(g_1 + ... + g_i) and
exp(-g_1 - ... - g_j) overflow where tokens decay fast. Instead each pair of tokens meets in the middle between them:
tokens are divided into blocks of 2, 4, 8 and so on. The keys of a block's first half decay to its middle, and the
queries of its second half from there. Each pair i > j is once in different halves of a block, and every exponent is a
sum of numbers g, none of which is positive.
"""

from __future__ import annotations

import torch


def products_by_element(x_2HCk: torch.Tensor, k_HCk: torch.Tensor, g_HCk: torch.Tensor) -> torch.Tensor:
    """Return the decayed products of tokens' vectors x with keys, [2, H, C, C]; see the top of the file.

    Entry [n, h, i, j] is the product of token i's n-th x with the key of token j, in head h; zero if j is later than i.
    g_HCk: logarithms of the decays, none positive.
    """
    place_C = torch.arange(k_HCk.shape[1], device=k_HCk.device)
    products_2HCC = (x_2HCk * k_HCk).sum(-1).diag_embed()
    half = 1
    while half < len(place_C):
        part_C = place_C // half
        is_second_C1 = (part_C % 2 == 1).unsqueeze(-1)
        between_CC = torch.where(is_second_C1, place_C <= place_C.unsqueeze(-1), place_C > place_C.unsqueeze(-1))
        between_CC = between_CC & (part_C == part_C.unsqueeze(-1))
        decay_HCk = (between_CC.to(g_HCk.dtype) @ g_HCk).exp()
        is_pair_CC = is_second_C1 & (part_C == part_C.unsqueeze(-1) - 1)
        products_2HCC += torch.where(is_pair_CC, (x_2HCk * decay_HCk) @ (k_HCk * decay_HCk).mT, 0)
        half *= 2
    return products_2HCC


def decays_to_end(g_HCk: torch.Tensor) -> torch.Tensor:
    """Return the factors by which each token's key decays until the chunk's last token, [H, C, k].

    g_HCk: logarithms of the decays. The g of later tokens are added up, which is more exact than the difference of two
    sums from the first token on.
    """
    later_HCk = torch.nn.functional.pad(g_HCk[:, 1:], (0, 0, 0, 1))
    return later_HCk.flip(1).cumsum(1).flip(1).exp()

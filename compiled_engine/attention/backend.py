"""Attention backends: the protocol that torch, cpp, triton and flash_attn implement, and the choice of one.

A backend is imported when it is first needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Protocol

import torch

from compiled_engine.attention.case import AttentionCase, GraphSupport, Refused, Support
from compiled_engine.attention.inputs import AttentionInputs, Rotation, Scoring

BACKENDS: tuple[str, ...] = ("torch", "cpp", "triton", "flash_attn")
# The backend of batch-invariant engines, by type of device.
INVARIANT = {"cpu": "invariant_cpp", "cuda": "invariant_triton"}
MAX_BLOCK_SIZE = 1 << 16
PACKAGES = {"torch": "torch", "cpp": "torch", "triton": "triton", "flash_attn": "flash-attn"}
PACKAGES |= {"invariant_cpp": "torch", "invariant_triton": "triton"}


class AttentionBackend(Protocol):
    """Computes attention and writes the KV cache. A backend has no state.

    `accept` says whether the backend can compute a layer's attention, and which CUDA graphs may capture its methods. By
    default, `plan` does nothing, and `attend_unrotated` returns False: no kernel takes queries before their rotation.
    """

    name: str
    default_block_size: int

    def accept(self, case: AttentionCase) -> Support:
        """Return how the backend supports `case`, a layer's attention. Raises Refused if it cannot run it here."""
        ...

    def work_length(self, num_tokens: int, num_requests: int, case: AttentionCase) -> int:
        """Return the length of the plan `work_W` for batches of up to num_tokens tokens and num_requests requests.

        work_W: see AttentionInputs; its length is 0 if `plan` does nothing.
        """
        return 0

    def plan(self, inputs: AttentionInputs, case: AttentionCase) -> None:
        """Plan the work of all of a step's `attend` calls, and write the plan to `inputs.work_W`.

        All inputs but host_3 must be on the device.
        """
        return

    def write_kv(
        self,
        k_TKd: torch.Tensor,
        v_TKd: torch.Tensor,
        kv_cache_N2PKd: torch.Tensor,
        slot_mapping_T: torch.Tensor,
        kv_scales_2K: torch.Tensor | None = None,
    ) -> None:
        """Store each token's K (index 0 of the cache's dim 1) and V (index 1) at its slot; slot -1 stores nothing.

        For an 8-bit cache, K and V are quantised, see kv_codes.encode. kv_scales_2K: see Scoring.
        """
        ...

    def write_latents(
        self, row_T1w: torch.Tensor, cache_N1P1w: torch.Tensor, slot_mapping_T: torch.Tensor, latent_dim: int
    ) -> None:
        """Store each token's row at its slot; slot -1 stores nothing. The first latent_dim elements are the latent.

        For an 8-bit cache, rows are quantised, see latent_codes.CodedRows. Raises Refused in backends whose `accept`
        refuses cases with latent rows.
        """
        raise Refused(f"attention backend is {self.name}; allowed with latent rows: others")

    def attend(
        self,
        q_THd: torch.Tensor,
        kv_cache_N2PKd: torch.Tensor,
        out_THd: torch.Tensor,
        inputs: AttentionInputs,
        scoring: Scoring,
    ) -> None:
        """Write causal attention over the cache to `out_THd`.

        Tokens of q and out beyond the batch's last request are padding, whose output is not read.
        """
        ...

    def attend_latents(
        self,
        q_THd: torch.Tensor,
        weight_Cr: torch.Tensor,
        cache_N1P1w: torch.Tensor,
        out_THv: torch.Tensor,
        inputs: AttentionInputs,
        scale: float,
    ) -> None:
        """Write to `out_THv` the causal attention over a cache of latent rows; see `op.latent_attention`.

        Padding is as in `attend`. Raises Refused in backends whose `accept` refuses cases with latent rows.
        """
        raise Refused(f"attention backend is {self.name}; allowed with latent rows: others")

    def attend_packed(
        self,
        q_THd: torch.Tensor,
        k_TKd: torch.Tensor,
        v_TKd: torch.Tensor,
        out_THd: torch.Tensor,
        inputs: AttentionInputs,
        scoring: Scoring,
        biases_HW: torch.Tensor | None = None,
    ) -> None:
        """Write to `out_THd` the bidirectional attention among the tokens of each request; see `op.packed_attention`.

        Of the inputs, only query_start_loc_R1, seq_lens_R and host_3 are read. A row with seq_len 0 is padding, whose
        output is zeros. Raises Refused in backends whose `accept` refuses cases without a cache.
        """
        raise Refused(f"attention backend is {self.name}; allowed for attention without a cache: others")

    def attend_unrotated(
        self,
        q_THd: torch.Tensor,
        k_TKd: torch.Tensor,
        v_TKd: torch.Tensor,
        rotation: Rotation,
        kv_cache_N2PKd: torch.Tensor,
        out_THd: torch.Tensor,
        inputs: AttentionInputs,
        scoring: Scoring,
    ) -> bool:
        """Norm and rotate q and k, store k and v, and attend, if one kernel does all of it for the batch.

        Returns True if it did, and False, with nothing done, if there is no such kernel. For a request with one query,
        `inputs.slot_mapping_T` must have the slot of the request's last position, or -1.
        """
        return False


@cache
def get_backend(name: str) -> AttentionBackend:
    """Return the backend of that name. Raises ValueError for an unknown name, ImportError naming a missing package."""
    if name not in PACKAGES:
        raise ValueError(f"attention_backend is {name!r}; known backends: {', '.join(BACKENDS)}")
    try:
        module = import_module(f"compiled_engine.attention.backends.{name}_backend")
    except ImportError as error:
        raise ImportError(f"attention_backend {name!r} needs the package {PACKAGES[name]}: {error}") from error
    backend: AttentionBackend = module.BACKEND
    return backend


def default_backend(device_type: str) -> tuple[str, str]:
    """Return (name of the backend to try first on this type of device, the reason)."""
    if device_type == "cuda":
        return "triton", "cuda: the engine's own kernels, which need no further package"
    return "cpp", "cpu: the engine's own kernel, which needs a C++ compiler"


@dataclass(frozen=True)
class AttentionChoice:
    """The attention backend and block size of a model."""

    backend: str
    block_size: int
    cases: tuple[AttentionCase, ...]  # the cases of the model's layers
    support: Support  # the backend's support of all cases
    reasons: dict[str, str]  # reasons of values that were "auto", by config field


def choose_backend(requested: str, requested_block_size: int | str, cases: Sequence[AttentionCase]) -> AttentionChoice:
    """Return the backend and the block size chosen for a model on a device.

    requested: "auto" or a name of BACKENDS. requested_block_size: tokens per block, or "auto" for the backend's
    default. cases: the cases of the model's layers, whose block size is ignored. With "auto", torch is chosen if the
    default backend refuses a case. Raises ValueError for a backend or block size that does not exist, and with the
    backend's reason if the last backend tried refuses a case.
    """
    is_integer = isinstance(requested_block_size, int) and not isinstance(requested_block_size, bool)
    if requested_block_size != "auto" and not (is_integer and 1 <= int(requested_block_size) <= MAX_BLOCK_SIZE):
        raise ValueError(f"block_size is {requested_block_size!r}; allowed: 1 to {MAX_BLOCK_SIZE}, or 'auto'")

    def chosen(name: str, reasons: dict[str, str]) -> AttentionChoice:
        """Return the choice of this backend. Raises Refused, or ImportError if its package is missing."""
        backend = get_backend(name)
        if requested_block_size == "auto":
            block_size = backend.default_block_size
            reasons = reasons | {"cache.block_size": f"the default of attention backend {name}"}
        else:
            block_size = int(requested_block_size)
        asked = tuple(case.with_block_size(block_size) for case in cases)
        support = Support.of_all([backend.accept(case) for case in asked])
        return AttentionChoice(name, block_size, asked, support, reasons)

    name = requested
    reasons: dict[str, str] = {}
    if requested == "auto":
        name, reason = default_backend(cases[0].device)
        try:
            return chosen(name, {"attention_backend": reason})
        except (Refused, ImportError) as refusal:
            name, reasons = "torch", {"attention_backend": f"{name} cannot run this model: {refusal}"}
    try:
        return chosen(name, reasons)
    except (Refused, ImportError) as refusal:
        raise ValueError(f"attention_backend {name!r} cannot run this model here: {refusal}") from refusal


def captured_always(cases: Sequence[AttentionCase]) -> list[str]:
    """Return the names of the backends that support all of these cases with kernels that any CUDA graph may capture."""
    names = []
    for name in BACKENDS:
        try:
            supports = [get_backend(name).accept(case) for case in cases]
        except (Refused, ImportError):
            continue
        if Support.of_all(supports).graphs is GraphSupport.ALWAYS:
            names.append(name)
    return names

"""Load a rank's weights from a checkpoint. All tensors are checked before any tensor is copied."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from compiled_engine.config import ModelConfig
from compiled_engine.models.checkpoint.adapter_folder import read_adapter
from compiled_engine.models.checkpoint.eagle3_folder import head_tensors
from compiled_engine.models.checkpoint.kv_scales import find_kv_scales, kv_scales_of
from compiled_engine.models.checkpoint.match_tensors import Matched, match_tensors
from compiled_engine.models.checkpoint.merged_adapter import merge
from compiled_engine.models.checkpoint.mtp_layer import mtp_tensors, without_mtp_layers
from compiled_engine.models.checkpoint.mxfp4 import decode_mxfp4
from compiled_engine.models.checkpoint.packed_weights import PackedWeight
from compiled_engine.models.checkpoint.parameters import Weights
from compiled_engine.models.checkpoint.pooling_folder import pooling_tensors
from compiled_engine.models.checkpoint.quantised_tensors import decode_scaled, place_quantised
from compiled_engine.models.checkpoint.safetensors_files import map_tensors
from compiled_engine.models.checkpoint.staged_copy import copy_to_device
from compiled_engine.models.checkpoint.weight_formats import read_weights
from compiled_engine.models.checkpoint.wrappers import text_tensors
from compiled_engine.models.foreign.placement import Placement
from compiled_engine.passes.framework.parameter import (
    BUFFER,
    CODES,
    COLUMNS,
    INPUT_SCALE,
    KV_SCALES,
    QUANTISED,
    ROW_SCALES,
    SCALES,
    ZEROS,
    Parameter,
)
from compiled_engine.process.progress import Progress
from compiled_engine.quantisation import ELEMENTS, LinearScheme

log = logging.getLogger("compiled_engine")


@dataclass(frozen=True)
class _Copy:
    """A copy to make while loading, into `target`, a view of a parameter.

    sources: a view of a tensor of the checkpoint; or, if `encoded` is given, the whole tensors from which the values
    are decoded or unpacked.
    """

    sources: tuple[torch.Tensor, ...]
    target: torch.Tensor
    encoded: Placement | None = None  # the placement, if the values must be decoded or unpacked
    packed: PackedWeight | None = None  # takes the place of the first source


def load_weights(
    weights: Weights,
    model: nn.Module,
    config: ModelConfig,
    progress: Progress,
    rank: int = 0,
    num_ranks: int = 1,
    cache_dir: Path | None = None,
) -> None:
    """Copy the checkpoint's tensors into the rank's parameters, and compute derived parameters.

    Values are converted to the parameters' dtypes. Missing files of a checkpoint from the hub are downloaded first. If
    config.load_format is "dummy", the weights are filled with random values instead. For the arguments and errors see
    `check_weights`; also raises ValueError if files are missing or damaged, and OSError if a download fails.
    """
    if config.load_format == "dummy":
        with progress.stage("random weights"):
            fill_with_random_weights(weights, config.seed, rank, num_ranks)
        return
    if config.hub_name is not None:
        from compiled_engine.models.checkpoint.hub import (
            download_weights,  # imports huggingface_hub, not needed for a folder
        )

        download_weights(config.hub_name, config.path, progress)
    tensors = map_tensors(config.path)
    check_weights(tensors, weights, model, config, rank, num_ranks, cache_dir).copy(progress)


@dataclass(frozen=True)
class CheckedWeights:
    """The tensors of a checkpoint after `check_weights`: they fit a rank's parameters, and can be copied into them."""

    weights: Weights
    rank: int
    tensors: Mapping[str, torch.Tensor]
    packed: Mapping[str, PackedWeight]
    parts: Mapping[str, Sequence[Placement]]  # of this rank, by parameter
    kv_scales: Mapping[str, torch.Tensor]  # values of the KV scale parameters

    def copy(self, progress: Progress) -> None:
        """Copy the tensors into the parameters, and compute derived parameters. No parameter's address changes."""
        order = {name: place for place, name in enumerate(self.tensors)}
        with progress.stage("load weights", sum(map(len, self.parts.values()))) as advance:
            for batch in self.weights.batches():
                placed = [(part, target) for leaf, target in batch for part in self.parts[leaf.name]]
                placed.sort(key=lambda item: order[item[0].source])
                _copy([_copy_of(part, self.tensors, self.packed, target) for part, target in placed], advance)
                for target, scales_2K in (
                    (target, self.kv_scales[leaf.name]) for leaf, target in batch if leaf.name in self.kv_scales
                ):
                    target.copy_(scales_2K)
                for leaf, target in batch:
                    if _is_zero(leaf, self.rank):
                        target.zero_()


def check_weights(
    tensors: dict[str, torch.Tensor],
    weights: Weights,
    model: nn.Module,
    config: ModelConfig,
    rank: int = 0,
    num_ranks: int = 1,
    cache_dir: Path | None = None,
) -> CheckedWeights:
    """Check a checkpoint's tensors against the model, and find the parts of them that this rank needs.

    No parameter is changed; `CheckedWeights.copy` copies the parts.

    tensors: by the checkpoint's names. weights: the rank's parameters. model, config: those of the undivided model; the
    model gives names and shapes, and may be on the meta device. rank, num_ranks: for tensor parallelism. cache_dir:
    folder of a file with placements for transformers' models; the file is read, or written if it is missing; None: no
    file is used.

    Raises ValueError if tensors are missing, unexpected, of a wrong shape or dtype, or tied but different. Tensors that
    are not quantised must be fp32, bf16 or fp16.
    """
    if config.head is not None and config.head.is_mtp:
        tensors = mtp_tensors(tensors, config)
    elif config.wrapper is not None:
        tensors, unread = text_tensors(tensors)
        parts_unread = ", ".join(f"{part} ({count})" for part, count in unread.items())
        log.info("%s: tensors that are not read, by part: %s", config.path, parts_unread or "none")
    if config.head is None:
        tensors = without_mtp_layers(tensors, config.architecture)
    tensors, packed = read_weights(tensors, config.quantisation, config.path)
    if config.merged_adapter is not None:
        tensors = merge(read_adapter(config.merged_adapter), tensors, config.dtype)
    if config.pooling is not None:
        tensors = pooling_tensors(tensors, dict(model.named_parameters(remove_duplicate=False)), config)
    if config.head is not None and not config.head.is_mtp:
        tensors = head_tensors(tensors, config)
    matched = match_tensors(tensors, model, config, cache_dir)
    parts: dict[str, list[Placement]] = {}
    for leaf in weights.leaves():
        parts[leaf.name] = _parts(leaf, _placements(leaf, matched, tensors, config), rank, num_ranks)
        twins = _parts(leaf, matched.twins.get(leaf.name, ()), rank, num_ranks)
        _require_equal(parts[leaf.name], twins, tensors, config.path)
    kv_scales = _kv_scales(weights, tensors, config, rank, num_ranks)
    if rank == 0:
        _tell_decoded(weights, parts, config)
    return CheckedWeights(weights, rank, tensors, packed, parts, kv_scales)


def _tell_decoded(weights: Weights, parts: Mapping[str, Sequence[Placement]], config: ModelConfig) -> None:
    """Log a warning if quantised weights of the checkpoint are decoded to the model's dtype while they are loaded.

    The warning states the number of these weights and the bytes that they take in addition to their codes.
    """
    decoded, num_weights = 0, 0
    for leaf in weights.leaves():
        bits = [_bits_of(part) for part in parts[leaf.name] if part.decode and leaf.role not in QUANTISED]
        if bits:
            num_weights += 1
            decoded += leaf.nbytes - math.prod(leaf.shape) * max(bits) // 8
    if num_weights:
        log.warning(
            "%s: %d weights are decoded to %s while they are loaded, which takes %s bytes more than their codes "
            "on each rank; compiled-engine inspect says why",
            *(config.path, num_weights, str(config.dtype).removeprefix("torch."), f"{decoded:,}"),
        )


def _bits_of(part: Placement) -> int:
    return 4 if part.in_blocks else LinearScheme.parse(part.decode).weight.format.bits


def _kv_scales(
    weights: Weights, tensors: Mapping[str, torch.Tensor], config: ModelConfig, rank: int, num_ranks: int
) -> dict[str, torch.Tensor]:
    """Return the values of the rank's KV scale parameters, by parameter name.

    Scales that the checkpoint lacks are 1; if it has none, a warning is logged. A layer that reads the keys and values
    of an earlier layer has the earlier layer's scales.
    """
    leaves = [leaf for leaf in weights.leaves() if leaf.role == KV_SCALES]
    names = find_kv_scales(tensors)
    if leaves and not names and rank == 0:
        log.warning("%s has no k_scale and v_scale for an FP8 KV cache: 1.0 is used", config.path)
    writers = {layer: config.kv_layer(layer) for layer in range(config.num_layers)}
    names = {(layer, kind): names[of, kind] for layer, of in writers.items() for kind in "kv" if (of, kind) in names}
    heads = {leaf.name: config.heads_of(int(leaf.name.split(".")[1])).num_kv_heads for leaf in leaves}
    return {leaf.name: kv_scales_of(leaf, tensors, names, heads[leaf.name], rank, num_ranks) for leaf in leaves}


def _placements(
    leaf: Parameter, matched: Matched, tensors: dict[str, torch.Tensor], config: ModelConfig
) -> Sequence[Placement]:
    if leaf.role not in QUANTISED:
        return matched.read.get(leaf.name, ())
    try:
        return place_quantised(leaf, matched.read.get(leaf.name.rpartition(".")[0], ()), matched.stored, tensors)
    except ValueError as error:
        raise ValueError(f"the tensors in {config.path} do not fit {config.architecture}: {error}") from error


def _parts(leaf: Parameter, placements: Sequence[Placement], rank: int, num_ranks: int) -> list[Placement]:
    """Return the parts of `placements` that fall into this rank's part of the tensor `leaf`.

    placements: say which parts of checkpoint tensors make up the whole tensor, see Placement. Returns [] if the rank's
    part is all zeros, see `_is_zero`.
    """
    if _is_zero(leaf, rank):
        return []
    if leaf.shard is None or leaf.shard.dim is None:
        return list(placements)
    places = leaf.shard.places(rank, num_ranks)
    return [part for placement in placements for part in placement.cut(leaf.shard.dim, places)]


def _is_zero(leaf: Parameter, rank: int) -> bool:
    """Return whether the tensor is all zeros on this rank because only rank 0 has its values."""
    return leaf.shard is not None and leaf.shard.first_only and rank > 0


def _require_equal(
    read: Sequence[Placement], twins: Sequence[Placement], tensors: Mapping[str, torch.Tensor], path: Path
) -> None:
    """Raise ValueError if a checkpoint stores a tied tensor several times, with different values.

    read: placements (see Placement) of the copy that is read. twins: placements of the copies that are not read.
    """
    by_place = {part.placed: part for part in read}
    for twin in twins:
        part = by_place.get(twin.placed)
        if part is not None and not torch.equal(part.view(tensors[part.source]), twin.view(tensors[twin.source])):
            raise ValueError(f"{path}: tie_word_embeddings is true, but {part.source} and {twin.source} differ")


def _copy_of(
    part: Placement,
    tensors: Mapping[str, torch.Tensor],
    packed: Mapping[str, PackedWeight],
    target: torch.Tensor,
) -> _Copy:
    place, of_source = part.place_in(target), packed.get(part.source)
    source = tensors[part.source] if of_source is None else of_source.stored
    if part.decode or source is None:
        return _Copy(tuple(tensors[name] for name in part.sources), place, part, of_source)
    return _Copy((part.view(source).reshape(place.shape),), place)


def _copy(copies: Sequence[_Copy], advance: Callable[[int], None]) -> None:
    plain: list[tuple[torch.Tensor, torch.Tensor]] = []
    for copy in copies:
        target, device = copy.target, copy.target.device
        source, *beside = copy.sources
        if copy.encoded is not None and copy.encoded.in_blocks:
            decode_mxfp4(copy.encoded, copy.sources, target)
        elif copy.encoded is not None:
            codes = (copy.packed or source).to(device)
            if copy.encoded.decode:
                decode_scaled(copy.encoded, (codes, *beside), target)
            else:
                target.copy_(copy.encoded.view(codes))
        elif device.type == "cuda" and source.is_cpu and source.is_contiguous() and target.is_contiguous():
            plain.append((source, target))
            continue
        else:
            # A transpose is faster on the device.
            target.copy_(source.to(device) if source.is_contiguous() else source)
        advance(1)
    if plain:
        copy_to_device(plain, plain[0][1].device, advance)


# Random weights, for running a model's shape without its checkpoint.

STANDARD_DEVIATION, INPUT_SCALE_SIZE = 0.02, 0.02
# The smallest of three exponents of MXFP4.
EXPONENT = 126 + round(math.log2(STANDARD_DEVIATION / ELEMENTS["mxfp4"].deviation))


def fill_with_random_weights(weights: Weights, seed: int, rank: int = 0, num_ranks: int = 1) -> None:
    """Fill the weights in place with random values, which are reproducible.

    The values are normally distributed with STANDARD_DEVIATION, around 1 for norms and around 0 otherwise. Quantised
    values span their whole range; with their scales, dequantised weights have about the same deviation. KV scales
    become 1, and buffers keep their values.

    The values depend on the seed, the tensor's name and the device type, but neither on how tensors are packed nor on
    the number of ranks. For this, a tensor that is divided among ranks is generated as a whole; only one such tensor is
    in memory at a time.
    """
    for batch in weights.batches():
        for leaf, target in batch:
            if leaf.role == BUFFER:
                continue
            if leaf.role == KV_SCALES:
                target.fill_(1.0)
                continue
            digest = hashlib.sha256(f"{seed} {leaf.name}".encode()).digest()
            generator = torch.Generator(target.device)
            generator.manual_seed(int.from_bytes(digest[:8], "big", signed=True))
            mean = 1.0 if leaf.name.endswith("norm.weight") else 0.0
            if leaf.shard is None and leaf.role not in QUANTISED:
                target.normal_(mean, STANDARD_DEVIATION, generator=generator)
                continue
            shape = target.shape if leaf.shard is None else leaf.shard.whole
            element = LinearScheme.parse(leaf.scheme).weight.format if leaf.scheme else ELEMENTS["e4m3"]
            in_fp32 = leaf.role in QUANTISED and target.dtype.is_floating_point
            whole = torch.empty(shape, dtype=torch.float32 if in_fp32 else target.dtype, device=target.device)
            if leaf.role == COLUMNS:
                whole.copy_(torch.arange(shape[1]))
            elif leaf.role == ZEROS:
                middle = 2 ** (element.bits - 1)
                whole.random_(middle - 1, middle + 1, generator=generator)
            elif leaf.role == SCALES and not in_fp32:
                whole.random_(EXPONENT, EXPONENT + 3, generator=generator)
            elif leaf.role == CODES and not in_fp32:
                least = torch.iinfo(target.dtype).min
                whole.random_(least, least + 256, generator=generator)
            elif leaf.role == CODES:
                whole.normal_(0.0, element.deviation, generator=generator)
            elif leaf.role in (SCALES, ROW_SCALES, INPUT_SCALE):
                size = INPUT_SCALE_SIZE if leaf.role == INPUT_SCALE else STANDARD_DEVIATION / element.deviation
                if leaf.role == SCALES and element.row_scales:
                    size = 1.0
                whole.uniform_(0.5 * size, 1.5 * size, generator=generator)
            else:
                whole.normal_(mean, STANDARD_DEVIATION, generator=generator)
            target.copy_(whole if leaf.shard is None else leaf.shard.of(whole, rank, num_ranks))

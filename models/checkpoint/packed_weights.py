"""Check integer weights that a checkpoint packs into words of 32 bits, and unpack them to the engine's layout.

There are four layouts, named by Quantisation.layout. A linear has N outputs, and K inputs in G groups of columns; a
word holds C codes, eight of four bits or four of eight bits:

- pack-quantized (compressed-tensors): weight_packed [N, K / C], weight_scale [N, G], weight_zero_point [N / C, G],
  weight_g_idx [K], weight_shape [2]. Zero points are packed along the rows.
- gptq: qweight [K / C, N], scales [G, N], qzeros [G, N / C], g_idx [K]. Zero points are stored minus one.
- gptq_v2: as gptq, but zero points are stored as they are.
- awq: qweight [K, N / 8], scales [G, N], qzeros [G, N / 8]. The eight codes of a word are in the order of AWQ_ORDER.

A word holds its first code in the lowest bits. Sources: the packing functions of compressed-tensors (pack_to_int32),
GPTQModel (BaseQuantLinear, convert_gptq_v1_to_v2_format) and AutoAWQ (WQLinear_GEMM).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from compiled_engine.models.checkpoint.file_names import name_some
from compiled_engine.passes.framework.rounding import pack, unpack
from compiled_engine.quantisation import LinearScheme, Quantisation, Rounding

PACKED, GPTQ, GPTQ_V2, AWQ = "pack-quantized", "gptq", "gptq_v2", "awq"
# (bits of a code, whether there are no zero points) -> element format.
INTEGERS = {(4, True): "int4", (4, False): "uint4", (8, True): "int8", (8, False): "uint8"}
# Bits of a word.
WORD = 32
_WHOLE_NUMBERS = torch.int32, torch.int64
# AWQ's order: for each four bits of a word, from the lowest on, which of the word's eight columns they hold.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Names(NamedTuple):
    """The last parts of the names of a packed linear's tensors, in one layout."""

    words: str
    scales: str
    zeros: str
    groups: str  # the group of each column
    shape: str | None = None


_OF_GPTQ = Names("qweight", "scales", "qzeros", "g_idx")
NAMES = {
    PACKED: Names("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
    GPTQ: _OF_GPTQ,
    GPTQ_V2: _OF_GPTQ,
    AWQ: _OF_GPTQ,
}


@dataclass(frozen=True)
class PackedWeight:
    """The packed codes of one linear, in the layout of its checkpoint."""

    words: torch.Tensor
    layout: str
    rounding: Rounding
    num_columns: int
    columns: torch.Tensor | None  # [K], the weight's column for each column of the codes; None for the same

    @property
    def stored(self) -> torch.Tensor | None:
        """A view of the codes if the checkpoint already stores them in the layout that `to` returns; otherwise None."""
        as_stored = self.layout == PACKED and self.columns is None and self.rounding.dtype == torch.uint8
        return self._bytes_of(self.words) if as_stored else None

    def _bytes_of(self, by_rows: torch.Tensor) -> torch.Tensor:
        """Return the codes' bytes in the engine's layout. by_rows: words, each with neighbouring columns of one row."""
        return by_rows.view(torch.uint8)[:, : self.num_columns // self.rounding.format.per_byte]

    def to(self, device: torch.device) -> torch.Tensor:
        """Return the codes in the engine's layout (see Rounding.stored). They are unpacked on `device`."""
        words = self.words.to(device)
        if self.layout == AWQ:
            codes_NB = pack(_unpacked(words, self.rounding.format.bits, AWQ_ORDER).t().contiguous(), self.rounding)
        else:
            codes_NB = self._bytes_of(words if self.layout == PACKED else words.t().contiguous())
        if self.columns is not None:
            codes_NB = pack(unpack(codes_NB, self.rounding)[:, self.columns.to(device)], self.rounding)
        # A word holds signed codes of 8 bits plus 128.
        return codes_NB if self.rounding.dtype == torch.uint8 else (codes_NB ^ 128).view(torch.int8)


def read_packed(
    tensors: Mapping[str, torch.Tensor], quantisation: Quantisation | None, path: Path
) -> tuple[dict[str, torch.Tensor], dict[str, PackedWeight]]:
    """Return the checkpoint's tensors with packed weights in the engine's layout, and the codes by the weight's name.

    In the returned tensors, a placeholder `weight` [N, K] on the meta device replaces the words; it has the weight's
    shape and the codes' dtype. The other tensors keep their names: scales become [N, G], and zero points uint8 [N, G].
    The groups of the columns are replaced by the order of the columns, int32 [K], or left out if columns are not
    reordered. If `quantisation` has no packed weights, the tensors are returned unchanged. path: of the checkpoint, for
    errors. Raises ValueError, with names and values, if tensors contradict each other or the rules.
    """
    if quantisation is None or not quantisation.layout:
        return dict(tensors), {}
    names = NAMES[quantisation.layout]
    found: dict[str, torch.Tensor] = {}
    packed: dict[str, PackedWeight] = {}
    problems: list[str] = []
    beside = {name for name in tensors if name.rpartition(".")[2] in names}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind != names.words:
            if f"{module}.{names.words}" not in tensors or name not in beside:
                found[name] = tensor
            continue
        scheme = quantisation.scheme_of(module)
        if scheme is None or not scheme.weight.is_integer or scheme.inputs is not None:
            reason = quantisation.why_not(module) if scheme is None else f"the rules ask for {scheme}"
            problems.append(f"{name} is packed, but {reason}")
            continue
        if f"{module}.weight" in tensors:
            problems.append(f"{name} is a second copy of {module}.weight")
            continue
        parts = {part: tensors.get(f"{module}.{part}") for part in names if part is not None}
        linear = _Linear(module, scheme, quantisation.layout, names, parts)
        try:
            found |= linear.tensors()
            packed[f"{module}.weight"] = linear.codes()
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError(f"the tensors in {path} do not fit quantization_config: {name_some(problems, most=3)}")
    return found, packed


@dataclass(frozen=True)
class _Linear:
    """The tensors of one packed linear as the checkpoint has them."""

    module: str
    scheme: LinearScheme
    layout: str
    names: Names
    parts: Mapping[str, torch.Tensor | None]  # by the last part of the name

    @property
    def bits(self) -> int:
        """The number of bits of a code."""
        return self.scheme.weight.format.bits

    @property
    def per_word(self) -> int:
        """The number of codes in a word of 32 bits."""
        return WORD // self.bits

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this linear's tensors in the engine's layout, by full name, see `read_packed`.

        Raises ValueError if the tensors contradict each other.
        """
        num_rows, num_columns = self._sizes()
        rounding, by_group = self.scheme.weight, self.layout != PACKED
        rows, groups = rounding.grid(num_rows, num_columns)
        scales = self._part(self.names.scales, (groups, rows) if by_group else (rows, groups))
        found = {
            f"{self.module}.weight": torch.empty((num_rows, num_columns), dtype=rounding.dtype, device="meta"),
            f"{self.module}.{self.names.scales}": scales.t() if by_group else scales,
        }
        zeros = self._zeros(num_rows, groups)
        if rounding.format.has_zeros and zeros is not None:
            found[f"{self.module}.{self.names.zeros}"] = zeros
        columns = self._columns()
        if columns is not None:
            found[f"{self.module}.{self.names.groups}"] = columns
        return found

    def codes(self) -> PackedWeight:
        words = self._part(self.names.words)
        return PackedWeight(words, self.layout, self.scheme.weight, self._sizes()[1], self._columns())

    def _part(self, kind: str, shape: tuple[int, ...] | None = None, *dtypes: torch.dtype) -> torch.Tensor:
        """Return this linear's tensor whose name ends in `kind`.

        Raises ValueError if the tensor is missing, does not have `shape` (if given), or has none of `dtypes` (if
        given).
        """
        name, tensor = f"{self.module}.{kind}", self.parts[kind]
        if tensor is None:
            raise ValueError(f"{name} is missing")
        if shape is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
        if dtypes and tensor.dtype not in dtypes:
            raise ValueError(f"{name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
        return tensor

    def _sizes(self) -> tuple[int, int]:
        """Return (N, K), the numbers of the linear's outputs and inputs. Raises ValueError if the words do not fit."""
        words = self._part(self.names.words, None, torch.int32)
        if words.dim() != 2:
            raise ValueError(f"{self.module}.{self.names.words} must have two dimensions, got {list(words.shape)}")
        first, second = words.shape
        if self.layout == AWQ:
            return second * self.per_word, first
        if self.layout != PACKED:
            return second, first * self.per_word
        assert self.names.shape is not None
        num_rows, num_columns = self._part(self.names.shape, (2,), *_WHOLE_NUMBERS).tolist()
        if min(num_rows, num_columns) < 1:
            raise ValueError(
                f"{self.module}.{self.names.shape} must hold numbers above 0, got {[num_rows, num_columns]}"
            )
        if num_columns % self.scheme.weight.format.per_byte:
            raise ValueError(f"{self.module}.{self.names.shape} must have an even number of columns, got {num_columns}")
        self._part(self.names.words, (num_rows, -(-num_columns // self.per_word)))
        return num_rows, num_columns

    def _zeros(self, num_rows: int, num_groups: int) -> torch.Tensor | None:
        """Return the zero points, uint8 [N, G]; None if the checkpoint stores none.

        Raises ValueError for zero points that are missing, wrong, or contradict the scheme.
        """
        kind, has_zeros = self.names.zeros, self.scheme.weight.format.has_zeros
        if self.layout == PACKED:
            if not has_zeros:
                if self.parts[kind] is not None:
                    raise ValueError(f"{self.module}.{kind} must not exist, as symmetric is true")
                return None
            words = self._part(kind, (-(-num_rows // self.per_word), num_groups), torch.int32)
            return _unpacked(words.t(), self.bits).t()[:num_rows].contiguous()
        words = self._part(kind, (num_groups, -(-num_rows // self.per_word)), torch.int32)
        order = AWQ_ORDER if self.layout == AWQ else None
        zeros = _unpacked(words, self.bits, order)[:, :num_rows].t().contiguous()
        most, middle = 2**self.bits - 1, 2 ** (self.bits - 1)
        if self.layout == GPTQ:
            if has_zeros and int(zeros.max()) == most:
                # The writers subtract one from 0 and from the number after the largest code alike.
                raise ValueError(
                    f"{self.module}.{kind} must hold zero points less one, from 0 to {most - 1}, got {most}"
                )
            zeros += 1
        if not has_zeros and (zeros != middle).any():
            other = int(zeros[zeros != middle][0])
            raise ValueError(
                f"{self.module}.{kind} must hold the zero point {middle} alone, as sym is true, got {other}"
            )
        return zeros

    def _columns(self) -> torch.Tensor | None:
        """Return the order of columns, int32 [K], in which the columns of each group are neighbours.

        Returns None if the columns of each group already are neighbours in the checkpoint. Raises ValueError for groups
        that contradict the scheme.
        """
        kind, num_columns = self.names.groups, self._sizes()[1]
        if self.parts[kind] is None and not self.scheme.reordered:
            return None
        groups = self._part(kind, (num_columns,), *_WHOLE_NUMBERS).long()
        size = self.scheme.weight.columns or num_columns
        expected = torch.arange(num_columns) // size
        if not self.scheme.reordered:
            if not torch.equal(groups, expected):
                raise ValueError(f"{self.module}.{kind} must hold neighbouring groups of {size}, as config.json says")
            return None
        columns = groups.argsort(stable=True)
        if not torch.equal(groups[columns], expected):
            raise ValueError(f"{self.module}.{kind} must hold each group {size} times")
        return columns.int()


def _unpacked(words: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Unpack words [R, W] into codes, one per byte: uint8 [R, W * codes per word].

    bits: of a code. order: for each position in a word, from the lowest bits on, the index of the code there; None for
    ascending indices.
    """
    per_word = WORD // bits
    found = torch.empty((*words.shape, per_word), dtype=torch.uint8, device=words.device)
    in_bytes = words.contiguous().view(torch.uint8).unflatten(1, (-1, WORD // 8))
    for place in range(per_word):
        in_byte = in_bytes[..., place * bits // 8] >> place * bits % 8
        found[..., order[place] if order else place] = in_byte & 2**bits - 1
    return found.flatten(1)

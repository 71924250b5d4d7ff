"""Merges the embeddings of images into an eager model, by module hooks in place of the passes of passes/images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from compiled_engine.config import EngineConfig, ImagesConfig
from compiled_engine.graphs.compiler.signature import ADAPTED, FORWARD
from compiled_engine.graphs.compiler.stitch import Forward
from compiled_engine.passes.framework.parameter import Parameter
from compiled_engine.passes.images.merge_embeddings import (
    EMBEDDINGS,
    IMAGE_INDEX,
    IMAGES,
    embeddings_parameter,
    part_of,
)
from compiled_engine.passes.images.section_angles import POSITION_DELTAS, angles_of_sections
from compiled_engine.passes.images.steps import image_step_tensors
from compiled_engine.passes.images.whole_images import KEYS_AHEAD
from compiled_engine.passes.layout.layer_inputs import layer_stack


class EagerImages:
    """Adds a variant of the forward, IMAGES, in which hooks replace embeddings of tokens by embeddings of images.

    Implements EagerFeature. In an engine with adapters, IMAGES extends their variant ADAPTED, so this feature must come
    after that of adapters.
    """

    def __init__(self, config: EngineConfig, images: ImagesConfig) -> None:
        self._images = images
        self._hidden_size, self._dtype = config.model.hidden_size, config.model.dtype
        self._windows = config.model.sliding_windows
        # During a call of the variant: its last arguments.
        self._index_T: torch.Tensor | None = None
        self._deltas_T3: torch.Tensor | None = None
        self._ahead_T: torch.Tensor | None = None

    def parameters(self, model: nn.Module) -> tuple[Parameter, ...]:
        images = self._images
        return (embeddings_parameter(images.cache_size, images.vision.levels, self._hidden_size, self._dtype),)

    def callables(
        self, model: nn.Module, callables: Mapping[str, Forward], tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, Forward]:
        path = layer_stack(name for name, _ in model.named_parameters())
        parts = [
            part_of(tensors[EMBEDDINGS], level, self._hidden_size) for level in range(1 + self._images.vision.levels)
        ]
        for level, part in enumerate(parts):
            model.get_submodule(f"{path}.{level}").register_forward_pre_hook(partial(self._merge, part, level))
        if self._images.vision.layer_token_id is not None:  # projections for all layers read the embeddings too
            decoder = model.get_submodule(path.rpartition(".")[0])
            decoder.get_submodule("embed_tokens").register_forward_hook(partial(self._merge_embedded, parts[0]))
            # Before the hook of a divided vocabulary, which turns ids into a rank's rows.
            decoder.get_submodule("embed_tokens_per_layer").register_forward_pre_hook(self._replace_ids, prepend=True)
        if self._images.vision.both_ways_in_windows:
            for number, window in enumerate(self._windows):
                layer = model.get_submodule(f"{path}.{number}")
                layer.register_forward_pre_hook(partial(self._choose_keys, model.step, window is not None))
        if self._images.sections:
            for module in model.modules():
                if "inv_freq" in module._buffers:
                    module.register_forward_hook(self._turn)
        return {**callables, IMAGES: partial(self._run, callables.get(ADAPTED, callables[FORWARD]))}

    def _run(self, forward: Forward, *arguments: Any) -> Any:
        names = [tensor.name for tensor in image_step_tensors(self._images)]
        given = dict(zip(names, arguments[-len(names) :], strict=True))
        self._index_T, self._deltas_T3 = given[IMAGE_INDEX.name], given.get(POSITION_DELTAS.name)
        self._ahead_T = given.get(KEYS_AHEAD.name)
        ids_T, positions_T, inputs, *others = arguments[: -len(names)]
        try:
            return forward(ids_T, positions_T, replace(inputs, keys_ahead_T=self._ahead_T), *others)
        finally:
            self._index_T = self._deltas_T3 = self._ahead_T = None

    def _merge(
        self, part: torch.Tensor, level: int, layer: nn.Module, arguments: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        if self._index_T is None:
            return None
        return self._merged(part, level, arguments[0]), *arguments[1:]

    def _merge_embedded(
        self, part: torch.Tensor, embedding: nn.Module, arguments: tuple[Any, ...], output: torch.Tensor
    ) -> torch.Tensor | None:
        return None if self._index_T is None else self._merged(part, 0, output)

    def _merged(self, part: torch.Tensor, level: int, values: torch.Tensor) -> torch.Tensor:
        assert self._index_T is not None
        x_TD = values.flatten(0, -2)  # transformers has a batch dimension
        rows_TD = part.index_select(0, self._index_T.clamp(min=0))
        merged = torch.where(self._index_T[:, None] >= 0, rows_TD if level == 0 else x_TD + rows_TD, x_TD)
        return merged.view(values.shape)

    def _replace_ids(self, embedding: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._index_T is None:
            return None
        ids, token_id = arguments[0], self._images.vision.layer_token_id
        return ids.masked_fill((self._index_T >= 0).view(ids.shape), token_id), *arguments[1:]

    def _choose_keys(self, step: Any, has_window: bool, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Let a layer's attention see later keys of the same image, if the layer has a window; otherwise not.

        Does nothing unless the variant IMAGES runs. step: the model's current arguments, which are changed.
        """
        if self._index_T is not None:
            step.inputs = replace(step.inputs, keys_ahead_T=self._ahead_T if has_window else None)

    def _turn(
        self, angles: nn.Module, arguments: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return cos and sin of positions in three dimensions, in the shape and dtype of the module's output.

        Returns None, so that the output stays, unless the variant IMAGES runs and the model has such positions.
        """
        if self._deltas_T3 is None:
            return None
        # After the hidden states in transformers' models, which have equal positions three times.
        positions = next(each for each in arguments if not each.is_floating_point())
        positions_T = positions.flatten()[: len(self._deltas_T3)]
        inv_freq_p, cos = angles._buffers["inv_freq"], output[0]
        assert inv_freq_p is not None
        images = self._images
        sections = images.sections, images.vision.mrope_interleaved
        angles_Tp = angles_of_sections(positions_T, self._deltas_T3, inv_freq_p.float(), *sections)
        both = torch.cat((angles_Tp, angles_Tp), dim=-1).view(cos.shape)
        factor: Any = getattr(angles, "attention_factor", None) or getattr(angles, "attention_scaling", 1.0)
        return (both.cos() * factor).to(cos.dtype), (both.sin() * factor).to(cos.dtype)

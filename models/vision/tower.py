"""Vision towers of transformers, with the engine's calling convention and attention.

The patches of several images are packed into one sequence; only attention keeps the images apart. All tensors that
depend on the sizes of images are arguments (see inputs.py), so that one graph serves images of all sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForImageTextToText, PreTrainedModel

from compiled_engine.attention.inputs import AttentionInputs
from compiled_engine.attention.op import packed_attention
from compiled_engine.models.foreign.compat import fill_buffers, mixed, supported_version
from compiled_engine.models.vision.description import describe_vision, read_vision_config
from compiled_engine.models.vision.families import FAMILIES
from compiled_engine.vision import VisionDescription

# The towers of the Qwen family pack images for attention only if the attention's name contains the word flash.
NAME = "compiled_engine_vision_flash"


class Borders:
    """Holds the borders within which patches attend to each other: those of images, and those of windows.

    The tower's forward sets the borders, and its attention modules read them.
    """

    image: AttentionInputs | None = None
    window: AttentionInputs | None = None


def attend_within(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention within each image or within each window. Returns ([1, patches, heads, d], None).

    query, key, value: [1, heads, patches, d]. module: the attention module; its `in_windows` selects windows, and its
    `borders` has the borders. others: arguments that do not affect the result.
    """
    q_THd, k_TKd, v_TKd = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    own: Any = module
    inputs = own.borders.window if own.in_windows else own.borders.image
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return packed_attention(q_THd, k_TKd, v_TKd, inputs, scale).unsqueeze(0), None


AttentionInterface.register(NAME, attend_within)


class LinearPatches:
    """Mixin for a patch embedding that transformers computes by a convolution: computes a linear instead.

    The results are the same, since patches do not overlap.
    """

    proj: nn.Module

    def forward(self, patches_PX: torch.Tensor) -> torch.Tensor:
        """Return the patches' hidden states [P, D], from their pixels [P, X]."""
        weight: Any = self.proj.weight
        return nn.functional.linear(patches_PX.to(weight.dtype), weight.flatten(1), self.proj.bias)  # type: ignore[arg-type]


class LinearTiles:
    """Mixin for a convolution whose patches do not overlap: cuts tiles into patches, and applies a linear."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, pixels_NCHW: torch.Tensor) -> torch.Tensor:
        """Return the patches' hidden states, [N, D, rows, columns]."""
        size = self.weight.shape[-1]
        num, channels, height, width = pixels_NCHW.shape
        rows, columns = height // size, width // size
        pixels_NCHW = pixels_NCHW.to(self.weight.dtype)
        by_patch = pixels_NCHW.view(num, channels, rows, size, columns, size).permute(0, 2, 4, 1, 3, 5)
        # Reshaped to two dimensions, since dynamo of torch 2.11 cannot decide whether a tensor with more is empty.
        by_patch = by_patch.reshape(num * rows * columns, channels * size * size)
        hidden_PD = nn.functional.linear(by_patch, self.weight.flatten(1), self.bias)
        return hidden_PD.view(num, rows, columns, -1).permute(0, 3, 1, 2)


class WholeTiles:
    """Mixin for the embeddings of Idefics 3 and SmolVLM: adds the same position embeddings to each tile.

    transformers computes positions for each tile, since its tiles may be padded. The engine's tiles have no padding.
    """

    patch_embedding: nn.Module
    position_embedding: nn.Embedding
    positions_P: torch.Tensor

    def forward(self, pixels_NCHW: torch.Tensor) -> torch.Tensor:
        """Return the patches' hidden states, [N, patches, D]."""
        hidden_NDrc: torch.Tensor = self.patch_embedding(pixels_NCHW)
        return hidden_NDrc.flatten(2).transpose(1, 2) + self.position_embedding(self.positions_P)


def positions_of_patches(side: int) -> torch.Tensor:
    """Return the positions that transformers assigns to the patches of a tile without padding, [side * side].

    side: number of patches on a side. Adjacent patches may have the same position, since transformers rounds
    coordinates. (Idefics 3 and SmolVLM.)
    """
    with torch.device("cpu"):
        coordinates = (torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))).clamp(max=1.0 - 1e-6)
        places = torch.bucketize(coordinates, torch.arange(1 / side, 1.0, 1 / side), right=True)
    return (places[:, None] * side + places[None, :]).flatten()


class VisionTower(nn.Module):
    """A vision tower: the modules of transformers' multimodal base model that turn images into embeddings.

    Parameters have the same names as in the multimodal model. For layers_path, layer_signatures and layers_in_tuple see
    `Observation` in models/foreign/observation.py.
    """

    layers_in_tuple = False

    def __init__(self, model: Any, description: VisionDescription, layers: nn.ModuleList, read: Sequence[int]) -> None:
        """Create a tower from the modules of `model`, the multimodal base model.

        layers: the tower's layers, each of which reads the previous layer's result. read: numbers of the layers whose
        results the rest of the tower reads; layers after the last one of these are not used.
        """
        super().__init__()
        self.model, self.description = model, description
        self.borders = Borders()
        self.layers_path = next(path for path, module in self.named_modules() if module is layers)
        # If the results of several layers are read, these layers, the last one included, differ from the others.
        apart = read if len(read) > 1 else ()
        self.layer_signatures = [number + 1 if number in apart else 0 for number in range(max(read, default=0) + 1)]
        for module in model.modules():
            if hasattr(module, "is_causal"):
                module.borders, module.in_windows = self.borders, False

    def attend_in(self, images: AttentionInputs, starts_W1: Any = None, lens_W: Any = None) -> None:
        """Set the borders within which patches attend: those of images and, if given, those of windows.

        images: the attention inputs that describe each image as a request. starts_W1, lens_W: starts and lengths of
        windows, in patches.
        """
        self.borders.image = images
        if starts_W1 is not None:
            self.borders.window = replace(images, query_start_loc_R1=starts_W1, seq_lens_R=lens_W)


class GridTower(VisionTower):
    """The towers of Qwen2-VL and its successors, which take images as grids of patches, of any size."""

    def __init__(self, model: Any, description: VisionDescription) -> None:
        visual = model.visual
        levels = visual.deepstack_visual_indexes if description.levels else ()
        super().__init__(model, description, visual.blocks, [*levels, len(visual.blocks) - 1])
        visual.patch_embed.__class__ = mixed(LinearPatches, type(visual.patch_embed))
        for number, block in enumerate(visual.blocks):
            block.attn.in_windows = bool(description.window_size) and number not in visual.fullatt_block_indexes

    def forward(
        self,
        pixels_EUX: torch.Tensor,
        positions_EU2: torch.Tensor,
        attention_inputs: AttentionInputs,
        *planned: torch.Tensor,
    ) -> torch.Tensor:
        """Return a row for each of E embeddings: the embedding, then further ones (VisionDescription.levels).

        planned: rows and weights for the interpolated table of positions, if the tower has a table; then order, starts
        and lengths of windows, if the tower has windows.
        """
        given: dict[str, Any] = {"cu_seqlens": attention_inputs.query_start_loc_R1, "max_seqlen": 0}
        rest = list(planned)
        if self.description.table_side:
            rows_EU4, weights_EU4 = rest.pop(0), rest.pop(0)
            given |= {"interp_indices": rows_EU4.flatten(0, 1), "interp_weights": weights_EU4.flatten(0, 1)}
        if self.description.window_size:
            order_E, starts_W1, lens_W = rest
            given |= {"window_index": order_E, "cu_window_seqlens": starts_W1, "max_window_seqlen": 0}
            self.attend_in(attention_inputs, starts_W1, lens_W)
        else:
            self.attend_in(attention_inputs)
        output = self.model.visual(
            pixels_EUX.flatten(0, 1), grid_thw=None, position_ids=positions_EU2.flatten(0, 1), **given
        )
        levels = getattr(output, "deepstack_features", None) or ()
        return torch.cat([output.pooler_output, *levels], dim=-1)


class PooledTower(VisionTower):
    """The tower of Gemma 4, which takes images as grids of patches. An embedding is the mean over some patches."""

    def __init__(self, model: Any, description: VisionDescription) -> None:
        layers = model.vision_tower.encoder.layers
        super().__init__(model, description, layers, [len(layers) - 1])

    def forward(
        self, pixels_EUX: torch.Tensor, positions_EU2: torch.Tensor, attention_inputs: AttentionInputs
    ) -> torch.Tensor:
        """Return embeddings [E, D]. positions_EU2: column and row of each patch."""
        self.attend_in(attention_inputs)
        tower = self.model.vision_tower
        positions_1P2 = positions_EU2.flatten(0, 1).unsqueeze(0)
        no_padding_1P = positions_1P2[..., 0] < 0
        states_1PD = tower.patch_embedder(pixels_EUX.flatten(0, 1).unsqueeze(0), positions_1P2, no_padding_1P)
        angles = tower.encoder.rotary_emb(states_1PD, positions_1P2)
        for layer in tower.encoder.layers:
            states_1PD = layer(states_1PD, position_embeddings=angles, attention_mask=None, position_ids=positions_1P2)
        states_EUD = states_1PD.view(*positions_EU2.shape[:2], -1)
        pooled_ED = states_EUD.float().mean(dim=1).to(states_EUD.dtype).float() * tower.pooler.root_hidden_size
        if tower.config.standardize:
            pooled_ED = (pooled_ED - tower.std_bias.float()) * tower.std_scale.float()
        return self.model.embed_vision(inputs_embeds=pooled_ED.to(states_EUD.dtype))


class TileTower(VisionTower):
    """The towers of LLaVA, Gemma 3, InternVL and Idefics 3: a vision transformer over tiles of a fixed size."""

    def __init__(self, model: Any, description: VisionDescription) -> None:
        encoder = getattr(model, "vision_tower", None) or model.vision_model
        chosen = getattr(model.config, "vision_feature_layer", -1)
        layers = stack_of(encoder)
        read = [index - 1 for index in indices_of([chosen] if isinstance(chosen, int) else chosen, layers) if index]
        super().__init__(model, description, layers, read)
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.__class__ = mixed(LinearTiles, type(module))
        if description.family == "idefics3":
            embeddings = encoder.embeddings
            embeddings.__class__ = mixed(WholeTiles, type(embeddings))
            embeddings.register_buffer("positions_P", positions_of_patches(embeddings.num_patches_per_side), False)

    def forward(
        self, pixels_NCHW: torch.Tensor, attention_inputs: AttentionInputs, order_E: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return embeddings [E, D]. order_E: see `inputs.ends_of_rows`; None: the embeddings of all tiles in order."""
        self.attend_in(attention_inputs)
        features_ED = FEATURES[self.description.family](self.model, pixels_NCHW).flatten(0, 1)
        if order_E is None:
            return features_ED
        return torch.cat([self.model.image_newline.unsqueeze(0), features_ED])[order_E]


def llava_features(model: Any, pixels_NCHW: torch.Tensor) -> torch.Tensor:
    """Return LLaVA's embeddings [1, E, D] for all tiles: hidden states of some layers, concatenated and projected."""
    chosen = model.config.vision_feature_layer
    states = hidden_states(model.vision_tower, pixels_NCHW, [chosen] if isinstance(chosen, int) else list(chosen))
    joined = torch.cat(states, dim=-1)
    if model.config.vision_feature_select_strategy == "default":
        joined = by_tile(joined, len(pixels_NCHW))[:, 1:].flatten(0, 1).unsqueeze(0)  # without the class token
    return model.multi_modal_projector(joined)


def gemma3_features(model: Any, pixels_NCHW: torch.Tensor) -> torch.Tensor:
    """Return Gemma 3's embeddings, [N, embeddings of a tile, D]: the last hidden states, pooled and projected."""
    tower = model.vision_tower
    (states,) = hidden_states(tower, pixels_NCHW, [-1])
    return model.multi_modal_projector(by_tile(tower.post_layernorm(states), len(pixels_NCHW)))


def internvl_features(model: Any, pixels_NCHW: torch.Tensor) -> torch.Tensor:
    """Return InternVL's embeddings [1, E, D] for all tiles: hidden states of adjacent patches, joined and projected."""
    tower, config = model.vision_tower, model.config
    (states,) = hidden_states(tower, pixels_NCHW, [config.vision_feature_layer])
    if config.vision_feature_layer == -1:
        states = tower.layernorm(states)
    states_NPD = by_tile(states, len(pixels_NCHW))[:, 1:]  # without the class token
    side = math.isqrt(states_NPD.shape[1])
    joined = model.pixel_shuffle(states_NPD.unflatten(1, (side, side)), scale_factor=config.downsample_ratio)
    return model.multi_modal_projector(joined.flatten(0, 2).unsqueeze(0))


def idefics3_features(model: Any, pixels_NCHW: torch.Tensor) -> torch.Tensor:
    """Return the embeddings of Idefics 3 and SmolVLM, [N, embeddings of a tile, D].

    They are computed by the model's connector from the last hidden states.
    """
    tower = model.vision_model
    (states,) = hidden_states(tower, pixels_NCHW, [-1])
    return model.connector(by_tile(tower.post_layernorm(states), len(pixels_NCHW)))


def by_tile(states: torch.Tensor, num_tiles: int) -> torch.Tensor:
    """Return hidden states [1, N * patches, D] as [N, patches, D]."""
    return states.view(num_tiles, -1, states.shape[-1])


FEATURES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "gemma3": gemma3_features,
    "idefics3": idefics3_features,
    "internvl": internvl_features,
    "llava": llava_features,
    "llava_next": llava_features,
}


def hidden_states(tower: Any, pixels_NCHW: torch.Tensor, layers: Sequence[int]) -> list[torch.Tensor]:
    """Return some hidden states of a vision transformer, [1, N * patches, D] each.

    layers: indices in transformers' list of hidden states: 0 is the input of the first layer, 1 its output, and -1 the
    output of the last layer. Only the needed layers run.
    """
    states_NPD = tower.embeddings(pixels_NCHW)
    if hasattr(tower, "pre_layrnorm"):
        states_NPD = tower.pre_layrnorm(states_NPD)
    stack = stack_of(tower)
    unmasked = {"attention_mask": None} if hasattr(tower.encoder, "layers") else {}
    wanted = indices_of(layers, stack)
    found = [states_NPD.flatten(0, 1).unsqueeze(0)]
    for layer in stack[: max(wanted)]:
        found.append(layer(found[-1], **unmasked))
    return [found[layer] for layer in wanted]


def indices_of(layers: Sequence[int], stack: nn.ModuleList) -> list[int]:
    """Return indices in transformers' list of hidden states, with negative ones converted to counts from the start.

    stack: the layers; the list has one hidden state more than there are layers.
    """
    return [layer % (len(stack) + 1) for layer in layers]


def stack_of(tower: Any) -> nn.ModuleList:
    """Return the module list of the layers of a vision transformer."""
    return tower.encoder.layers if hasattr(tower.encoder, "layers") else tower.encoder.layer


def build_tower(config_json: str, dtype: torch.dtype) -> VisionTower:
    """Build the vision tower of a multimodal checkpoint on the meta device, with its buffers on the CPU.

    config_json: text of the checkpoint's config.json. Raises ValueError if the engine does not run the tower, see
    `describe_vision`, or if the version of transformers is not supported.
    """
    supported_version()
    description = describe_vision(config_json)
    if description is None:
        raise ValueError("the checkpoint has no vision tower that the engine runs")
    base = multimodal_model(config_json, dtype).model
    for module in base.children():
        if isinstance(module, PreTrainedModel):
            fill_buffers(module)
    tower: type[GridTower | PooledTower | TileTower] = TileTower
    if not description.tile_size:
        tower = PooledTower if description.stated_positions else GridTower
    return tower(base, description).eval().requires_grad_(False)


def multimodal_model(config_json: str, dtype: torch.dtype) -> Any:
    """Build transformers' multimodal model on the meta device, without its text model.

    Its vision tower calls the engine's attention. config_json: text of the checkpoint's config.json.
    """
    config = read_vision_config(config_json)
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(
            config, dtype=dtype, attn_implementation="eager", trust_remote_code=False
        )
    # Set only now, since `from_config` would look for a kernel of this name.
    config.vision_config._attn_implementation = NAME
    family = FAMILIES[type(model).__name__]
    for name, _ in list(model.model.named_children()):
        if name not in family.modules:
            delattr(model.model, name)
    if hasattr(part := model.model.get_submodule(family.modules[0]), "head"):  # for other uses of the tower
        del part.head
    return model

"""Lists the passes of the forward for steps with images, and the inputs that they add."""

from __future__ import annotations

from compiled_engine.attention.inputs import StepTensor
from compiled_engine.config import ImagesConfig
from compiled_engine.passes.framework.graph_pass import GraphPass
from compiled_engine.passes.images.layer_tokens import LayerTokens
from compiled_engine.passes.images.merge_embeddings import IMAGE_INDEX, MergeEmbeddings
from compiled_engine.passes.images.section_angles import POSITION_DELTAS, SectionAngles
from compiled_engine.passes.images.whole_images import KEYS_AHEAD, WholeImages


def image_step_tensors(images: ImagesConfig) -> tuple[StepTensor, ...]:
    """Return the inputs that passes add to the forward for steps with images."""
    both_ways = [KEYS_AHEAD] if images.vision.both_ways else []
    return (IMAGE_INDEX, *([POSITION_DELTAS] if images.sections else []), *both_ways)


def image_passes(images: ImagesConfig) -> list[GraphPass]:
    """Return the passes for steps with images, in order; they run before all passes that fuse ops."""
    found: list[GraphPass] = [MergeEmbeddings(images.cache_size, images.vision.levels)]
    if images.vision.layer_token_id is not None:
        found.append(LayerTokens(images.vision.layer_token_id))
    if images.sections:
        found.append(SectionAngles(images.sections, images.vision.mrope_interleaved))
    if images.vision.both_ways:
        found.append(WholeImages(images.vision.both_ways_in_windows))
    return found

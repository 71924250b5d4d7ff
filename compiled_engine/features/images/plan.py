"""Plans images: decides which step computes which embeddings, and ends a request's share of a step accordingly.

A step computes the positions of an image only if its embeddings are in the cache, or are computed at the step's
beginning. A step computes a limited number of embeddings, and the cache has a limited number of rows; a request waits
at the first position of an image that does not fit, or whose pixels have not arrived. Pixels are sent to the ranks with
the step that computes an image's embeddings, and with no other.
"""

from __future__ import annotations

from typing import Any

from compiled_engine.config import ImagesConfig
from compiled_engine.engine.cache_resource import CacheResource
from compiled_engine.engine.messages import EngineOutput, EngineRequest
from compiled_engine.engine.plan_hooks import PlanFeature
from compiled_engine.engine.request import Request, RequestStatus
from compiled_engine.engine.steps import StepBuilder, StepInFlight
from compiled_engine.features.images.embedding_cache import CachedImage, EmbeddingCache
from compiled_engine.features.images.extras import (
    NAME,
    PromptImage,
    RowImages,
    Runs,
    StepImages,
    TowerImage,
    images_of,
)
from compiled_engine.features.images.limits import check_num_embeddings, check_params
from compiled_engine.features.images.pixels import GIVE, Piece, PixelStore

_PLANNED = ("image_requests", "images", "image_cache_hits", "tower_images", "tower_embeddings")
# Pixels are asked for before they are needed, but for no more embeddings than this number of full steps computes.
STEPS_AHEAD = 4
COUNTERS = (*_PLANNED, "tower_runs", "tower_replays", "tower_seconds", "tower_compiles")  # ranks count the last four
GAUGES = ("image_cache_rows", "image_cache_rows_used")


class ImagePlan(PlanFeature):
    """Plans the embeddings of steps, within the limits of the configuration."""

    calls = (GIVE,)

    def __init__(self, config: ImagesConfig) -> None:
        self._config = config
        self._cache = EmbeddingCache(config.cache_size)
        self._images: dict[Request, tuple[PromptImage, ...]] = {}
        self.pixels = PixelStore(STEPS_AHEAD * config.step_size)
        # The step being planned: embeddings that it may still compute, images that it computes, rows of images by
        # request, and images whose last position it computes.
        self._left = config.step_size
        self._computed: list[tuple[CachedImage, PromptImage]] = []
        self._placed: dict[Request, list[tuple[int, Runs]]] = {}
        self._passing: list[tuple[Request, int]] = []
        # For each request, the index of the image that lacked room or pixels. Whether an image lacked room in the step
        # being planned, and whether an image whose tokens belong to one step lacked tokens.
        self._awaited: dict[Request, int] = {}
        self._lacks_room = self._lacks_tokens = False
        self._skips = False  # waiting requests, since the last `reconsiders`
        self._counts = dict.fromkeys(_PLANNED, 0)

    def resources(self, groups: Any) -> tuple[CacheResource, ...]:
        return (self._cache,)

    def check(self, request: EngineRequest) -> None:
        if (given := images_of(request)) is None:
            return
        before = 0
        for number, image in enumerate(given.images):
            name = f"request {request.request_id!r}: image {number}"
            for first, length in image.runs:
                if not before <= first < first + length <= len(request.prompt_token_ids):
                    raise ValueError(f"{name} has the positions {image.runs}, which are not those of its prompt")
                before = first + length
            check_num_embeddings(name, image.num_embeddings, self._config)
        check_params(f"request {request.request_id!r}", request.sampling_params, self._config)
        if bool(self._config.sections) != (given.positions is not None):
            raise ValueError(f"request {request.request_id!r}: the positions of its tokens do not suit the model")

    def added(self, request: Request) -> None:
        if (given := images_of(request.asked)) is None:
            return
        self._images[request] = given.images
        request.extras[NAME] = RowImages(
            tuple(image.runs for image in given.images), given.positions, given.position_offset
        )
        self._counts["image_requests"] += 1
        self._counts["images"] += len(given.images)

    def give_inputs(self, key: str, number: int, count: int, piece: Piece) -> None:
        """Store a piece of an image's pixels. The arguments are those of the control calls that `calls_of` makes."""
        self.pixels.give(key, number, count, piece)

    def may_start(self, request: Request) -> bool:
        """Return False while a request must wait: for its pixels, or behind an image that a step could not take.

        Requests without images overtake an image that lacks room for its embeddings. No request overtakes an image that
        lacks tokens of the step, which decodes have taken. Images are computed in the order of requests.
        """
        if (number := self._awaited.get(request)) is not None:
            if not self._is_here(image := self._images[request][number]):
                self._ask(request, number)
                return False
            if not self._lacks_room:
                self._lacks_room = not self._has_room(image)
        refused = self._lacks_tokens or (self._lacks_room and request in self._images)
        self._skips |= refused
        return not refused

    def reconsiders(self) -> bool:
        skipped, self._skips = self._skips, False
        return self.pixels.take_completed() or skipped

    def limit_share(self, request: Request, num_tokens: int) -> int:
        images = self._images.get(request)
        if images is None:
            return num_tokens
        start = request.num_computed_tokens
        end = start + num_tokens
        begins = request.status is RequestStatus.RUNNING
        for number, image in enumerate(images):
            first, behind = image.runs[0][0], sum(image.runs[-1])
            if behind <= start or end <= first:
                continue
            # The tokens of a run may see each other, so that one step has all of them.
            cut = _cut(image.runs, end) if self._config.vision.both_ways else None
            stop = end if cut is None else cut
            needed = any(each < stop and start < each + length for each, length in image.runs)
            if needed and not self._is_here(image):
                self._awaited[request] = number
                self._ask(request, number)
                # A request that waits does not begin with the text before its first image, whose pixels come soon.
                return max(0, first - start) if begins else 0
            if needed and not self._place(request, number, image):
                if first <= start:
                    self._awaited[request], self._lacks_room, self._skips = number, True, True
                return max(0, first - start)
            begins |= needed
            self._awaited.pop(request, None)
            if cut is not None:
                if cut <= start:
                    self._lacks_tokens = self._skips = True
                return max(0, cut - start)
            if behind <= end:
                self._passing.append((request, number))
        return num_tokens

    def take_asks(self) -> list[EngineOutput]:
        return self.pixels.take_asks()

    def _is_here(self, image: PromptImage) -> bool:
        """Return whether the cache has an image, or a step can compute it because its pixels have arrived."""
        return self._cache.has(image.key) or bool(image.inputs) or self.pixels.has(image.key)

    def _ask(self, request: Request, number: int) -> None:
        """Ask for missing pixels of the request's image with index `number` and of its later images.

        Stops at the first image for which PixelStore.ask returns False.
        """
        runs = request.status is RequestStatus.RUNNING
        for place, image in enumerate(self._images[request][number:]):
            if self._is_here(image):
                continue
            if not self.pixels.ask(request.request_id, image.key, image.num_embeddings, now=runs and not place):
                self._skips = True
                return

    def _place(self, request: Request, number: int, image: PromptImage) -> bool:
        """Let a request hold an image, and return True. If the cache lacks the image, the step computes it.

        Returns False, without changes, if there is no room for the image. number: the image's index in the request.
        """
        if self._cache.holds(request, number):
            return True
        held, count = self._cache.hold(request, number, image.key), image.num_embeddings
        if held is not None:
            self._counts["image_cache_hits"] += 1
        else:
            if not self._has_room(image):
                return False
            self._cache.add(image.key, count)
            self._left -= count
            self._counts["tower_images"] += 1
            self._counts["tower_embeddings"] += count
            held = self._cache.hold(request, number, image.key)
            assert held is not None
            self._computed.append((held, image))
        self._placed.setdefault(request, []).append((number, held.rows))
        return True

    def _has_room(self, image: PromptImage) -> bool:
        """Return whether the cache has an image, or has room for it and the step may compute it."""
        if self._cache.has(image.key):
            return True
        count = image.num_embeddings
        # The first image of a step may be larger than the limit.
        return (count <= self._left or self._left == self._config.step_size) and self._cache.can_add(count)

    def built(self, builder: StepBuilder) -> None:
        """Cancel the computation of images if the step has no requests."""
        if builder.is_empty:
            self._cache.unregister([held.place for held, _ in self._computed])
            self._reset()

    def planned(self, step: StepInFlight) -> None:
        computed = [
            TowerImage(held.rows, image.inputs or self.pixels.inputs(image.key))
            for held, image in self._computed
            if held.is_there
        ]
        for _, image in self._computed:
            self.pixels.drop(image.key)
        placed = {request.request_id: rows for request, rows in self._placed.items() if self._cache.runs(request)}
        if computed or placed:
            step.output.extras[NAME] = StepImages(computed, placed)
        for request, number in self._passing:
            self._cache.release(request, number)
        self._reset()

    def failed(self) -> None:
        self._reset()

    def ended(self, request: Request) -> None:
        if self._images.pop(request, None) is not None:
            self._awaited.pop(request, None)
            self._skips |= self.pixels.forget(request.request_id)  # others may need them too

    def metrics(self) -> dict[str, Any]:
        rows = dict(zip(GAUGES, (self._cache.num_rows, self._cache.num_used), strict=True))
        return {**self._counts, **rows}

    def _reset(self) -> None:
        self._left = self._config.step_size
        self._computed, self._placed, self._passing = [], {}, []
        self._lacks_room = self._lacks_tokens = False


def _cut(runs: Runs, end: int) -> int | None:
    """Return the first position of the run that a step ending at `end` would cut; None if it cuts none."""
    return next((first for first, length in runs if first < end < first + length), None)

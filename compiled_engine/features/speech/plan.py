"""Plans audio clips: which slot on the device has the keys and values of which clip, and which step encodes the clip.

A request holds the slot of its clip while it runs. A clip that comes again, in another request, in several completions
of a prompt, or after a preemption, still has its slot unless another clip has needed it. A request waits if its clip
has no slot and none can be freed, or if the clip's features have not come. The core asks the frontend for features once
the request could start.
"""

from __future__ import annotations

from typing import Any

from compiled_engine.engine.cache_resource import CacheResource
from compiled_engine.engine.messages import EngineOutput, EngineRequest
from compiled_engine.engine.plan_hooks import PlanFeature
from compiled_engine.engine.request import Request, RequestStatus
from compiled_engine.engine.steps import StepBuilder, StepInFlight
from compiled_engine.features.images.embedding_cache import CachedImage, EmbeddingCache
from compiled_engine.features.images.pixels import GIVE, Piece, PixelStore
from compiled_engine.features.speech.extras import NAME, TRANSCRIPTION, NewClip, PromptClip, clip_of, transcription_of
from compiled_engine.speech import NO_RULES, SpeechConfig

_PLANNED = ("clips", "clip_cache_hits", "clips_encoded")
# Features are asked for before they are needed, but for no more clips than this number of full steps encodes.
STEPS_AHEAD = 4
COUNTERS = (*_PLANNED, "encoder_runs")  # the ranks count the last one
GAUGES = ("clip_slots", "clip_slots_used")


class ClipSlots(EmbeddingCache):
    """Assigns slots on the device to clips. Implements FindableResource.

    A clip has one slot, and a request one clip.
    """

    kind = "clip slots"

    def place(self, request: Request, key: str) -> int | None:
        """Let a running request hold a clip's slot. Return the slot, or None if the clip has none."""
        held = self.hold(request, 0, key)
        return None if held is None else held.rows[0][0]


class SpeechPlan(PlanFeature):
    """Plans the clips of steps, within the limits of the configuration."""

    calls = (GIVE,)

    def __init__(self, config: SpeechConfig) -> None:
        self._config = config
        self._slots = ClipSlots(config.num_slots)
        self._clips: dict[Request, PromptClip] = {}
        self._slot: dict[Request, int] = {}  # of requests that are being admitted
        self.features = PixelStore(STEPS_AHEAD * config.step_clips)
        self._encoded: list[tuple[str, CachedImage]] = []  # clips that the step being planned encodes
        self._skips = False  # whether a waiting request was skipped since the last `reconsiders`
        self._counts = dict.fromkeys(_PLANNED, 0)

    def resources(self, groups: Any) -> tuple[CacheResource, ...]:
        return (self._slots,)

    def check(self, request: EngineRequest) -> None:
        if clip_of(request) is None:
            raise ValueError(
                f"request {request.request_id!r} has no audio; allowed: one clip, as multi_modal_data {{'audio': ...}}"
            )
        if transcription_of(request.sampling_params.extra_args) is not None and self._config.rules is None:
            raise ValueError(f"extra_args[{TRANSCRIPTION!r}] is given; allowed: none, as {NO_RULES}")

    def added(self, request: Request) -> None:
        """Store the request's clip. With timestamps, the request gets one token a step: each limits the next."""
        clip = clip_of(request.asked)
        assert clip is not None
        self._clips[request] = clip
        if transcription_of(request.sampling_params.extra_args) == "timestamps":
            request.max_new_tokens_per_step = request.most_when_admitted = 1
        self._counts["clips"] += 1

    def give_inputs(self, key: str, number: int, count: int, piece: Piece) -> None:
        """Store a piece of a clip's features. See `calls_of` in features/images/pixels.py for the arguments."""
        self.features.give(key, number, count, piece)

    def may_start(self, request: Request) -> bool:
        key = self._clips[request].key
        if self._slots.has(key):
            return True
        if not self.features.has(key):
            self._skips |= not self.features.ask(request.request_id, key, 1, now=False)
            return False
        has_room = len(self._encoded) < self._config.step_clips and self._slots.can_add(1)
        self._skips |= not has_room
        return has_room

    def reconsiders(self) -> bool:
        skipped, self._skips = self._skips, False
        return self.features.take_completed() or skipped

    def limit_share(self, request: Request, num_tokens: int) -> int:
        """Assign a slot to the clip of a request that starts.

        Return `num_tokens`: the step may compute all these tokens.

        `may_start` has checked that there is a slot.
        """
        if request.status is not RequestStatus.RUNNING:
            self._slot[request] = self._place(request, self._clips[request].key)
        return num_tokens

    def admitted(self, request: Request, extras: dict[str, Any]) -> None:
        extras[NAME] = self._slot.pop(request)

    def built(self, builder: StepBuilder) -> None:
        """Cancel the clips that the step would encode, if the step is empty."""
        if builder.is_empty:
            self._slots.unregister([held.place for _, held in self._encoded])
            self._reset()

    def planned(self, step: StepInFlight) -> None:
        new = [NewClip(held.rows[0][0], self.features.inputs(key)) for key, held in self._encoded if held.is_there]
        if new:
            step.output.extras[NAME] = new
        for key, _ in self._encoded:
            self.features.drop(key)
        self._reset()

    def take_asks(self) -> list[EngineOutput]:
        return self.features.take_asks()

    def failed(self) -> None:
        self._reset()

    def ended(self, request: Request) -> None:
        if self._clips.pop(request, None) is not None:
            self._skips = True  # it may have freed a slot
            self.features.forget(request.request_id)

    def metrics(self) -> dict[str, Any]:
        return {**self._counts, **dict(zip(GAUGES, (self._slots.num_rows, self._slots.num_used), strict=True))}

    def _place(self, request: Request, key: str) -> int:
        slot = self._slots.place(request, key)
        if slot is not None:
            self._counts["clip_cache_hits"] += 1
            return slot
        self._slots.add(key, 1)
        held = self._slots.hold(request, 0, key)
        assert held is not None
        self._encoded.append((key, held))
        self._counts["clips_encoded"] += 1
        return held.rows[0][0]

    def _reset(self) -> None:
        self._encoded = []
        self._slot.clear()

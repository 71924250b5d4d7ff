"""The device part of images: computes their embeddings, and gives the forward their positions in a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from compiled_engine.config import ImagesConfig
from compiled_engine.engine.input_batch import InputBatch, InputBuffers
from compiled_engine.engine.messages import NewRequest, SchedulerOutput
from compiled_engine.engine.request_states import POSITION_SHIFT, RequestStates
from compiled_engine.engine.step_hooks import FeatureGraphs, RunnerParts, StepFeature
from compiled_engine.features.images.extras import NAME, RowImages, Runs, StepImages
from compiled_engine.features.images.tower import Tower
from compiled_engine.features.images.tower_clock import TowerClock
from compiled_engine.graphs.cuda_graphs.dispatcher import GraphKey
from compiled_engine.passes.images.merge_embeddings import EMBEDDINGS, IMAGE_INDEX, IMAGES
from compiled_engine.passes.images.section_angles import POSITION_DELTAS
from compiled_engine.passes.images.whole_images import KEYS_AHEAD
from compiled_engine.process.progress import Progress
from compiled_engine.rows.staged_writes import upload


@dataclass
class _Row:
    """The images of a request that has a row."""

    positions: list[np.ndarray]  # of each image, int64
    end: int  # behind the last one
    index_L: np.ndarray  # row of the embeddings of each token before `end`, int32, -1 for none
    deltas_L3: np.ndarray | None  # POSITION_DELTAS of each token before `end`
    ahead_L: np.ndarray  # KEYS_AHEAD of each token before `end`

    @classmethod
    def of(cls, given: RowImages) -> _Row:
        positions = [_numbers(runs) for runs in given.runs]
        end = max((int(each[-1]) + 1 for each in positions), default=0)
        deltas_L3 = None
        if given.positions is not None:
            usual_L = np.arange(end, dtype=np.int32) + given.position_offset
            deltas_L3 = given.positions.tensor().numpy().T[:end] - usual_L[:, None]
        ahead_L = np.zeros(end, np.int32)
        for first, length in (run for runs in given.runs for run in runs):
            ahead_L[first : first + length] = np.arange(length)[::-1]
        return cls(positions, end, np.full(end, -1, np.int32), deltas_L3, ahead_L)


class StepImagesOnDevice(StepFeature):
    """Runs the vision tower before a step, and chooses the variant IMAGES for steps that compute positions of images.

    Each rank has a whole tower. embeddings: the buffer from which the forward reads embeddings, a parameter declared in
    passes/images/merge_embeddings.py.
    """

    name = NAME

    def __init__(
        self,
        config: ImagesConfig,
        tower: Tower,
        embeddings: torch.Tensor,
        states: RequestStates,
        buffers: InputBuffers,
    ) -> None:
        self.tower, self._embeddings, self._states = tower, embeddings, states
        self._buffers = {name: tensor for name, _, tensor in buffers.step[IMAGES]}
        if config.sections:
            states.shift_positions()
        self._images: dict[int, _Row] = {}  # of rows whose images are not computed yet
        self._num_runs, self._clock = 0, TowerClock(embeddings.device)

    @classmethod
    def of(cls, parts: RunnerParts, images: ImagesConfig) -> StepImagesOnDevice:
        """Make the feature of a runner: compile and load the tower. Raises what Tower raises."""
        most = max(images.step_size, images.most_embeddings)
        tower = Tower(parts.config, images.config, most, parts.group, parts.progress, parts.memory.weights)
        return cls(images, tower, parts.tensors[EMBEDDINGS], parts.states, parts.buffers)

    @property
    def rows(self) -> Mapping[int, Any]:  # type: ignore[override]
        return self._images

    def start_up(self, progress: Progress) -> int:
        """On a GPU, run the tower on the largest images of a step. Return the peak of memory in bytes, 0 on a CPU."""
        device = self._embeddings.device
        if device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        self.tower.embed(self.tower.largest())
        return torch.cuda.max_memory_allocated(device) - before

    def graphs(self, keys: Sequence[GraphKey], replay: Callable[[GraphKey, int], torch.Tensor]) -> FeatureGraphs:
        graphs = self.tower.captured_by(replay)
        return FeatureGraphs(keys, dict.fromkeys(graphs.keys.values(), graphs) if graphs else {})

    def added(self, row: int, request: NewRequest) -> None:
        if (found := request.extras.get(NAME)) is None:
            return
        given = msgspec.convert(found, RowImages)
        if given.positions is not None:
            self._states.fields.set(row, **{POSITION_SHIFT: given.position_offset})
        self._images[row] = _Row.of(given)

    def removed(self, row: int) -> None:
        self._images.pop(row, None)

    def begin(self, step: SchedulerOutput) -> None:
        """Compute the embeddings of the step's new images.

        Also records, for each request of the step, which rows of the buffer have the embeddings of its images.
        """
        if (found := step.extras.get(NAME)) is None:
            return
        given = msgspec.convert(found, StepImages)
        if given.computed:
            inputs = [{name: each.tensor() for name, each in image.inputs.items()} for image in given.computed]
            rows_E = np.concatenate([_numbers(image.rows) for image in given.computed])
            with self._clock.run():
                embeddings = self.tower.embed(inputs)
            self._embeddings.index_copy_(0, upload(rows_E, self._embeddings.device), embeddings)
            self._num_runs += 1
        for request_id, placed in given.placed.items():
            row = self._images[self._states.row(request_id)]
            for number, rows in placed:
                row.index_L[row.positions[number]] = _numbers(rows)

    def variant(self, step: SchedulerOutput) -> str:
        """Return IMAGES if the step computes a position of an image, else "".

        With M-RoPE, every position up to the end of a request's last image counts.
        """
        needed = False
        for request_id, start, count in zip(step.request_ids, step.starts, step.counts, strict=True):
            row = self._images.get(self._states.row(request_id))
            if row is not None and start < row.end:
                needed |= row.deltas_L3 is not None or bool((row.index_L[start : start + count] >= 0).any())
        return IMAGES if needed else ""

    def receive(self, batch: InputBatch, hidden_wanted: bool) -> None:
        """Write the inputs of the forward that only the variant IMAGES reads, if the batch runs this variant."""
        if batch.variant != IMAGES:
            return
        index_T = np.full(batch.padded_tokens, -1, np.int32)
        deltas_T3 = np.zeros((batch.padded_tokens, 3), np.int32)
        ahead_T = np.zeros(batch.padded_tokens, np.int32)
        starts = batch.query_starts
        for number, row in enumerate(batch.rows[: batch.num_real_rows].tolist()):
            if (images := self._images.get(row)) is None:
                continue
            start = int(batch.num_computed[number])
            count = max(0, min(int(starts[number + 1] - starts[number]), images.end - start))
            into = slice(starts[number], starts[number] + count)
            index_T[into] = images.index_L[start : start + count]
            ahead_T[into] = images.ahead_L[start : start + count]
            if images.deltas_L3 is not None:
                deltas_T3[into] = images.deltas_L3[start : start + count]
        of_step = {IMAGE_INDEX.name: index_T, POSITION_DELTAS.name: deltas_T3, KEYS_AHEAD.name: ahead_T}
        for name in self._buffers.keys() & of_step.keys():
            self._write(name, of_step[name])

    def end(self, step: SchedulerOutput) -> None:
        """Forget the images of requests whose last image position the step has computed."""
        if not self._images:
            return
        for request_id, start, count in zip(step.request_ids, step.starts, step.counts, strict=True):
            row = self._states.row(request_id)
            if (images := self._images.get(row)) is not None and images.end <= start + count:
                del self._images[row]

    def metrics(self) -> dict[str, Any]:
        graphs = self.tower.graphs
        return {
            "tower_runs": self._num_runs,
            "tower_replays": graphs.num_replays if graphs else 0,
            "tower_seconds": self._clock.seconds(),
            "tower_compiles": self.tower.counts.compiles,
        }

    def _write(self, name: str, values: np.ndarray) -> None:
        tensor = self._buffers[name]
        tensor[: len(values)].copy_(upload(values, tensor.device))


def _numbers(runs: Runs) -> np.ndarray:
    """Return the positions in runs, int64."""
    return np.concatenate([np.arange(first, first + length) for first, length in runs])

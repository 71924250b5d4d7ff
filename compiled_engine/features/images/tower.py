"""Runs a vision tower, compiled or eager, on the images of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from compiled_engine.config import EngineConfig
from compiled_engine.engine.load_model import compile_in_turn, load_model
from compiled_engine.engine.rank_memory import Memory
from compiled_engine.features.images.tower_graphs import TowerForwards, TowerGraphs
from compiled_engine.graphs.compiled_model import CompileCounts, CompiledModel
from compiled_engine.graphs.compiler.signature import FORWARD, callables_of
from compiled_engine.graphs.cuda_graphs.dispatcher import GraphKey
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.models.checkpoint.loader import CheckedWeights
from compiled_engine.models.vision.description import describe_vision
from compiled_engine.models.vision.inputs import blank_image, largest_images, num_embeddings, tower_inputs
from compiled_engine.models.vision.pixel_codes import CODES, OF_PIXELS
from compiled_engine.models.vision.tower_config import tower_config
from compiled_engine.models.vision.weights import tower_names
from compiled_engine.parallel.group import Group
from compiled_engine.process.progress import Progress
from compiled_engine.process.timeline import Timeline

Image = Mapping[str, torch.Tensor]


class Tower:
    """A checkpoint's vision tower on this rank's device. Each rank has the whole tower.

    One compiled graph serves all numbers and sizes of images, so nothing is compiled after the start. config: the
    tower's. compiled: None if the tower runs eagerly. graphs: CUDA graphs of small calls; None if there are none.
    """

    def __init__(
        self,
        engine: EngineConfig,
        config_json: str,
        most_embeddings: int,
        group: Group,
        progress: Progress,
        memory: Memory | None = None,
    ) -> None:
        """Compile and load the tower. engine: the engine's configuration, with the text model.

        config_json: text of the checkpoint's config.json. most_embeddings: of all images in a call; a call always takes
        one tile. memory: see RankMemory.weights. Raises ValueError for a checkpoint without a supported tower, and what
        the compiler and the loader raise.
        """
        description = describe_vision(config_json)
        if description is None:
            raise ValueError(f"{engine.model.path} has no vision tower that the engine runs")
        self.description, self.most_embeddings = description, most_embeddings
        self.config = tower_config(engine, description, config_json, most_embeddings)
        self.timeline = Timeline()
        self.compiled: CompiledModel | None = compile_in_turn(self.config, group, build_model, progress, self.timeline)
        with self.timeline.span("load weights"):
            loaded = load_model(self.config, self.compiled, group, progress, memory=memory)
        self._weights, self._lost = loaded.weights, False
        self.num_parameters = loaded.num_parameters
        signature = callables_of(self.config)[FORWARD]
        self._on_host = {tensor.name for tensor in signature.tensors if tensor.on_host}
        call, distinct = (
            loaded.callables.bind(FORWARD, loaded.tensors, distinct=each)[-1].call for each in (False, True)
        )
        self._forwards = TowerForwards(signature, call, distinct)
        self.graphs: TowerGraphs | None = None
        self.embed([blank_image(description, 1)])  # with other kernels than larger images have

    @property
    def counts(self) -> CompileCounts:
        """The numbers of traces and compiled pieces since the start."""
        return CompileCounts(0, 0) if self.compiled is None else self.compiled.counts

    def embed(self, images: Sequence[Image]) -> torch.Tensor:
        """Return the E embeddings of all images, one after the other: [E, (1 + levels) * D] in the model's dtype.

        levels: the number of further embeddings of each position, see VisionDescription. images: the processor's output
        for each image, on the CPU. Does not wait for the device. The result is valid until the next replay of a graph.
        """
        inputs = self._inputs(images)
        if self.graphs is not None and (key := self.graphs.key_for(inputs)) is not None:
            return self.graphs.embed(key, inputs)[: sum(map(self.num_embeddings, images))]
        given = {name: each if name in self._on_host else self._on_device(each) for name, each in inputs.items()}
        with torch.no_grad():
            embeddings: torch.Tensor = self._forwards.call(*self._forwards.signature.passed(given))
        return embeddings

    def captured_by(self, replay: Callable[[GraphKey, int], torch.Tensor]) -> TowerGraphs | None:
        """Make the tower's graphs and return them; None if the configuration captures no graphs.

        `embed` uses the graphs from now on, so they must be captured before its next call. replay: see
        StepFeature.graphs.
        """
        if self.config.graph.captures:
            self.graphs = TowerGraphs(self.description, self.config, self._forwards, replay)
        return self.graphs

    def check_weights(self, tensors: dict[str, torch.Tensor], source: Path) -> CheckedWeights | None:
        """Check those of a checkpoint's tensors that belong to the tower, and return the result of RankWeights.check.

        Returns None if none belongs to the tower. source: see RankWeights.check. After `lose_weights`, the tensors must
        include those of the tower.
        """
        model = self._weights.config
        assert model.transformers is not None
        found = tower_names(model.transformers.config, model.dtype, tensors)
        if not found and not self._lost:
            return None
        checked = self._weights.check({name: tensors[name] for name in found}, source)
        self._lost = False
        return checked

    def lose_weights(self) -> list[torch.Tensor]:
        """Mark the tensors that the checkpoint fills as lost, and return them. The next update must fill them again."""
        self._lost = True
        return list(self._weights.stored.filled())

    def largest(self) -> list[Image]:
        """Return the largest images that a call may have."""
        return list(largest_images(self.description, self.most_embeddings))

    def num_embeddings(self, image: Image) -> int:
        """Return the number of embeddings of an image."""
        return num_embeddings(self.description, image)

    def _inputs(self, images: Sequence[Image]) -> dict[str, torch.Tensor]:
        """Return the inputs of the forward, by name. All but pixels are on the CPU.

        Pixels are uploaded image by image, and joined on the device.
        """
        uploaded = [{name: self._uploaded(name, tensor) for name, tensor in image.items()} for image in images]
        return tower_inputs(self.description, uploaded, self.config.model.dtype)

    def _uploaded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name not in OF_PIXELS:
            return tensor
        return self._on_device(tensor if name == CODES else tensor.to(self.config.model.dtype))

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        device = self.config.device
        return tensor if tensor.device.type == device.type else tensor.pin_memory().to(device, non_blocking=True)

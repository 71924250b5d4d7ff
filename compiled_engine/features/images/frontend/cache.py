"""Cache of processed images in host memory, least recently used first, bounded in bytes."""

from __future__ import annotations

import threading
from typing import NamedTuple

from compiled_engine.features.images.extras import PlainTensor

NO_PLACEHOLDER = -1
GRID = "grid_thw"  # end of the names of inputs with an image's rows and columns


class ProcessedMedia(NamedTuple):
    """An image or a clip of audio as the checkpoint's processor returns it."""

    key: str  # digest of the source and the settings
    placeholder: int  # token id of a placeholder in prompts; audio has none
    token_ids: tuple[int, ...]  # that replace a placeholder
    inputs: dict[str, PlainTensor]  # inputs of the tower or encoder, by the processor's names

    @property
    def num_bytes(self) -> int:
        return 8 * len(self.token_ids) + sum(len(tensor.data) for tensor in self.inputs.values())

    def without_pixels(self) -> ProcessedMedia:
        """Return the image with only those inputs that positions depend on."""
        return self._replace(inputs={name: each for name, each in self.inputs.items() if name.endswith(GRID)})


class ImageCache:
    """Processed images by key. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._images: dict[str, ProcessedMedia] = {}  # least recently used first
        self._lock = threading.Lock()
        self.num_bytes = 0

    def get(self, key: str) -> ProcessedMedia | None:
        """Return the image with this key, now the most recently used one; None if the cache does not have it."""
        with self._lock:
            if (image := self._images.pop(key, None)) is not None:
                self._images[key] = image
            return image

    def put(self, image: ProcessedMedia) -> None:
        """Keep an image, and drop others as needed. An image larger than the cache is not kept."""
        with self._lock:
            if image.key in self._images or image.num_bytes > self._max_bytes:
                return
            self._images[image.key] = image
            self.num_bytes += image.num_bytes
            while self.num_bytes > self._max_bytes:
                oldest = self._images.pop(next(iter(self._images)))
                self.num_bytes -= oldest.num_bytes

    def clear(self) -> None:
        """Drop all images."""
        with self._lock:
            self._images.clear()
            self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._images)

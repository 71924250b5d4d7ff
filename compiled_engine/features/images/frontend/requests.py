"""Requests with images: their images are read and processed, and become tokens and extras of the request."""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeVar

from compiled_engine.engine.messages import ControlCall
from compiled_engine.features.images.extras import PlainTensor, PromptImage, contents_of, extras_of
from compiled_engine.features.images.frontend.cache import ProcessedMedia
from compiled_engine.features.images.frontend.download import Downloader, PromptDownloads
from compiled_engine.features.images.frontend.placeholders import expanded, runs_of_images
from compiled_engine.features.images.frontend.processing import MediaProcessing, ProcessorFiles, missing_packages
from compiled_engine.features.images.frontend.sources import MediaSource, read_source
from compiled_engine.features.images.frontend.urls import UrlPolicy
from compiled_engine.features.images.limits import check_num_embeddings, check_params
from compiled_engine.features.images.pixels import calls_of
from compiled_engine.frontend.image_parts import ImageUrl
from compiled_engine.frontend.prompts import Prompt
from compiled_engine.frontend.request_hooks import Attachment, RequestFeature, RequestPart
from compiled_engine.process.smallest_first import Stopped, never
from compiled_engine.schema import require_json

if TYPE_CHECKING:
    from compiled_engine.config import EngineConfig, ImageInput, ImagesConfig
    from compiled_engine.frontend.tokenizer import Tokenizer
    from compiled_engine.sampling.params import SamplingParams

log = logging.getLogger("compiled_engine")
Result = TypeVar("Result")

DATA, SETTINGS, NAMES = "multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids"
INSTALL = "pip install 'compiled-engine[images]'"
AHEAD = 8  # images of a prompt that are processed while an earlier one is awaited
# Bytes of processed images that prompts hold until the core asks for them. Further ones may have to be processed again.
MOST_HELD = 4 << 30


Begun = tuple[MediaSource, Future[ProcessedMedia]]
"""An image that is being processed."""


class ImageRequests(RequestFeature):
    """Turns the images of prompts into tokens, and gives the core the tower's inputs.

    processing: None if prompts may have no images, for the reason `why_none`. config, images: None unless the
    engine takes images. tokenizer: None if prompts are token ids. longest_prompt: most tokens of a prompt.
    """

    def __init__(
        self,
        processing: MediaProcessing | None,
        config: ImageInput | None = None,
        images: ImagesConfig | None = None,
        tokenizer: Tokenizer | None = None,
        longest_prompt: int = sys.maxsize,
        *,
        why_none: str = "",
        downloader: Downloader | None = None,
    ) -> None:
        self.processing, self._config = processing, config
        self.images, self.tokenizer = images, tokenizer
        self.longest_prompt = longest_prompt
        self._why_none = why_none
        # Bytes of an element of the tower's input.
        self.element_bytes = 2 if processing is not None and processing.dtype in ("bfloat16", "float16") else 4
        self._held: Counter[str] = Counter()  # prompts that hold each processed image, by key
        self._guard = threading.Lock()  # protects `_held` and `held_bytes`
        self.held_bytes, self.most_held = 0, MOST_HELD  # of these images
        self.downloader = downloader or Downloader()
        self.policy = UrlPolicy() if config is None else UrlPolicy(config.allowed_domains, config.local_folder)

    @classmethod
    def of(cls, config: EngineConfig, tokenizer: Tokenizer | None) -> ImageRequests:
        """Make the frontend's part of images for an engine. tokenizer: None if prompts are token ids."""
        given, why_none = config.image_input, config.reasons.get("image_input", "the model takes only text")
        if given is not None and (missing := missing_packages()):
            given, why_none = None, f"the package {missing[0]} is not installed ({INSTALL})"
            log.warning("prompts may have no images: %s", why_none)
        if given is None or config.images is None:
            return cls(None, why_none=why_none)
        model = config.model
        dtype = str(model.dtype).removeprefix("torch.")
        files = ProcessorFiles(model.path, config.tokenizer or model.path, dtype, given.max_pixels)
        processing = MediaProcessing(files, given.num_workers, given.cache_bytes)
        processing.start()
        return cls(processing, given, config.images, tokenizer, model.max_model_len - model.yields_tokens)

    @property
    def why_none(self) -> str | None:
        """The reason why prompts may have no images; None if they may."""
        return self._why_none if self.processing is None else self.processing.unusable or None

    @property
    def placeholder(self) -> int | None:
        """The token that stands for an image in prompts; None if prompts may have no images."""
        return None if self.processing is None or self._config is None else self._config.placeholder

    def attach(self, prompts: Sequence[Prompt]) -> Sequence[Attachment | None]:
        return [self._attach(prompt) if prompt.data else None for prompt in prompts]

    def _attach(self, prompt: Prompt) -> Attachment | None:
        name, data = prompt.part_name(DATA), prompt.data[DATA]
        if not isinstance(data, Mapping):
            raise TypeError(f"{name} must be a dict such as {{'image': image}}, got {type(data).__name__}")
        images = data.get("image")
        if isinstance(images, PromptImages):  # prepared before
            return images
        for kind, value in data.items():
            if kind != "image" and value is not None and (not isinstance(value, list | tuple) or value):
                raise ValueError(f"{name} has {kind!r}; allowed: 'image'")
        several = isinstance(images, list | tuple)
        given = [] if images is None else list(images) if several else [images]
        if not given:
            _require_no_names(prompt.part_name(NAMES), prompt.data.get(NAMES))
            return None
        if self._config is None or self.why_none is not None:
            raise ValueError(f"{name} must have no images: {self.why_none}")
        if len(given) > self._config.max_images:
            raise ValueError(
                f"{name} has {len(given)} images; allowed: at most {self._config.max_images} (limit_mm_per_prompt)"
            )
        _check_names(prompt.part_name(NAMES), prompt.data.get(NAMES), len(given))
        settings = {} if prompt.data.get(SETTINGS) is None else prompt.data[SETTINGS]
        require_json(prompt.part_name(SETTINGS), settings)
        key = [f"[{index}]" if several else "" for index in range(len(given))]
        names = [
            each.name if isinstance(each, ImageUrl) else f"{name}['image']{key[index]}"
            for index, each in enumerate(given)
        ]
        return PromptImages(
            self, prompt.name, list(zip(names, given, strict=True)), {**self._config.settings, **settings}
        )

    def read(self, name: str, image: Any, downloads: PromptDownloads) -> MediaSource:
        """Read an image as the user gave it, and return its source.

        name: the image's name. Raises TypeError, ValueError or OSError, whose messages begin with this name.
        """
        assert self._config is not None
        if isinstance(image, MediaSource):  # read before
            return image
        if not isinstance(image, ImageUrl):
            return read_source(name, image, self._config.max_pixels)
        try:
            return self.policy.read(image.url, downloads)
        except (ValueError, OSError) as error:
            reason = error if isinstance(error, ValueError) else "it cannot be read"
            raise ValueError(f"{name}: {reason}") from None

    def require_fit(self, image: ProcessedMedia) -> None:
        """Raise ValueError unless the engine can compute the embeddings of a processed image."""
        from compiled_engine.models.vision.inputs import check_image, num_embeddings
        from compiled_engine.models.vision.pixel_codes import OF_PIXELS

        assert self.images is not None
        vision = self.images.vision
        tensors = {
            name: each.without_data() if name in OF_PIXELS else each.tensor() for name, each in image.inputs.items()
        }
        check_image(vision, tensors)
        count, places = num_embeddings(vision, tensors), image.token_ids.count(vision.image_token_id)
        if count != places:
            raise ValueError(f"the processor gives the image {places} tokens; allowed: {count}, one for each embedding")
        check_num_embeddings("the image", count, self.images)

    def most_bytes(self, num_images: int) -> int:
        """Return an upper bound on the bytes of a prompt's `num_images` images once they are processed."""
        if self.images is None or self._config is None:
            return 0
        most = min(self.images.most_embeddings, self.images.cache_size)
        bytes_of_each = self.images.vision.input_elements * self.element_bytes
        return min(num_images * most, self.longest_prompt + most) * bytes_of_each

    def hold(self, image: ProcessedMedia) -> bool:
        """Count an image that a prompt holds, and return True.

        Returns False, without counting, if all held images would have more than `most_held` bytes. The bytes of an
        image that several prompts hold count once.
        """
        with self._guard:
            size = 0 if self._held[image.key] else image.num_bytes
            if self.held_bytes + size > self.most_held:
                return False
            self.held_bytes += size
            self._held[image.key] += 1
            return True

    def release(self, image: ProcessedMedia) -> None:
        """Undo a `hold` of this image that returned True."""
        with self._guard:
            self._held[image.key] -= 1
            if not self._held[image.key]:
                del self._held[image.key]
                self.held_bytes -= image.num_bytes

    def forget(self) -> None:
        """Empty the cache of processed images."""
        if self.processing is not None:
            self.processing.cache.clear()

    def metrics(self) -> dict[str, float]:
        return {} if self.processing is None else self.processing.metrics()

    def close(self) -> None:
        if self.processing is not None:
            self.processing.close()


class PromptImages(Attachment):
    """The images of a prompt: processed in `wait`, and given to the core when it asks for them.

    Pixels are held until then, within the bound of ImageRequests. Pixels beyond the bound come from the cache, or the
    images are processed again. name: the prompt's, for errors. given: each image with its name. settings: arguments of
    the processor.
    """

    def __init__(
        self, requests: ImageRequests, name: str, given: Sequence[tuple[str, Any]], settings: Mapping[str, Any]
    ) -> None:
        self._requests, self._name, self._settings = requests, name, settings
        self._given = list(given)
        self._images: list[ProcessedMedia] = []  # without pixels
        self._expanded: tuple[int, ...] | None = None
        self._held: dict[str, ProcessedMedia] = {}  # with pixels, by key
        weakref.finalize(self, _release_all, requests, self._held)

    @property
    def is_ready(self) -> bool:
        return bool(self._images)

    @property
    def is_remote(self) -> bool:
        return any(map(_is_remote, self._given))

    def wait(self, is_stopped: Stopped = never) -> None:
        if self._images:
            return
        with closing(self._begun(is_stopped)) as begun:
            self._take_all(begun, is_stopped)

    def _take_all(self, begun: Iterator[tuple[str, Begun]], is_stopped: Stopped) -> None:
        assert self._requests.processing is not None
        images, num_tokens = list[ProcessedMedia](), 0
        for number, (name, (source, running)) in enumerate(begun):
            try:
                image = self._requests.processing.result(running, is_stopped)
                self._requests.require_fit(image)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            images.append(image.without_pixels())
            num_tokens += len(image.token_ids)
            if num_tokens > (longest := self._requests.longest_prompt):
                raise ValueError(
                    f"{self._name} must have at most {longest} tokens (max_model_len {longest + 1}, less one to"
                    f" generate), got at least {num_tokens} for its images"
                )
            if _is_remote(self._given[number]):
                self._given[number] = name, source  # so the image is not fetched again
            if image.key not in self._held and self._requests.hold(image):
                self._held[image.key] = image
        self._images = images

    def _begun(self, is_stopped: Stopped) -> Generator[tuple[str, Begun], None, None]:
        """Begin to process the images, and yield (name, begun image) of each in order.

        At most AHEAD images after the yielded one are begun, since an error may make the others needless. Images that
        were not yielded are given up when the generator is closed.
        """
        assert self._requests.processing is not None
        downloads = PromptDownloads(self._requests.downloader, is_stopped)
        # Images that other machines send are awaited together.
        threads = ThreadPoolExecutor(AHEAD + 1) if self.is_remote else None
        ahead: deque[tuple[str, Future[Begun]]] = deque()
        try:
            for name, image in self._given:
                ahead.append((name, _called(threads, self._begin, name, image, downloads)))
                if len(ahead) > AHEAD:
                    yield _first(ahead)
            while ahead:
                yield _first(ahead)
        finally:
            for _, begun in ahead:
                if not begun.cancel():
                    begun.add_done_callback(self._leave)
            if threads is not None:
                threads.shutdown(wait=False)

    def _begin(self, name: str, image: Any, downloads: PromptDownloads) -> Begun:
        """Read an image, and begin to process it. Returns (source, future). Raises as ImageRequests.read does."""
        assert self._requests.processing is not None
        source = self._requests.read(name, image, downloads)
        return source, self._requests.processing.submit(source, self._settings)

    def _leave(self, begun: Future[Begun]) -> None:
        if not begun.cancelled() and begun.exception() is None and self._requests.processing is not None:
            self._requests.processing.leave(begun.result()[1])

    def expand(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        if self._expanded is not None and token_ids == self._expanded:
            return token_ids
        tokenizer = self._requests.tokenizer
        special_ids = frozenset() if tokenizer is None else tokenizer.special_ids
        try:
            self._expanded = expanded(
                token_ids,
                self._images[0].placeholder,
                [image.token_ids for image in self._images],
                special_ids,
                tokenizer,
            )
        except ValueError as error:
            raise ValueError(f"{self._name}: {error}") from None
        return self._expanded

    def part(self, token_ids: tuple[int, ...], params: SamplingParams) -> RequestPart:
        assert self._requests.images is not None
        vision = self._requests.images.vision
        check_params(self._name, params, self._requests.images)
        counts = [image.token_ids.count(vision.image_token_id) for image in self._images]
        if self._expanded is not None and len(token_ids) < len(self._expanded):
            kept = token_ids.count(vision.image_token_id)
            if kept < sum(counts):
                raise ValueError(f"{self._name}: truncate_prompt_tokens must not cut an image")
        try:
            runs = runs_of_images(token_ids, vision.image_token_id, counts)
        except ValueError as error:
            raise ValueError(f"{self._name}: {error}") from None
        images = [PromptImage(image.key, places) for image, places in zip(self._images, runs, strict=True)]
        positions, offset = None, 0
        if vision.mrope_section is not None:
            from compiled_engine.models.vision.positions import image_positions

            tensors = [{name: value.tensor() for name, value in image.inputs.items()} for image in self._images]
            positions, offset = image_positions(vision, token_ids, tensors)
        return RequestPart(extras_of(images, positions, offset), contents=contents_of(images), give=self.give)

    def give(self, keys: Sequence[str], is_stopped: Stopped = never) -> list[ControlCall]:
        """Return the control calls that give the core the pixels of the images with these keys, see PreparedRequest.

        Images whose pixels are no longer held are read and processed again. Raises ValueError if one has changed.
        """
        numbers = {image.key: number for number, image in enumerate(self._images)}
        return list(calls_of({key: self._inputs(key, numbers[key], is_stopped) for key in keys}))

    def _inputs(self, key: str, number: int, is_stopped: Stopped) -> Mapping[str, PlainTensor]:
        assert self._requests.processing is not None
        if (image := self._held.pop(key, None)) is not None:
            self._requests.release(image)
            return image.inputs
        if (image := self._requests.processing.cache.get(key)) is not None:
            return image.inputs
        name, given = self._given[number]
        _, running = self._begin(name, given, PromptDownloads(self._requests.downloader, is_stopped))
        again = self._requests.processing.result(running, is_stopped)
        if again.key != key:
            raise ValueError(f"{name} has changed since it was read")
        return again.inputs


def _check_names(name: str, given: Any, num_images: int) -> None:
    """Raise TypeError or ValueError unless `given` has a name, or None, for each image.

    name: the argument's name in errors. given: a dict such as {"image": name or list of names}; None for no names.
    Names have no effect, as an image's content identifies it.
    """
    names = given.get("image") if isinstance(given, Mapping) else None
    several = names if isinstance(names, list | tuple) else [names] * num_images
    if not isinstance(given, Mapping | None) or not all(isinstance(each, str | None) for each in several):
        raise TypeError(f"{name} must be a dict such as {{'image': name}}, got {given!r}")
    if len(several) != num_images:
        raise ValueError(f"{name} has {len(several)} names of images; allowed: {num_images}, one for each")


def _require_no_names(name: str, given: Any) -> None:
    """Raise ValueError if a prompt without images has names of images. name: the argument's name. given: its value."""
    if isinstance(given, Mapping) and given.get("image"):
        raise ValueError(f"{name} has names of images, but no images; a name alone does not find an earlier image")


def _release_all(requests: ImageRequests, held: dict[str, ProcessedMedia]) -> None:
    while held:
        requests.release(held.popitem()[1])


def _is_remote(given: tuple[str, Any]) -> bool:
    return isinstance(given[1], ImageUrl) and given[1].url[:4].lower() == "http"


def _first(ahead: deque[tuple[str, Future[Result]]]) -> tuple[str, Result]:
    """Remove the first entry, wait for its future, and return its name with the result or raise the future's error."""
    name, begun = ahead.popleft()
    return name, begun.result()


def _called(threads: ThreadPoolExecutor | None, work: Callable[..., Result], *arguments: Any) -> Future[Result]:
    """Run a function in the threads and return a future of its result; without threads, call the function at once."""
    if threads is not None:
        return threads.submit(work, *arguments)
    done: Future[Result] = Future()
    done.set_result(work(*arguments))
    return done

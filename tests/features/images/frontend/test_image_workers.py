"""The processes that process images: bounds, failures, and what is left when they end."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from image_folders import as_file, picture, write_processor
from vision_models import vision_config

from compiled_engine.features.images.extras import PlainTensor
from compiled_engine.features.images.frontend.cache import ImageCache, ProcessedMedia
from compiled_engine.features.images.frontend.processing import MediaProcessing, ProcessorFiles
from compiled_engine.features.images.frontend.requests import ImageRequests
from compiled_engine.features.images.frontend.sources import read_source
from compiled_engine.frontend.prompts import parse_prompt
from compiled_engine.options import EngineOptions
from compiled_engine.process.smallest_first import WorkStopped
from compiled_engine.resolve.engine import resolve

ARCHITECTURE = "LlavaForConditionalGeneration"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_processor(tmp_path_factory.mktemp("checkpoint"), ARCHITECTURE)


@pytest.fixture
def processing(folder: Path) -> Iterator[MediaProcessing]:
    made = MediaProcessing(ProcessorFiles(folder, folder, "float32", 1 << 20), 2, 1 << 20)
    yield made
    made.close()


def source(seed: int = 0) -> object:
    return picture(30, 20, seed)


def submit(processing: MediaProcessing, image: object) -> ProcessedMedia:
    return processing.submit(read_source("image", image, 1 << 20), {}).result(120)


def workers() -> list[psutil.Process]:
    """Worker processes of this process, without the one that forks them."""
    found = [each for each in psutil.Process().children(recursive=True) if each.ppid() != os.getpid()]
    return [each for each in found if "images.frontend.worker" in " ".join(each.cmdline())]


def test_nothing_is_left_when_it_is_closed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    processing = MediaProcessing(ProcessorFiles(folder, folder, "float32", 1 << 20), 1, 1 << 20)
    submit(processing, source())
    assert [each.name.startswith("images-") for each in tmp_path.iterdir()] == [True]
    assert [list(each.iterdir()) for each in tmp_path.iterdir()] == [[]]
    running = workers()
    processing.close()
    del processing
    assert not [worker for worker in running if worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE]
    assert list(tmp_path.iterdir()) == []


def test_images_for_which_nobody_waits_never_begin(processing: MediaProcessing) -> None:
    """Processes that start give the caller time to leave."""
    sources = [read_source("image", source(seed), 1 << 20) for seed in range(4)]
    first = [processing.submit(each, {}) for each in sources[:2]]  # there are two processes
    left, kept = (processing.submit(each, {}) for each in sources[2:])
    assert processing.submit(sources[3], {}) is kept
    with pytest.raises(WorkStopped):
        processing.result(left, lambda: True)
    processing.leave(kept)
    assert all(each.result(120).inputs for each in [*first, kept])
    with pytest.raises(CancelledError):
        left.result(120)
    assert len(processing.cache) == 3
    assert submit(processing, source(2)).inputs


def test_a_folder_that_cannot_be_written_is_no_fault_of_the_image(
    processing: MediaProcessing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    submit(processing, source())
    (folder,) = tmp_path.iterdir()
    (folder / "1.tensors").symlink_to(tmp_path / "missing" / "file")  # where the next image's pixels are written
    with pytest.raises(RuntimeError, match=r"^the pixels of an image cannot be written: No such file or directory$"):
        processing.submit(read_source("image", source(1), 1 << 20), {}).result(120)
    folder.rmdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(RuntimeError, match=r"^images cannot be exchanged with the processes .*: No such file or"):
        submit(processing, source(2))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert submit(processing, source(2)).inputs  # as the folder is made again


def test_no_image_waits_when_it_is_closed(folder: Path) -> None:
    """Neither the one that is processed nor those behind it; and no process starts afterwards."""
    processing = MediaProcessing(ProcessorFiles(folder, folder, "float32", 1 << 20), 1, 1 << 20)
    sources = [read_source("image", source(seed), 1 << 20) for seed in range(4)]
    running = [processing.submit(each, {}) for each in sources]
    processing.close()
    for each in running:
        with pytest.raises(RuntimeError, match="the engine is closed"):
            each.result(20)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        processing.submit(sources[0], {})
    assert workers() == []


def requests_of(folder: Path, *settings: str) -> ImageRequests:
    """The feature's part in an engine. settings: the content of preprocessor_config.json, if there is one."""
    (folder / "config.json").write_text(vision_config(ARCHITECTURE))
    for content in settings:
        (folder / "preprocessor_config.json").write_text(content)
    options: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "image_workers": 1}
    return ImageRequests.of(resolve(EngineOptions(model=folder, skip_tokenizer_init=True, **options)), None)


PROMPT = {"prompt_token_ids": [1, 2], "multi_modal_data": {"image": b"an image"}}


def test_a_processor_that_cannot_be_loaded_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An image that comes before that is known is refused too."""
    requests = requests_of(tmp_path, '{"image_processor_type": "Unknown"}')
    assert requests.processing is not None
    with pytest.raises(ValueError, match=r"^the image processor of .* cannot be loaded: "):
        submit(requests.processing, source())
    assert [each.message for each in caplog.records if "the image processor of" in each.message] == [
        f"prompts may have no images: {requests.why_none}"
    ]
    with pytest.raises(ValueError, match=r"must have no images: the image processor of .* cannot be loaded: "):
        requests.attach([parse_prompt(PROMPT)])
    requests.close()


def test_a_checkpoint_without_a_processor_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    requests = requests_of(tmp_path)
    reason = "the checkpoint has no image processor (preprocessor_config.json)"
    assert f"prompts may have no images: {reason}" in caplog.messages
    assert requests.why_none == reason
    with pytest.raises(ValueError, match="must have no images: the checkpoint has no image processor"):
        requests.attach([parse_prompt(PROMPT)])


def test_the_cache_drops_the_least_recently_used() -> None:
    def image(key: str, size: int = 100) -> ProcessedMedia:
        return ProcessedMedia(key, 1, (), {"pixel_values": PlainTensor("uint8", (size,), bytes(size))})

    cache = ImageCache(300)
    for key in "abc":
        cache.put(image(key))
    assert cache.get("a") is not None
    cache.put(image("d"))
    cache.put(image("large", 301))
    assert [key for key in (*"abcd", "large") if cache.get(key)] == ["a", "c", "d"]
    assert cache.num_bytes == 300
    cache.clear()
    assert (len(cache), cache.num_bytes) == (0, 0)


# Below are the tests whose processes go on, so that one start serves them all; those above count all that run.
@pytest.fixture(scope="module")
def started(folder: Path) -> Iterator[MediaProcessing]:
    made = MediaProcessing(ProcessorFiles(folder, folder, "float32", 1 << 20), 2, 1 << 20)
    yield made
    made.close()


@pytest.fixture
def shared(started: MediaProcessing) -> MediaProcessing:
    """Two processes that process images, and an empty cache."""
    started.cache.clear()
    return started


def test_errors_end_no_process(shared: MediaProcessing) -> None:
    submit(shared, source())
    known = {worker.pid for worker in workers()}
    for content in (b"no image", as_file(picture(30, 20))[:100], as_file(picture(30, 20), "TIFF")):
        with pytest.raises(ValueError, match="image"):
            submit(shared, content)
    assert {worker.pid for worker in workers()} == known


def test_equal_images_at_once_are_processed_once(shared: MediaProcessing) -> None:
    before = shared.metrics()
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda number: submit(shared, source(number % 2)), range(8)))
    assert {image.key for image in found} == {found[0].key, found[1].key}
    gained = {name: after - before[name] for name, after in shared.metrics().items()}
    assert (gained["mm_cache_queries"], gained["mm_cache_hits"]) == (8, 6)


def test_a_process_that_ends_costs_its_image_alone(shared: MediaProcessing) -> None:
    before = submit(shared, source(10))
    for worker in workers():
        worker.send_signal(signal.SIGKILL)
    with pytest.raises(ValueError, match=r"its process ended, for time or memory$"):
        submit(shared, source(11))
    assert submit(shared, source(11)).inputs.keys() == before.inputs.keys()

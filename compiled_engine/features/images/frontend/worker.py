"""Worker processes that decode images and run the checkpoint's image processor.

They import transformers and Pillow, which the engine's own processes need not.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import warnings
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_engine.features.images.frontend.bounds import FORMATS, check_pixels
from compiled_engine.process.worker_program import Answer, Messages, Work, run_workers

if TYPE_CHECKING:
    import PIL.Image
    from transformers import ProcessorMixin

    from compiled_engine.features.images.frontend.pixel_coding import PixelCoding

# A worker that takes longer for an image ends, and so does its image.
LONGEST_S = 60
# Memory that a worker may use for an image beyond what it has after loading the processor: bytes for each pixel that
# an image may have, for the decoded image, its resized copy and their float versions, and more for small bounds.
BYTES_OF_PIXEL, SPARE_BYTES = 48, 1 << 30


def main() -> None:
    """Run the workers, see run_workers.

    The first message, the order, is {"folder": the checkpoint's folder, "tokenizer": the tokenizer's folder, "dtype":
    torch's name, "max_pixels": bound on an image, "threads": number of threads of each worker}. Any other message is
    {"input": path of a file with the source's data, "kind", "mode", "shape": see MediaSource, "output": path of the
    file to write, "settings": arguments of the processor}. An answer is {"token_ids": the tokens that replace a
    placeholder, "placeholder": token id of a placeholder, "tensors": [[name, dtype, shape, bytes]]}, whose elements
    follow each other in the output; or {"error": text}, with "internal": true if it is not the image's fault, and
    "unusable": true if no image can be processed. The message {} only asks whether images can be processed.
    """
    run_workers(_prepare, uses_cuda=False)


def _prepare(order: dict[str, Any]) -> Work:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # processors take no GPU memory
    try:
        processor = load_processor(Path(order["folder"]), Path(order["tokenizer"]))
    except Exception as error:
        reason = f"the image processor of {order['folder']} cannot be loaded: {' '.join(str(error).split())}"
        return lambda messages, answer: _refuse_all(messages, answer, reason)
    return lambda messages, answer: _process_all(messages, answer, processor, order)


class _Unwritable(Exception):
    """Raised if a result cannot be written, which is not the image's fault."""


def _refuse_all(messages: Messages, answer: Answer, reason: str) -> None:
    for _ in messages:
        answer({"error": reason, "unusable": True})


def _process_all(messages: Messages, answer: Answer, processor: ProcessorMixin, order: dict[str, Any]) -> None:
    import torch

    from compiled_engine.features.images.frontend.pixel_coding import PixelCoding

    torch.set_num_threads(order["threads"])
    bound_memory(SPARE_BYTES + BYTES_OF_PIXEL * order["max_pixels"])
    coding = PixelCoding(processor.image_processor, partial(_outputs, processor))  # type: ignore[attr-defined]
    coding.table({})  # before an image waits for it
    for message in messages:
        if not message:
            answer({"usable": True})
            continue
        signal.alarm(LONGEST_S)
        try:
            answer(_processed(message, processor, coding, order))
        except _Unwritable as error:
            answer({"error": f"the pixels of an image cannot be written: {error}", "internal": True})
        except MemoryError:
            answer({"error": "the image needs more memory than an image may use"})
        except Exception as error:  # Pillow and processors raise many kinds
            answer({"error": " ".join(str(error).split())[:500] or type(error).__name__})
        signal.alarm(0)


def bound_memory(more: int) -> None:
    """Limit this process to the memory that it uses now plus `more` bytes, if the system supports limits."""
    with suppress(OSError, ValueError, AttributeError):
        pages = int(Path("/proc/self/statm").read_text().split()[5])  # data and stack
        most = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def load_processor(folder: Path, tokenizer: Path) -> ProcessorMixin:
    """Load a checkpoint's processor as AutoProcessor does, but without its parts for video.

    The parts for video need torchvision, which images do not. Raises any error of transformers.
    """
    from transformers import AutoImageProcessor, AutoTokenizer

    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    kind = _processor_class(folder)

    class ForImages(kind):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    parts: dict[str, Callable[[], Any]] = {
        "image_processor": lambda: AutoImageProcessor.from_pretrained(str(folder), **local),
        "tokenizer": lambda: AutoTokenizer.from_pretrained(str(tokenizer), **local),
    }
    arguments = [parts.get(name, lambda: None)() for name in kind.get_attributes()]
    stated = kind.get_processor_dict(str(folder), **local)[0]
    made = ForImages.from_args_and_dict(arguments, stated)
    processor: ProcessorMixin = made[0] if isinstance(made, tuple) else made
    return processor


def _processor_class(folder: Path) -> Any:
    """Return the processor's class: named by the checkpoint's files, or else that of the architecture."""
    from transformers import AutoConfig
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING, processor_class_from_name

    for file in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        if (folder / file).is_file():
            name = json.loads((folder / file).read_text(encoding="utf-8")).get("processor_class")
            if name and (found := processor_class_from_name(name)) is not None:
                return found
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    return PROCESSOR_MAPPING[type(config)]


def _outputs(processor: ProcessorMixin, image: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the processor's outputs for an image and one placeholder, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated settings, for each image anew
        outputs = processor(
            images=[image],
            text=[processor.image_token],  # type: ignore[attr-defined]
            add_special_tokens=False,
            return_tensors="pt",
            **settings,
        )
    return dict(outputs)


def _processed(
    message: Mapping[str, Any], processor: ProcessorMixin, coding: PixelCoding, order: Mapping[str, Any]
) -> dict[str, Any]:
    import torch

    image = decoded(message, order["max_pixels"])
    outputs = coding.process(image, message["settings"])
    (token_ids,) = outputs.pop("input_ids").tolist()
    tensors, pixels = [], list[Any]()
    for name, value in outputs.items():
        if name in _OF_TEXT or not isinstance(value, torch.Tensor):
            continue
        tensor = value.to(getattr(torch, order["dtype"])) if value.is_floating_point() else value
        pixels.append(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        tensors.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), pixels[-1].nbytes])
    try:
        with open(message["output"], "wb") as output:
            output.writelines(pixels)
    except OSError as error:
        raise _Unwritable(error.strerror) from error
    tokenizer = processor.tokenizer
    return {
        "token_ids": token_ids,
        "placeholder": tokenizer.convert_tokens_to_ids(processor.image_token),  # type: ignore[attr-defined]
        "tensors": tensors,
    }


# Outputs of a processor that describe the text.
_OF_TEXT = ("attention_mask", "token_type_ids", "mm_token_type_ids")


def decoded(message: Mapping[str, Any], max_pixels: int) -> Any:
    """Return the image of a message, see `main`, in a form that processors take: a PIL image or an array.

    The size of a file's image is checked before the file is decoded. Raises ValueError or OSError for a file that is no
    image of a known format, is truncated or out of bounds.
    """
    import numpy as np
    import PIL.Image

    data = Path(message["input"]).read_bytes()
    if message["kind"] == "array":
        return np.frombuffer(data, dtype=np.uint8).reshape(message["shape"])
    if message["kind"] == "pixels":
        return PIL.Image.frombytes(message["mode"], tuple(message["shape"]), data)
    return decoded_file(data, max_pixels)


def decoded_file(data: bytes, max_pixels: int) -> PIL.Image.Image:
    """Return the first frame of an image file, turned upright as its EXIF data says.

    Raises ValueError if the file has no known format, is damaged, or has a size that check_pixels refuses.
    """
    import io

    import PIL.Image
    import PIL.ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow's own bound on pixels; check_pixels applies ours
            image = PIL.Image.open(io.BytesIO(data), formats=FORMATS)
        check_pixels(image.width, image.height, max_pixels)
        image.load()
    except PIL.UnidentifiedImageError:
        raise ValueError(f"the file is no image of a known format; allowed: {', '.join(FORMATS)}") from None
    except PIL.Image.DecompressionBombError:
        raise ValueError(f"the image has too many pixels; allowed: at most {max_pixels} (max_image_pixels)") from None
    except (OSError, SyntaxError, EOFError, struct.error, zlib.error) as error:  # as Pillow's readers raise them
        raise ValueError(f"the image file is damaged: {error}") from None
    return PIL.ImageOps.exif_transpose(image)


if __name__ == "__main__":
    main()

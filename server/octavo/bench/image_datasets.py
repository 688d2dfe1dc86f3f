"""Images to measure with: random ones, and those that files name. Flags and their meaning are those of ``vllm bench
serve``."""

from __future__ import annotations

import argparse
import ast
import base64
import io
import json
import math
import mimetypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

IMAGE_DATASETS = ("random-mm", "custom_image")
Part = dict[str, Any]  # of a message's content

_BUCKETS = "{(256, 256, 1): 0.5, (720, 1280, 1): 0.5}"
_SENT_AS_IT_IS = ("http://", "https://", "file://", "data:image/")


def add_image_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags that `RandomImages` and `content_of` read."""
    group.add_argument(
        "--random-mm-base-items-per-request", type=int, default=1, help="Images per random-mm request (default: 1)"
    )
    group.add_argument(
        "--random-mm-num-mm-items-range-ratio",
        type=float,
        default=0.0,
        metavar="RATIO",
        help="Numbers of images are within this fraction of the given one, from 0 to 1 (default: 0)",
    )
    group.add_argument(
        "--random-mm-limit-mm-per-prompt",
        type=_limit,
        default='{"image": 255, "video": 1}',
        metavar="JSON",
        help='Maximum number of images per request (default: {"image": 255, "video": 1}; videos are not generated)',
    )
    group.add_argument(
        "--random-mm-bucket-config",
        type=_buckets,
        default=_BUCKETS,
        metavar="DICT",
        help=f"Share of each (height, width, frames) among random images; frames are 1 (default: {_BUCKETS})",
    )
    group.add_argument(
        "--custom-ensure-client-side-data",
        action="store_true",
        help="Read the files and URLs of custom_image on the client and send the images in the requests "
        "(default: the server reads them)",
    )


def _limit(text: str) -> int:
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    numbers = given.values() if isinstance(given, dict) and "image" in given else ()
    if not numbers or given.keys() - {"image", "video"} or any(type(n) is not int or n < 0 for n in numbers):
        raise argparse.ArgumentTypeError(f'takes {{"image": N}} with N of at least 0, got {text!r}')
    return int(given["image"])


def _buckets(text: str) -> dict[tuple[int, int], float]:
    """(height, width) to shares of at least 0 that add up to 1."""
    found: dict[tuple[int, int], float] = {}
    try:
        for key, share in ast.literal_eval(text).items():
            height, width, frames = ast.literal_eval(key) if isinstance(key, str) else key
            if any(type(n) is not int or n < 1 for n in (height, width, frames)) or not 0 <= share < math.inf:
                raise ValueError
            if share and frames > 1:
                raise argparse.ArgumentTypeError(f"makes images alone: frames must be 1, got {key}")
            if share:
                found[height, width] = found.get((height, width), 0.0) + float(share)
    except (ValueError, SyntaxError, TypeError, AttributeError):
        found = {}
    if not found:
        raise argparse.ArgumentTypeError(f"takes {_BUCKETS}, with a share above 0, got {text!r}")
    total = sum(found.values())
    return {size: share / total for size, share in found.items()}


class RandomImages:
    """Draws each request's images: how many, of which sizes, every byte at random."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Raises ConfigError where no number of images is possible."""
        base, ratio = args.random_mm_base_items_per_request, args.random_mm_num_mm_items_range_ratio
        if base < 0 or not 0 <= ratio <= 1:
            raise ConfigError(
                "--random-mm-base-items-per-request must be at least 0 and --random-mm-num-mm-items-range-ratio from 0 "
                f"to 1, got {base} and {ratio:g}"
            )
        limit = args.random_mm_limit_mm_per_prompt
        self._least, self._most = math.floor(base * (1 - ratio)), min(limit, math.ceil(base * (1 + ratio)))
        if self._least > self._most:
            raise ConfigError(
                f"--random-mm-base-items-per-request {base} asks for at least {self._least} images, and "
                f"--random-mm-limit-mm-per-prompt allows {limit}"
            )
        self._sizes = list(args.random_mm_bucket_config)
        self._shares = list(args.random_mm_bucket_config.values())

    def draw(self, rng: np.random.Generator) -> list[Part]:
        """Draw the images of the next request."""
        count = int(rng.integers(self._least, self._most + 1))
        return [self._image(rng) for _ in range(count)]

    def _image(self, rng: np.random.Generator) -> Part:
        from PIL import Image

        height, width = self._sizes[rng.choice(len(self._sizes), p=self._shares)]
        pixels, file = rng.integers(0, 256, (height, width, 3), dtype="uint8"), io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG")
        return _image_url(_data_url(file.getvalue(), "image/jpeg"))


def content_of(row: Mapping[str, Any], folder: Path, inline: bool) -> list[Part]:
    """The content of a line's message: its ``content``, or its ``prompt`` and then ``image_files``. ``folder``: where
    files lie that it names; ``inline``: what it names is read here. Raises ValueError that says what is wrong."""
    if "content" in row:
        parts = row["content"]
        if not isinstance(parts, Sequence) or isinstance(parts, str) or not parts:
            raise ValueError("content must be a list of parts")
        return [_part(part, folder, inline) for part in parts]
    files = row.get("image_files")
    if not isinstance(row.get("prompt"), str) or not isinstance(files, list) or not files:
        raise ValueError('each line must have "prompt" and "image_files", a list, or "content"')
    images = [_named(file, folder, inline) for file in files]
    return [{"type": "text", "text": row["prompt"]}, *images]


def text_of(content: Sequence[Part]) -> str:
    """Return the text beside the images."""
    return "".join(part["text"] for part in content if part["type"] == "text")


def _part(part: Any, folder: Path, inline: bool) -> Part:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image":
        return _named(part.get("image"), folder, inline)
    if kind == "image_url":
        given = part.get("image_url")
        more = {key: value for key, value in given.items() if key != "url"} if isinstance(given, dict) else {}
        return _named(given.get("url") if isinstance(given, dict) else given, folder, inline, more)
    raise ValueError("each part must be of type text, image or image_url and hold it")


def _named(name: Any, folder: Path, inline: bool, more: Mapping[str, Any] = {}) -> Part:
    if not isinstance(name, str) or not name:
        raise ValueError("each image must be a path, an address or a data: url")
    url = name if name.startswith(_SENT_AS_IT_IS) else f"file://{(folder / name).resolve()}"
    if inline and not url.startswith("data:"):
        url = _data_url(_read(url), mimetypes.guess_type(url)[0] or "image/jpeg")
    return _image_url(url, more)


def _read(url: str) -> bytes:
    import httpx

    try:
        if url.startswith("file://"):
            return Path(url.removeprefix("file://")).read_bytes()
        return httpx.get(url, timeout=30, follow_redirects=True).raise_for_status().content
    except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
        raise ValueError(f"{url} cannot be read: {error}") from None


def _data_url(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _image_url(url: str, more: Mapping[str, Any] = {}) -> Part:
    return {"type": "image_url", "image_url": {**more, "url": url}}

"""Images of odd sizes, modes and EXIF turns, and a tokenizer with the special tokens of every family of images."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageOps
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from octavo.text.tokenizer import Tokenizer

MODES = ("RGB", "L", "LA", "P", "RGBA", "CMYK", "I;16", "1", "PA", "YCbCr")
SPECIAL = (
    "<s>",
    "</s>",
    "<image>",
    "<fake_token_around_image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    "<|vision_start|>",
    "<|image_pad|>",
    "<|vision_end|>",
    "<|video_pad|>",
    "<start_of_image>",
    "<image_soft_token>",
    "<end_of_image>",
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
)


def make_tokenizer() -> Tokenizer:
    """Bytes, pairs of line breaks as one token, and `SPECIAL`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: i for i, char in enumerate(alphabet)}
    vocabulary["ĊĊ"] = len(vocabulary)  # two line breaks
    vocabulary["ĊĊĊĊ"] = len(vocabulary)
    backend = Backend(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ"), ("ĊĊ", "ĊĊ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})


def image_of(mode: str, width: int, height: int, rng: np.random.Generator) -> Image.Image:
    """Noise on a gradient, so that every filter and every channel counts."""
    channels = {"L": 1, "LA": 2, "RGBA": 4, "CMYK": 4, "PA": 4, "P": 3, "1": 1, "I;16": 1}.get(mode, 3)
    ramp = np.linspace(0, 200, width, dtype=np.float64)[None, :, None]
    data = (ramp + rng.integers(0, 56, (height, width, channels))).astype(np.uint8)
    if mode == "I;16":
        return Image.fromarray(data[:, :, 0].astype(np.uint16) * 257)
    if mode == "1":
        return Image.fromarray(data[:, :, 0]).convert("1")
    if mode in ("P", "PA"):
        palette = Image.fromarray(data[:, :, :3]).quantize(64)
        if mode == "PA":
            palette.info["transparency"] = 3
        return palette
    if mode == "YCbCr":
        return Image.fromarray(data).convert("YCbCr")
    return Image.fromarray(data[:, :, 0] if channels == 1 else data, mode=mode)


def odd_images(count: int, seed: int = 0) -> Iterator[tuple[str, Image.Image]]:
    """``count`` images and what each is called. Every third has an EXIF turn, which is applied."""
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    sizes = [(1, 1), (1, 150), (150, 1), (17, 901), (640, 481), (333, 333), (1300, 40), (512, 512), (2, 3)]
    for number in range(count):
        mode = MODES[number % len(MODES)]
        if number % 3 == 0:
            width, height = sizes[(number // 3) % len(sizes)]
        else:
            width, height = draw.randint(1, 700), draw.randint(1, 700)
        image = image_of(mode, width, height, rng)
        turn = number % 9
        if turn > 1 and mode in ("RGB", "L", "CMYK"):
            exif = Image.Exif()
            exif[0x0112] = turn
            stored = io.BytesIO()
            image.save(stored, "TIFF" if mode == "CMYK" else "PNG", exif=exif)
            image = ImageOps.exif_transpose(Image.open(stored))
        yield f"{number}: {mode} {width}x{height} turn {turn}", image

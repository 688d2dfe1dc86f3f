"""Pixels and placeholders of every family are those of transformers' Pillow-backed processors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.images import SPECIAL, image_of, make_tokenizer, odd_images

from octavo.errors import ConfigError
from octavo.multimodal.items import ImageFeatures
from octavo.multimodal.processors import image_processor
from octavo.multimodal.processors.base import ImageProcessor
from octavo.text.tokenizer import Tokenizer

LLAVA = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
PADDED = {**LLAVA, "do_pad": True}
SQUASHED = {"size": {"height": 45, "width": 45}, "do_center_crop": False, "resample": 2}
SIGLIP = {
    "image_processor_type": "SiglipImageProcessor",
    "size": {"height": 42, "width": 42},
    "do_convert_rgb": True,
}
IDEFICS = {"size": {"longest_edge": 192}, "max_image_size": {"longest_edge": 64}}
QWEN = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 40}
QWEN3 = {
    "size": {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 30},
    "patch_size": 16,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
PINPOINTS = [[28 * row, 28 * column] for row in (1, 2, 3) for column in (1, 2, 3)]
ONEVISION = {"size": {"height": 28, "width": 28}, "image_grid_pinpoints": PINPOINTS}
NEXT = {
    "size": {"shortest_edge": 28},
    "crop_size": {"height": 28, "width": 28},
    "image_grid_pinpoints": PINPOINTS[1:],
}
# config.json beside its architecture
MODELS: dict[str, dict[str, Any]] = {
    "llava": {"vision_config": {"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14}},
    "llava-squashed": {
        "vision_config": {"model_type": "clip_vision_model", "image_size": 45, "patch_size": 15},
        "vision_feature_select_strategy": "full",
    },
    "llava-siglip": {
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 42, "patch_size": 14},
        "vision_feature_select_strategy": "full",
    },
    "smolvlm": {"vision_config": {"image_size": 64, "patch_size": 16}},
    "gemma3": {"vision_config": {"image_size": 56, "patch_size": 14}, "mm_tokens_per_image": 4},
    "mistral3": {"vision_config": {"patch_size": 14}, "spatial_merge_size": 2},
    "pixtral": {"vision_config": {"model_type": "pixtral", "patch_size": 14}},
    "llava-next": {
        "vision_config": {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14},
        "image_grid_pinpoints": PINPOINTS[1:],
    },
    "llava-onevision": {
        "vision_config": {"image_size": 28, "patch_size": 14},
        "image_grid_pinpoints": PINPOINTS,
        "vision_aspect_ratio": "anyres_max_4",
    },
}
for name, like in (
    ("llava-clip", "llava"),
    ("llava-padded", "llava"),
    ("idefics3", "smolvlm"),
    ("idefics3-whole", "smolvlm"),
):
    MODELS[name] = MODELS[like]


def llava() -> dict[str, Any]:
    return {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}


# name: architecture, preprocessor_config.json, processor_config.json, transformers' image processor
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "llava": ("Llava", LLAVA, llava(), "llava.image_processing_pil_llava.LlavaImageProcessorPil"),
    "llava-clip": ("Llava", LLAVA, llava(), "clip.image_processing_pil_clip.CLIPImageProcessorPil"),
    "llava-padded": ("Llava", PADDED, llava(), "llava.image_processing_pil_llava.LlavaImageProcessorPil"),
    "llava-squashed": (
        "Llava",
        SQUASHED,
        {"patch_size": 15, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 1},
        "llava.image_processing_pil_llava.LlavaImageProcessorPil",
    ),
    "llava-siglip": (
        "Llava",
        SIGLIP,
        {"patch_size": 14, "vision_feature_select_strategy": "full"},
        "siglip.image_processing_pil_siglip.SiglipImageProcessorPil",
    ),
    "smolvlm": (
        "SmolVLM",
        IDEFICS,
        {"image_seq_len": 4},
        "smolvlm.image_processing_pil_smolvlm.SmolVLMImageProcessorPil",
    ),
    "idefics3": (
        "Idefics3",
        IDEFICS,
        {"image_seq_len": 4},
        "idefics3.image_processing_pil_idefics3.Idefics3ImageProcessorPil",
    ),
    "idefics3-whole": (
        "Idefics3",
        {**IDEFICS, "do_image_splitting": False},
        {"image_seq_len": 4},
        "idefics3.image_processing_pil_idefics3.Idefics3ImageProcessorPil",
    ),
    "qwen2.5-vl": ("Qwen2_5_VL", QWEN, {}, "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil"),
    "qwen3-vl": ("Qwen3VL", QWEN3, {}, "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil"),
    "gemma3": (
        "Gemma3",
        {"size": {"height": 56, "width": 56}, "do_convert_rgb": None},
        {"image_seq_length": 4},
        "gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil",
    ),
    "mistral3": (
        "Mistral3",
        {"size": {"longest_edge": 120}, "patch_size": 14},
        {"patch_size": 14, "spatial_merge_size": 2},
        "pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil",
    ),
    "pixtral": (
        "Llava",
        {"size": {"longest_edge": 120}, "patch_size": 14},
        {"patch_size": 14},
        "pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil",
    ),
    "llava-next": (
        "LlavaNext",
        NEXT,
        llava(),
        "llava_next.image_processing_pil_llava_next.LlavaNextImageProcessorPil",
    ),
    "llava-onevision": (
        "LlavaOnevision",
        ONEVISION,
        {"num_image_tokens": 4, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_4"},
        "llava_onevision.image_processing_pil_llava_onevision.LlavaOnevisionImageProcessorPil",
    ),
}
CELLS = {"mistral3": 28, "pixtral": 14}  # pixels of a token's side


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


def ours(name: str, folder: Path, tokenizer: Tokenizer, **kwargs: Any) -> ImageProcessor:
    family, image, processor, _ = FAMILIES[name]
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    (folder / "processor_config.json").write_text(json.dumps(processor))
    config = {"architectures": [f"{family}ForConditionalGeneration"], "vision_config": {}, **MODELS.get(name, {})}
    made = image_processor(folder, config, tokenizer, kwargs or None)
    assert made is not None
    return made


def theirs(name: str) -> Any:
    from importlib import import_module

    module, _, kind = FAMILIES[name][3].rpartition(".")
    return getattr(import_module(f"transformers.models.{module}"), kind)(**FAMILIES[name][1])


def replacement(name: str, image_inputs: Any) -> str:
    """What transformers' processor of the family puts into the text for its only image."""
    family, _, settings, _ = FAMILIES[name]
    if family in ("SmolVLM", "Idefics3"):
        from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

        names = SimpleNamespace(
            fake_image_token="<fake_token_around_image>",
            global_image_tag="<global-img>",
            image_token="<image>",
            **settings,
        )
        return Idefics3Processor.replace_image_token(names, image_inputs, 0)
    if family.startswith("Qwen"):
        from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

        names = SimpleNamespace(image_processor=theirs(name), image_token="<|image_pad|>")
        return Qwen2VLProcessor.replace_image_token(names, image_inputs, 0)
    if family == "Gemma3":
        return f"\n\n<start_of_image>{'<image_soft_token>' * 4}<end_of_image>\n\n"
    if name in CELLS:
        height, width = image_inputs["image_sizes"][0]  # its processor's module asks for torchvision
        line = "[IMG]" * (width // CELLS[name]) + "[IMG_BREAK]"
        return (line * (height // CELLS[name])).removesuffix("[IMG_BREAK]") + "[IMG_END]"
    if family == "LlavaNext":
        from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

        made = object.__new__(LlavaNextProcessor)
        made.__dict__.update(image_processor=theirs(name), image_token="<image>", **settings)
        return made.replace_image_token(image_inputs, 0)
    if family == "LlavaOnevision":
        from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

        made = object.__new__(LlavaOnevisionProcessor)
        made.__dict__.update(image_processor=theirs(name), image_token="<image>", **settings)
        return made.replace_image_token(image_inputs, 0)
    from transformers.models.llava.processing_llava import LlavaProcessor

    names = SimpleNamespace(image_token="<image>", **{"num_additional_image_tokens": 0, **settings})
    return LlavaProcessor.replace_image_token(names, image_inputs, 0)


def compare(name: str, processor: ImageProcessor, tokenizer: Tokenizer, images: list[tuple[str, Image.Image]]) -> None:
    reference = theirs(name)
    extra = {"return_row_col_info": True} if FAMILIES[name][0] in ("SmolVLM", "Idefics3") else {}
    if name in CELLS:
        extra = {"patch_size": CELLS[name]}  # as its processor asks
    compared = 0
    for title, image in images:
        try:
            expected = reference(image, return_tensors="np", do_convert_rgb=True, **extra)
        except ValueError as error:
            if "Size must contain" in str(error):  # a side of no pixels, which is one here
                assert processor.process(image).num_embeds > 0
                continue
            assert "aspect ratio" in str(error), title
            with pytest.raises(ValueError, match="200 times"):
                processor.process(image)
            continue
        found = processor.process(image)
        for key, values in found.tensors.items():
            want = np.asarray(expected[key])
            assert values.shape == want.shape and values.dtype == want.dtype, (title, key)
            assert np.abs(values - want).max() <= 1e-6, (title, key)
        outline = processor.outline(*image.size)
        assert outline.keys() == found.tensors.keys()
        for key, values in outline.items():
            assert (values.shape, values.dtype) == (found.tensors[key].shape, found.tensors[key].dtype), (title, key)
            assert key == "pixel_values" or (values == found.tensors[key]).all(), (title, key)
        assert outline["pixel_values"].base is not None and outline["pixel_values"].strides[-1] == 0, "it takes memory"
        text = replacement(name, expected)
        ids, offsets = processor.expand(placed(processor, tokenizer, "a\n"), [found])
        assert ids == tokenizer.encode(f"a\n{text}\nb", add_special_tokens=False), title
        assert tuple(ids[offsets[0] : offsets[0] + len(found.token_ids)]) == found.token_ids
        marks = {"<image>", "<|image_pad|>", "<image_soft_token>", "[IMG]"}
        embeds = [id_ in tokenizer.convert_tokens_to_ids(sorted(marks)) for id_ in found.token_ids]
        assert embeds == list(found.is_embed)
        assert found.num_embeds <= processor.max_tokens()
        compared += 1
    assert compared > len(images) // 2


def placed(processor: ImageProcessor, tokenizer: Tokenizer, before: str) -> list[int]:
    encode: Callable[..., list[int]] = tokenizer.encode
    return [*encode(before, add_special_tokens=False), processor.placeholder, *encode("\nb", add_special_tokens=False)]


@pytest.mark.parametrize("name", FAMILIES)
def test_pixels_and_tokens_are_those_of_transformers(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    compare(name, ours(name, tmp_path, tokenizer), tokenizer, list(odd_images(20)))


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_200_images_are_those_of_transformers(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    compare(name, ours(name, tmp_path, tokenizer), tokenizer, list(odd_images(200, seed=1)))


def test_strips_take_no_more_memory_than_other_images(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scaled whole, and then cropped or padded, they would be a thousand times as large."""
    cropped, padded = ours("llava", tmp_path, tokenizer), ours("llava-padded", tmp_path, tokenizer)
    strips = [image_of("RGB", *size, np.random.default_rng(0)) for size in ((3, 5000), (900, 3))]
    whole = [cropped.process(strip).tensors["pixel_values"] for strip in strips]
    monkeypatch.setattr("octavo.multimodal.processors.llava._MOST_PIXELS", 100)
    for strip, expected in zip(strips, whole, strict=True):
        found = cropped.process(strip).tensors["pixel_values"]
        assert np.abs(found - expected).max() <= 1.01 / 255 / 0.26
    monkeypatch.undo()
    from PIL import Image as Pillow

    sizes: list[int] = []
    for name in ("resize", "new"):
        owner = Pillow.Image if name == "resize" else Pillow
        made = getattr(owner, name)

        def noted(*args: Any, made: Callable[..., Image.Image] = made, **kwargs: Any) -> Image.Image:
            image = made(*args, **kwargs)
            sizes.append(image.width * image.height)
            return image

        monkeypatch.setattr(owner, name, noted)
    for size in ((1, 16384), (16384, 1)):
        for processor in (cropped, padded):
            assert processor.process(Image.new("RGB", size)).tensors["pixel_values"].shape == (1, 3, 56, 56)
    assert max(sizes) <= 1 << 24


def test_a_digest_knows_pixels_shape_and_settings(tokenizer: Tokenizer, tmp_path: Path) -> None:
    processor = ours("llava", tmp_path, tokenizer)
    wide, high = Image.new("RGB", (8, 2), "red"), Image.new("RGB", (2, 8), "red")
    other = Image.new("RGB", (8, 2), "blue")
    digests = {processor.process(image).digest for image in (wide, high, other)}
    digests.add(ours("llava", tmp_path, tokenizer, resample=2).process(wide).digest)
    assert len(digests) == 4
    assert processor.process(wide.copy()).digest in digests


def test_settings_of_the_user_replace_the_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    few = ours("qwen2.5-vl", tmp_path, tokenizer, max_pixels=28 * 28 * 4)
    assert few.max_tokens() == 28 and ours("qwen2.5-vl", tmp_path, tokenizer).max_tokens() == 89
    sized = ours("qwen2.5-vl", tmp_path, tokenizer, size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 4})
    assert sized.max_tokens() == few.max_tokens(), "before the files' max_pixels"
    with pytest.raises(ConfigError, match=r"mm_processor_kwargs has 'num_crops'.* it has .*max_pixels"):
        ours("qwen2.5-vl", tmp_path, tokenizer, num_crops=4)


def test_placeholders_and_images_are_as_many(tokenizer: Tokenizer, tmp_path: Path) -> None:
    processor = ours("gemma3", tmp_path, tokenizer)
    image = processor.process(Image.new("RGB", (9, 9)))
    other = ImageFeatures("other", {}, image.token_ids, image.is_embed)
    text = "a<start_of_image>\n<start_of_image>b"
    ids, offsets = processor.expand(tokenizer.encode(text, add_special_tokens=False), [image, other])
    whole = text.replace("<start_of_image>", replacement("gemma3", None))
    assert ids == tokenizer.encode(whole, add_special_tokens=False)
    assert [tuple(ids[at : at + len(image.token_ids)]) for at in offsets] == [image.token_ids] * 2
    with pytest.raises(ValueError, match=r"2 image placeholders .* and 1 images"):
        processor.expand(tokenizer.encode(text, add_special_tokens=False), [image])


def test_a_text_model_has_no_processor(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert image_processor(tmp_path, {"architectures": ["LlamaForCausalLM"]}, tokenizer) is None
    assert len(set(SPECIAL)) == len(SPECIAL)


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_of_an_image_are_the_image(name: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    processor = ours(name, tmp_path, tokenizer)
    for _, image in odd_images(6, 9):
        whole = processor.process(image)
        parts = processor.parts(whole)
        assert [token for part in parts for token in part.token_ids] == list(whole.token_ids)
        assert [flag for part in parts for flag in part.is_embed] == list(whole.is_embed)
        assert len({part.digest for part in parts}) == len(parts)
        assert all(len(part.digest) == 64 for part in parts), "files are handed over under names of that length"
        if len(parts) > 1:
            assert len(parts) == whole.tensors["pixel_values"].shape[1]
            assert (
                np.concatenate([p.tensors["pixel_values"] for p in parts], 1) == whole.tensors["pixel_values"]
            ).all()

"""Towers and image processors that contradict config.json are refused in one line that names the field, before any
image comes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from support.images import make_tokenizer
from support.vision import CASES

from octavo import LLM
from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError, ModelError, OctavoError
from octavo.loader.weight_bytes import model_without_memory
from octavo.models.registry import model_class
from octavo.multimodal.processors import image_processor

V = "vision_config"
TOWERS: list[tuple[str, dict[str, Any], str]] = [
    ("pixtral", {V: {"num_attention_heads": 3}}, "num_attention_heads"),
    ("pixtral", {V: {"hidden_size": 36}}, "multiple of 4"),
    ("pixtral", {V: {"head_dim": 8}}, "vision_config.head_dim must be 16"),
    ("pixtral", {V: {"patch_size": [8, 8]}}, "vision_config.patch_size"),
    ("pixtral", {V: {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}}, "rope_parameters.rope_type"),
    ("pixtral", {V: {"rope_parameters": {"rope_type": "axial", "rope_theta": -1}}}, "rope_parameters.rope_theta"),
    ("pixtral", {V: {"hidden_act": "swish2"}}, "swish2"),
    ("pixtral", {"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy"),
    ("pixtral", {V: {"model_type": "siglip2"}}, "vision_config.model_type"),
    ("llava", {"text_config": {"model_type": "phi3"}}, "text model of type 'phi3'"),
    ("llava", {"vision_feature_layer": 7}, "vision_feature_layer"),
    ("llava", {"vision_feature_layer": []}, "vision_feature_layer"),
    ("llava", {"vision_feature_layer": "-2"}, "vision_feature_layer"),
    ("llava", {"vision_feature_select_strategy": "cls"}, "vision_feature_select_strategy"),
    ("llava", {"projector_hidden_act": "swish2"}, "swish2"),
    ("mistral3", {"vision_feature_layer": [-1, -2]}, "vision_feature_layer"),
    ("mistral3", {"spatial_merge_size": 0}, "spatial_merge_size"),
    ("mistral3", {V: {"model_type": "clip_vision_model"}}, "vision_config.model_type"),
    ("llava-next", {"image_grid_pinpoints": [[32, 50]]}, "image_grid_pinpoints"),
    ("llava-next", {"image_grid_pinpoints": []}, "image_grid_pinpoints"),
    ("llava-next", {"image_grid_pinpoints": [[32]]}, "image_grid_pinpoints"),
    ("llava-next", {"image_grid_pinpoints": [[1 << 20, 32]]}, "image_grid_pinpoints"),
    ("llava-next", {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy"),
    ("llava-onevision", {"vision_aspect_ratio": "square"}, "vision_aspect_ratio"),
    ("llava-onevision", {"vision_aspect_ratio": "anyres_max_0"}, "vision_aspect_ratio"),
    ("llava-onevision", {V: {"image_size": 4}}, "patch_size"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("configs")
    for name in CASES:
        case = CASES[name]
        config = getattr(transformers, case.config_class)(**case.settings, architectures=[case.architecture])
        config.save_pretrained(root / name)
    return {path.name: path for path in root.iterdir()}


@contextmanager
def changed(folder: Path, changes: dict[str, Any]) -> Iterator[Path]:
    path = folder / "config.json"
    before = path.read_text()
    config = json.loads(before)
    for key, value in changes.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    try:
        path.write_text(json.dumps(config))
        yield folder
    finally:
        path.write_text(before)


@pytest.mark.parametrize(("case", "changes", "message"), TOWERS)
def test_a_tower_that_cannot_be_meant_is_named(
    case: str, changes: dict[str, Any], message: str, folders: dict[str, Path]
) -> None:
    with changed(folders[case], changes) as folder, pytest.raises(OctavoError) as raised:
        args = EngineArgs(model=str(folder), load_format="dummy", skip_tokenizer_init=True)
        model_without_memory(args.create_engine_config(progress=False).model, "cpu")
    assert message in str(raised.value) and "\n" not in str(raised.value)


SQUARE = {"height": 32, "width": 32}
FILES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # as they fit the tiny models
    "llava": ({"size": {"shortest_edge": 32}, "crop_size": SQUARE}, {"patch_size": 8}),
    "gemma3": ({"size": SQUARE}, {"image_seq_length": 4}),
    "idefics3": ({"max_image_size": {"longest_edge": 32}, "size": {"longest_edge": 64}}, {"image_seq_len": 4}),
    "pixtral": ({"size": {"longest_edge": 64}, "patch_size": {"height": 99, "width": 99}}, {"patch_size": 8}),
    "mistral3": ({"size": {"longest_edge": 64}}, {"patch_size": 8, "spatial_merge_size": 2}),
    "llava-next": ({"size": {"shortest_edge": 32}, "crop_size": SQUARE}, {"patch_size": 16}),
    "smolvlm": ({"max_image_size": {"longest_edge": 32}, "size": {"longest_edge": 96}}, {}),
    "qwen2.5-vl": ({"patch_size": 4, "min_pixels": 64, "max_pixels": 1024}, {}),
    "qwen3-vl": ({"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 1024}}, {}),
    "llava-onevision": ({"size": SQUARE}, {"num_image_tokens": 4, "vision_aspect_ratio": "anyres_max_2"}),
}
# case, its image processor's settings, of its processor's, of the user
WRONG: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    ("llava", {"crop_size": {"height": 64, "width": 64}}, {}, {}, "crop_size"),
    ("llava", {}, {"patch_size": 14}, {}, "patch_size must be 8, as config.json has it, got 14"),
    ("llava", {}, {"num_additional_image_tokens": 0}, {}, "num_additional_image_tokens"),
    ("llava", {}, {"vision_feature_select_strategy": "full"}, {}, "vision_feature_select_strategy"),
    ("llava", {}, {}, {"crop_size": 64}, "mm_processor_kwargs: crop_size"),
    ("llava", {}, {}, {"size": "large"}, "mm_processor_kwargs: size"),
    ("llava", {}, {}, {"do_center_crop": False}, "size"),
    ("llava", {}, {}, {"do_center_crop": "no"}, "mm_processor_kwargs: do_center_crop must be true or false"),
    ("llava", {}, {}, {"image_mean": 0.5}, "mm_processor_kwargs: image_mean must be three numbers"),
    ("llava", {}, {}, {"image_std": [1, 0, 1]}, "mm_processor_kwargs: image_std"),
    ("llava", {}, {}, {"rescale_factor": "1/255"}, "mm_processor_kwargs: rescale_factor"),
    ("llava", {}, {}, {"resample": 9}, "mm_processor_kwargs: resample"),
    ("llava", {}, {}, {"num_crops": 4}, "num_crops"),
    ("llava", {"size": {}}, {}, {}, "size"),
    ("gemma3", {}, {"image_seq_length": 256}, {}, "image_seq_length must be 4"),
    ("gemma3", {"size": {"height": 224, "width": 224}}, {}, {}, "size"),
    ("gemma3", {"size": {"longest_edge": 32}}, {}, {}, "size"),
    ("gemma3", {}, {}, {"do_resize": False}, "mm_processor_kwargs: do_resize"),
    ("gemma3", {}, {}, {"do_pan_and_scan": True}, "do_pan_and_scan"),
    ("idefics3", {}, {"image_seq_len": 64}, {}, "image_seq_len must be 4"),
    ("idefics3", {}, {}, {"max_image_size": {"longest_edge": 40}}, "max_image_size"),
    ("idefics3", {}, {}, {"max_image_size": {"longest_edge": 64}}, "image_seq_len"),
    ("idefics3", {}, {}, {"max_image_size": {"height": 32}}, "max_image_size"),
    ("pixtral", {}, {"patch_size": 16}, {}, "patch_size must be 8"),
    ("pixtral", {"size": {"shortest_edge": 64}}, {}, {}, "size"),
    ("pixtral", {}, {"spatial_merge_size": 2}, {}, "spatial_merge_size must be 1"),
    ("pixtral", {}, {}, {"do_resize": False}, "mm_processor_kwargs: do_resize"),
    ("pixtral", {}, {}, {"patch_size": 4}, "patch_size"),
    ("mistral3", {}, {"spatial_merge_size": 1}, {}, "spatial_merge_size must be 2"),
    ("qwen2.5-vl", {}, {}, {"merge_size": 3}, "mm_processor_kwargs: merge_size must be 2"),
    ("qwen2.5-vl", {"patch_size": "4"}, {}, {}, "patch_size must be 4"),
    ("qwen2.5-vl", {}, {}, {"max_pixels": 63}, "mm_processor_kwargs: max_pixels leaves no number of pixels"),
    ("qwen2.5-vl", {}, {}, {"min_pixels": "few"}, "mm_processor_kwargs: min_pixels must be a positive integer"),
    ("qwen2.5-vl", {}, {}, {"do_resize": False}, "mm_processor_kwargs: do_resize"),
    ("llava-next", {"crop_size": {"height": 64, "width": 64}}, {}, {}, "crop_size"),
    ("llava-next", {}, {}, {"image_grid_pinpoints": [[32, 32]]}, "mm_processor_kwargs: image_grid_pinpoints"),
    ("llava-onevision", {}, {"num_image_tokens": 729}, {}, "num_image_tokens must be 4"),
    ("llava-onevision", {}, {"vision_aspect_ratio": "anyres_max_9"}, {}, "vision_aspect_ratio"),
    ("llava-onevision", {}, {}, {"size": 64}, "mm_processor_kwargs: size"),
]


def write(folder: Path, image: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    (folder / "processor_config.json").write_text(json.dumps(processor))
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


SIZES = [(1, 1), (1, 400), (400, 1), (32, 32), (64, 64), (64, 32), (33, 31), (95, 97), (7, 50), (500, 333)]


@pytest.mark.parametrize("case", FILES)
def test_files_that_fit_are_taken(case: str, folders: dict[str, Path]) -> None:
    """And there are as many placeholders as the tower makes embeddings."""
    config = write(folders[case], *FILES[case])
    first = image_processor(folders[case], config, make_tokenizer())
    assert first is not None
    args = EngineArgs(model=str(folders[case]), load_format="dummy", skip_tokenizer_init=True, dtype="float32")
    model = args.create_engine_config(progress=False).model
    family: Any = model_class(model.architecture)
    vision = object.__new__(family).create_vision(model)
    for weight in vision.parameters():
        weight.zero_()
    for size in SIZES:
        if case.startswith("qwen") and max(size) > 200 * min(size):
            continue
        features = first.process(Image.new("RGB", size))
        assert 0 < features.num_embeds <= first.max_tokens()
        found, *_ = vision.encode({name: torch.from_numpy(array) for name, array in features.tensors.items()})
        assert len(found) == features.num_embeds, size
    # Where processor_config.json holds both, as transformers 5 writes it, it is the one that counts.
    image, processor = FILES[case]
    (folders[case] / "processor_config.json").write_text(json.dumps({**processor, "image_processor": image}))
    (folders[case] / "preprocessor_config.json").write_text('{"resample": 0, "size": {"height": 7, "width": 7}}')
    both = image_processor(folders[case], config, make_tokenizer())
    assert both is not None and both.parameters == first.parameters
    (folders[case] / "preprocessor_config.json").unlink()
    both = image_processor(folders[case], config, make_tokenizer())
    assert both is not None and both.parameters == first.parameters


@pytest.mark.parametrize(("case", "image", "processor", "asked", "message"), WRONG)
def test_a_processor_that_contradicts_the_model_is_named(
    case: str,
    image: dict[str, Any],
    processor: dict[str, Any],
    asked: dict[str, Any],
    message: str,
    folders: dict[str, Path],
) -> None:
    config = write(folders[case], {**FILES[case][0], **image}, {**FILES[case][1], **processor})
    with pytest.raises(ConfigError if "mm_processor_kwargs:" in message else OctavoError) as raised:
        image_processor(folders[case], config, make_tokenizer(), asked)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_an_engine_does_not_start_with_them_and_answers_text_without_any(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    CASES["llava"].save(tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    how: dict[str, Any] = {"dtype": "float32", "quantization": "none", "max_model_len": 64}
    llm = LLM(str(tmp_path), **how)
    assert "images are refused" in caplog.text
    assert llm.generate([[1, 2, 3]], use_tqdm=False)
    with pytest.raises(ValueError, match="neither preprocessor_config"):
        llm.generate({"prompt": "a", "multi_modal_data": {"image": Image.new("RGB", (9, 9))}}, use_tqdm=False)
    write(tmp_path, *FILES["llava"])
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if "vision_tower" in name and "q_proj.weight" in name)
    for changed_weights, message in (
        (weights | {f"{name}_scale": torch.ones(1)}, "q_proj.weight_scale.*unquantized.*--language-model-only"),
        ({key: value for key, value in weights.items() if key != name}, "lacks .*--language-model-only"),
    ):
        save_file(changed_weights, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=message):
            LLM(str(tmp_path), **how)
        assert LLM(str(tmp_path), language_model_only=True, **how).generate([[1, 2, 3]], use_tqdm=False)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="num_crops"):
        LLM(str(tmp_path), mm_processor_kwargs={"num_crops": 3}, **how)
    write(tmp_path, {**FILES["llava"][0], "crop_size": {"height": 64, "width": 64}}, {})
    with pytest.raises(ModelError, match="crop_size"):
        LLM(str(tmp_path), **how)

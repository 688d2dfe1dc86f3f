"""Images to measure with: as many and as large as asked for, and what files name."""

from __future__ import annotations

import argparse
import base64
import io
import json
from pathlib import Path

import pytest
from PIL import Image

from octavo.bench import offline, serve
from octavo.bench.client import make_body
from octavo.bench.datasets import SampleRequest, load_dataset
from octavo.bench.load import load_tokenizer
from octavo.errors import ConfigError
from octavo.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(None)


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(["--backend", "openai-chat", *words])


def sizes(sample: SampleRequest) -> list[tuple[int, int]]:
    """(height, width) of each image, which is a whole JPEG."""
    found = []
    for part in (sample.content or [])[1:]:
        kind, _, data = part["image_url"]["url"].partition(",")
        assert part["type"] == "image_url" and kind == "data:image/jpeg;base64"
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            image.load()
            found.append((image.height, image.width))
    return found


def test_random_images_are_drawn_by_number_and_size(tokenizer: Tokenizer) -> None:
    words = ["--dataset-name", "random-mm", "--num-prompts", "40", "--input-len", "12", "--output-len", "3"]
    words += ["--random-mm-base-items-per-request", "2", "--random-mm-num-mm-items-range-ratio", "0.5"]
    words += ["--random-mm-bucket-config", "{(20, 30, 1): 0.6, (8, 5, 1): 0.2, '(720, 1280, 16)': 0}"]
    samples = load_dataset(arguments(*words), tokenizer)
    assert samples == load_dataset(arguments(*words), tokenizer)
    assert samples != load_dataset(arguments(*words, "--seed", "1"), tokenizer)
    drawn = [sizes(sample) for sample in samples]
    assert {len(some) for some in drawn} == {1, 2, 3}
    every = [size for some in drawn for size in some]
    assert set(every) == {(20, 30), (8, 5)} and 0.6 < every.count((20, 30)) / len(every) < 0.9
    for sample in samples:
        body = make_body(sample, "m", True, {})
        assert body["messages"] == [{"role": "user", "content": sample.content}] and body["max_tokens"] == 3
        assert sample.content is not None and sample.content[0] == {"type": "text", "text": sample.prompt}
        assert len(tokenizer.encode(sample.prompt)) == sample.prompt_len == 12
    most = load_dataset(arguments(*words, "--random-mm-limit-mm-per-prompt", '{"image": 1}'), tokenizer)
    assert {len(sizes(sample)) for sample in most} == {1}


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--random-mm-bucket-config", "{(720, 1280, 16): 1}"),
        ("--random-mm-bucket-config", "{(0, 5, 1): 1}"),
        ("--random-mm-bucket-config", "{(5, 5, 1): 0}"),
        ("--random-mm-bucket-config", "{(5, 5, 1): -1}"),
        ("--random-mm-bucket-config", "{5: 1}"),
        ("--random-mm-bucket-config", "open('x')"),
        ("--random-mm-limit-mm-per-prompt", '{"video": 1}'),
        ("--random-mm-limit-mm-per-prompt", '{"image": -1}'),
        ("--random-mm-limit-mm-per-prompt", '{"image": 1, "audio": 1}'),
        ("--random-mm-limit-mm-per-prompt", "3"),
    ],
)
def test_values_that_make_no_sense_are_refused(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(flag, value)
    assert f"argument {flag}" in capsys.readouterr().err


def test_impossible_data_sets_are_refused(tokenizer: Tokenizer) -> None:
    random_mm = ["--dataset-name", "random-mm"]
    for words, says in (
        ([*random_mm, "--backend", "openai"], "--backend openai-chat"),
        ([*random_mm, "--dataset-path", "x"], "reads no file"),
        ([*random_mm, "--random-mm-num-mm-items-range-ratio", "1.5"], "range-ratio"),
        ([*random_mm, "--random-mm-limit-mm-per-prompt", '{"image": 0}'], "allows 0"),
        (["--dataset-name", "custom_image"], "--dataset-path"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_dataset(arguments(*words), tokenizer)
    with pytest.raises(ConfigError, match="octavo bench serve"):
        offline.run_throughput(argparse.Namespace(dataset_name="random-mm"))


def test_files_name_images_by_path_address_and_data(tokenizer: Tokenizer, tmp_path: Path) -> None:
    Image.new("RGB", (3, 2)).save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    file = f"file://{tmp_path}/a.png"
    content = [
        {"type": "text", "text": "Compare "},
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": " and "},
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "image_url", "image_url": file},
    ]
    rows = [{"prompt": "How many?", "image_files": ["a.png", url], "output_tokens": 7}, {"content": content}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    words = ["--dataset-name", "custom_image", "--dataset-path", str(path), "--disable-shuffle", "--num-prompts"]
    first, second = load_dataset(arguments(*words, "2"), tokenizer)

    def image(at: str, **more: str) -> dict[str, object]:
        return {"type": "image_url", "image_url": {"url": at, **more}}

    assert first.content == [{"type": "text", "text": "How many?"}, image(file), image(url)]
    assert second.content == [content[0], image(file), content[2], image(url, detail="low"), image(file)]
    assert second.prompt == "Compare  and " and (first.output_len, second.output_len) == (256, 256)
    (sent,) = load_dataset(
        arguments(*words, "1", "--custom-ensure-client-side-data", "--custom-output-len", "-1"), tokenizer
    )
    assert sent.content == [{"type": "text", "text": "How many?"}, image(url), image(url)] and sent.output_len == 7
    for row, says in (
        ({"prompt": "x"}, "image_files"),
        ({"content": []}, "list of parts"),
        ({"content": [{"type": "video"}]}, "each part"),
        ({"prompt": "x", "image_files": ["b.png"]}, "b.png cannot be read"),
        (3, "line 1"),
    ):
        path.write_text(json.dumps(row))
        with pytest.raises(ConfigError, match=says):
            load_dataset(arguments(*words, "1", "--custom-ensure-client-side-data"), tokenizer)

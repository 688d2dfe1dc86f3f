"""The model that is planned for: its files as far as they are here, or their headers out of a hub."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.engine.args import EngineArgs
from octavo.errors import ModelError, NoWeightsError
from octavo.fetch.description import describe
from octavo.fetch.huggingface import cached_repository, fetch_headers
from octavo.fetch.model_names import ALIASES, check_model_name, hub_address, looks_local
from octavo.fetch.object_store import SCHEMES
from octavo.fetch.sources import resolve_model
from octavo.fetch.web import cached_web_model, fetch_web_headers, hidden
from octavo.interface.architectures import MODELS, has_recurrent_layers
from octavo.interface.engine_config import EngineConfig
from octavo.interface.model_files import ModelFiles
from octavo.interface.ranks import ONE_STAGE, Stage
from octavo.memory.dry_run import Measure
from octavo.memory.ledger import ModelMemory
from octavo.plan.measure import measure
from octavo.system.file_reading import read_json

# Architectures that others are planned as, by a field that config.json then has.
_PLANNED_AS = {
    "kv_lora_rank": "DeepseekV3ForCausalLM",
    "moe_intermediate_size": "Qwen3MoeForCausalLM",
    "num_local_experts": "MixtralForCausalLM",
}


@dataclass(frozen=True)
class PlannedModel:
    """A model as known before it runs. ``unsupported``: why the engine does not run it; '': it does."""

    config: EngineConfig  # of an engine with what was asked for
    architecture: str  # as config.json has it
    measure: Measure
    unsupported: str = ""


@contextmanager
def planned_model(args: EngineArgs) -> Iterator[PlannedModel]:
    """Describe the model of an engine with these arguments. A folder needs no more than config.json, which may be named
    itself; for a model on a hub that is not here, headers are read and nothing is kept. Raises ConfigError and
    ModelError."""
    args._validate()
    with tempfile.TemporaryDirectory(prefix="octavo-plan-") as folder:
        files = _files(args, Path(folder))
        load_format = args.load_format if files.weights else "dummy"
        try:
            config = replace(args, load_format=load_format).engine_config(files)
        except ModelError as error:
            found = _unsupported(args, files, str(error))
            if found is None:
                raise
            yield found
        else:
            yield PlannedModel(config, config.model.architecture, measure)


def _unsupported(args: EngineArgs, files: ModelFiles, error: str) -> PlannedModel | None:
    """A decoder of an architecture that is not built, by its sizes as another one's; None: that would be a guess."""
    described = {**(read_json(files.path / "config.json") if files.format == "safetensors" else {})}
    architectures = described.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(name, str) or name in MODELS or has_recurrent_layers(name):
        return None
    if "For" not in name or name.endswith(("Classification", "MaskedLM", "Answering", "Model")):
        return None
    inner = described.get("text_config")
    seen = {**described, **(inner if isinstance(inner, dict) else {})}
    family = next((other for field, other in _PLANNED_AS.items() if seen.get(field)), "LlamaForCausalLM")
    overrides = {**(args.hf_overrides or {}), "architectures": [family]}
    try:
        config = replace(args, load_format="dummy", hf_overrides=overrides).engine_config(files)
    except ModelError:
        return None
    text = f"{error}; sizes are those of a {family} of the same config.json"
    if not files.weights:
        return PlannedModel(config, name, measure, text)
    said = describe(files)

    def measure_stored(asked: EngineConfig, ranks: int, stage: Stage = ONE_STAGE) -> ModelMemory:
        if stage != ONE_STAGE:
            return measure(asked, ranks, stage)
        memory = measure(asked, ranks)
        share = memory.weights / memory.parameters if asked.model.quantization else said.num_bytes / said.num_parameters
        return replace(memory, weights=int(said.num_parameters * share / ranks), parameters=said.num_parameters)

    return PlannedModel(config, name, measure_stored, text + ", weights those of its files")


def _files(args: EngineArgs, scratch: Path) -> ModelFiles:
    model = args.model
    if model and model.endswith(".json") and (path := Path(model).expanduser()).is_file():
        if path.name != "config.json":
            shutil.copyfile(path, scratch / "config.json")
            path = scratch / "config.json"
        return ModelFiles(model, "safetensors", str(path.parent))
    if model and model.startswith(("https://", "http://", *SCHEMES)) and not hub_address(model)[0].startswith("hf://"):
        headers = str(cached_web_model(model, args.download_dir) or fetch_web_headers(model, scratch))
        return replace(resolve_model(headers, any_architecture=True), model=hidden(model))
    if model and (address := _on_hub(model, args)):
        here = cached_repository(address[0], revision=address[1], download_dir=args.download_dir)
        if here is not None:
            with suppress(ModelError):  # not all of it
                return replace(resolve_model(str(here), any_architecture=True), model=model)
        headers = str(fetch_headers(address[0], revision=address[1], into=scratch))
        return replace(resolve_model(headers, any_architecture=True), model=model)
    try:
        return _resolved(args, args.load_format != "dummy")
    except NoWeightsError:
        return _resolved(args, False)  # a description is enough


def _resolved(args: EngineArgs, need_weights: bool) -> ModelFiles:
    fetched = bool(args.model) and "://" in str(args.model)
    return resolve_model(
        args.model,
        revision=args.revision,
        download_dir=args.download_dir,
        progress=False,
        need_weights=need_weights,
        any_architecture=not fetched,
    )


def _on_hub(model: str, args: EngineArgs) -> tuple[str, str | None] | None:
    """The hub's name and revision of a model that is not on this machine."""
    check_model_name(model, args.download_dir)
    if model in ALIASES or looks_local(model):
        return None
    address, revision = hub_address(model)
    if address.startswith(("pypi://", "http://", "https://")):
        return None
    return address, args.revision or revision

"""Stages of a pipeline: which layers of a model this rank keeps."""

from __future__ import annotations

from octavo.interface.ranks import split_layers
from octavo.layers.decoder import Elsewhere
from octavo.layers.quantization.base import ExpertsBase, LinearBase
from octavo.models.base import CausalLM


def keep_stage(model: CausalLM) -> None:
    """Drop what other stages of the pipeline have: called before there are weights. Raises ConfigError."""
    stage, decoder = model.tp.stage, model.model
    whole, head = model.layers_of_one_stage(), _head_in_layers(model)
    layers = split_layers(len(decoder.layers), stage.size, whole, head)[stage.number]
    first = sum(one.layer < layers.start for one in model.attention_layers())
    model.specs_of_all = model.kv_cache_specs(), first
    table, tied = decoder.embed_tokens, model.lm_head.is_tied
    decoder.keep(stage, layers)
    if not stage.is_last:
        model.lm_head = Elsewhere()  # type: ignore[assignment]
    elif tied and not stage.is_first:
        decoder.embed_tokens = table
        table.is_for_head = True
    for number, one in enumerate(model.attention_layers()):
        one.layer = number  # among the caches that are here


def _head_in_layers(model: CausalLM) -> int:
    """The number of layers that the head counts as: half of those with as many weights, since it is computed for every
    row of steps that decode, and for one row of each prompt. The same on all ranks."""
    modules, of_layers = list(model.model.layers.modules()), 0
    for one in modules:
        if isinstance(one, LinearBase):
            of_layers += one.input_size * one.output_size * model.tp.size
        elif isinstance(one, ExpertsBase):
            of_layers += 3 * one.settings.num_experts * one.settings.hidden_size * one.settings.inner_size
    of_head = model.config.vocab_size * model.config.hidden_size
    return round(of_head * len(model.model.layers) / (2 * max(1, of_layers)))

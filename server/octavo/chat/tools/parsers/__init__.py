"""Tool call formats by name."""

from __future__ import annotations

from octavo.chat.tools.parsers.cohere import CohereParser
from octavo.chat.tools.parsers.core import CallPiece, Piece, Reasoning, ToolParser, overlap
from octavo.chat.tools.parsers.deepseek import DeepseekV3Parser, DeepseekV31Parser
from octavo.chat.tools.parsers.forced import JsonListParser, NamedCallParser
from octavo.chat.tools.parsers.harmony import HarmonyParser
from octavo.chat.tools.parsers.hermes import GraniteParser, HermesParser, HunyuanParser, NemotronV2Parser
from octavo.chat.tools.parsers.llama3 import Llama3JsonParser
from octavo.chat.tools.parsers.mistral import MistralParser
from octavo.chat.tools.parsers.pythonic import Lfm2Parser, PythonicParser
from octavo.chat.tools.parsers.tagged import (
    DeepseekV4Parser,
    DeepseekV32Parser,
    GlmParser,
    MinimaxM2Parser,
    Qwen3XmlParser,
    SeedOssParser,
)

TOOL_PARSERS: dict[str, type[ToolParser]] = {  # by vLLM's names; the round trip takes the first that reads back
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "openai": HarmonyParser,
    "pythonic": PythonicParser,
    "qwen3": HermesParser,
    "seed_oss": SeedOssParser,
    "qwen3_xml": Qwen3XmlParser,
    "glm45": GlmParser,
    "cohere_command3": CohereParser,
    "deepseek_v3": DeepseekV3Parser,
    "deepseek_v31": DeepseekV31Parser,
    "deepseek_v32": DeepseekV32Parser,
    "deepseek_v4": DeepseekV4Parser,
    "minimax_m2": MinimaxM2Parser,
    "granite": GraniteParser,
    "hunyuan_a13b": HunyuanParser,
    "nemotron_nano_v2": NemotronV2Parser,
    "lfm2": Lfm2Parser,
}
TOOL_PARSERS |= {  # other names of the same
    alias: TOOL_PARSERS[name]
    for name, aliases in {
        "hermes": ("qwen", "qwen3_json", "granite4"),
        "qwen3_xml": ("qwen3_coder", "nemotron_v3", "step3p5"),
        "glm45": ("glm47",),
        "cohere_command3": ("cohere_command4",),
        "hunyuan_a13b": ("jamba",),
    }.items()
    for alias in aliases
}

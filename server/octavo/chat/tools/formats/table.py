"""The families' formats of tool calls, one row each. The names are vLLM's, as far as it has one."""

from __future__ import annotations

from dataclasses import replace

from octavo.chat.options import AUTO, HF, NONE
from octavo.chat.tools.formats.row import Elements, Format, Harmony, Json, JsonKey, Named, Params, Python, Typed

_PARAMETER = Params("<parameter=", ">", "</parameter>", newline="\n")
_SEED = Format(
    "seed_oss",
    _PARAMETER,
    section=("<seed:tool_call>", "</seed:tool_call>"),
    each=True,
    call="<function=",
    header="{name}>",
    call_end="</function>",
)
_DEEPSEEK_V31 = Format(
    "deepseek_v31",
    Named(),
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    call="<｜tool▁call▁begin｜>",
    header="{name}<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
    also=("<｜tool▁call▁begin｜>",),
    special=True,
)


def _dsml(name: str, mark: str, section: str) -> Format:
    """DeepSeek's calls since V3.2, whose parameters say whether they are texts."""
    return Format(
        name,
        Params(f'<{mark}parameter name="', '" string="', f"</{mark}parameter>", newline="\n", kind_end='">'),
        section=(f"<{mark}{section}>", f"</{mark}{section}>"),
        call=f'<{mark}invoke name="',
        header='{name}">',
        call_end=f"</{mark}invoke>",
        also=(f'<{mark}invoke name="',),  # models forget the section
        special=True,
    )


_HY_V3 = Format(
    "hy_v3",
    Params(
        key="<arg_key:opensource>",
        key_end="</arg_key:opensource>",
        value="<arg_value:opensource>",
        value_end="</arg_value:opensource>",
        newline="\n",
    ),
    section=("<tool_calls:opensource>", "</tool_calls:opensource>"),
    call="<tool_call:opensource>",
    header="{name}<tool_sep:opensource>",
    call_end="</tool_call:opensource>",
    thoughts=("<think:opensource>", "</think:opensource>"),
    special=True,
    suffix=":opensource",
)

# In the order in which the round trip tries them.
ROWS = (
    Format(
        "hermes",
        Json(),
        section=("<tool_call>", "</tool_call>"),
        each=True,
        between="\n",
        aliases=("qwen", "qwen3", "qwen3_json", "granite4", "ernie45"),
    ),
    Format(
        "llama3_json",
        Json(arguments_key="parameters"),
        section=("<|python_tag|>", ""),
        begins="{",
        between="; ",
        separators=";,",
        known_only=True,
        special=True,
        aliases=("llama4_json",),
    ),
    Format(
        "mistral",
        Named(or_listed=True),
        call="[TOOL_CALLS]",
        header="{name}([CALL_ID]{id})?([ARGS])?",
        special=True,
        id_length=9,
    ),
    Format("openai", Harmony(), special=True),
    Format(
        "pythonic",
        Python(),
        section=("<|python_start|>", "<|python_end|>"),
        begins="[",
        known_only=True,
        special=True,
        aliases=("llama4_pythonic",),
    ),
    _SEED,
    replace(
        _SEED,
        name="qwen3_xml",
        arguments=replace(_PARAMETER, trims=True),
        section=("<tool_call>", "</tool_call>"),
        also=("<function=",),  # models forget the first tag
        aliases=("qwen3_coder", "nemotron_v3", "step3p5", "mimo"),
    ),
    _HY_V3,
    replace(_HY_V3, name="hy_v4", header="{name}"),
    Format(
        "glm45",
        Params(key="<arg_key>", key_end="</arg_key>", value="<arg_value>", value_end="</arg_value>"),
        call="<tool_call>",
        call_end="</tool_call>",
        special=True,
        aliases=("glm47", "ling3", "poolside_v1"),
    ),
    Format(
        "cohere_command3",
        Json("tool_name", "parameters", listed=True),
        section=("<|START_ACTION|>", "<|END_ACTION|>"),
        thoughts=("<|START_THINKING|>", "<|END_THINKING|>"),
        texts=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        special=True,
        aliases=("cohere_command4",),
    ),
    replace(
        _DEEPSEEK_V31,
        name="deepseek_v3",
        arguments=Named("\n```json\n", "\n```"),
        call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        header="{name}",
        also=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>",),
    ),
    _DEEPSEEK_V31,
    _dsml("deepseek_v32", "｜DSML｜", "function_calls"),
    _dsml("deepseek_v4", "｜DSML｜", "tool_calls"),
    _dsml("deepseek_v41", "｜DSML｜ ", "calls"),
    Format(
        "minimax_m2",
        Params('<parameter name="', '">', "</parameter>", newline="\n"),
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
        call='<invoke name="',
        header='{name}">',
        call_end="</invoke>",
        special=True,
    ),
    Format(
        "granite",
        Json(listed=True),
        section=("<|tool_call|>", "<|/tool_call|>"),
        ends_section=False,
        also=("<tool_call>",),  # since 3.1
        special=True,
    ),
    Format(
        "hunyuan_a13b", Json(listed=True), section=("<tool_calls>", "</tool_calls>"), aliases=("jamba", "minimax_m1")
    ),
    Format("nemotron_nano_v2", Json(listed=True), section=("<TOOLCALL>", "</TOOLCALL>")),
    Format("lfm2", Python(), section=("<|tool_call_start|>", "<|tool_call_end|>"), known_only=True, special=True),
    Format(
        "kimi_k2",
        Named(),
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        call="<|tool_call_begin|>",
        header="functions.{name}:{index}<|tool_call_argument_begin|>",
        call_end="<|tool_call_end|>",
        also=("<|tool_call_begin|>",),
        special=True,
        keeps_ids=True,
    ),
    Format(
        "kimi_k3",
        Params(
            key='<|open|>argument key="',
            key_end='" type="',
            kind_end='"<|sep|>',
            text_kind="string",
            value_end="<|close|>argument<|sep|>",
        ),
        section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        call='<|open|>call tool="',
        header='{name}" index="{index}"<|sep|>',
        call_end="<|close|>call<|sep|>",
        thoughts=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        texts=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        special=True,
        escapes=True,
    ),
    Format(
        "gemma4",
        Typed('<|"|>'),
        call="<|tool_call>",
        header="call:{name}",
        call_end="<tool_call|>",
        thoughts=("<|channel>thought\n", "<channel|>"),
        special=True,
    ),
    Format(
        "functiongemma",
        Typed("<escape>"),
        call="<start_function_call>",
        header="call:{name}",
        call_end="<end_function_call>",
        special=True,
    ),
    Format(
        "minimax_m3",
        Elements("]<]minimax[>["),
        section=("]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>"),
        call=']<]minimax[>[<invoke name="',
        header='{name}">',
        call_end="]<]minimax[>[</invoke>",
        between="\n",
        thoughts=("<mm:think>", "</mm:think>"),
        special=True,
    ),
    Format(
        "apertus",
        JsonKey(),
        section=("<|tools_prefix|>", "<|tools_suffix|>"),
        thoughts=("<|inner_prefix|>", "<|inner_suffix|>"),
        special=True,
    ),
    Format(
        "minicpm5",
        Params(key='<param name="', key_end='">', value_end="</param>", cdata=True),
        call='<function name="',
        header='{name}">',
        call_end="</function>",
        between="\n",
    ),
    Format(
        "solar",
        Named(),
        section=("<|tool_calls|>", "<|calls|>"),
        call="<|tool_call:begin|>",
        header="{id}<|tool_call:name|>{name}<|tool_call:args|>",
        call_end="<|tool_call:end|>",
        special=True,
    ),
    Format(
        "gigachat3",
        Json(),
        section=("<|function_call|>", "<|message_sep|>"),
        each=True,
        also=("function call<|role_sep|>",),
        texts=("<|message_sep|>",),
        special=True,
    ),
    Format("functionary_v3_1", Named(), call="<function=", header="{name}>", call_end="</function>"),
    Format(
        "functionary_v3_2",
        Named("\n"),
        call=">>>",
        begun="all\n",
        known_only=True,
        texts=(">>>all\n",),
    ),
    Format(
        "muse_glimmer",
        Params('<atem:parameter name="', '">', "</atem:parameter>", newline="\n"),
        section=("<atem:function_calls>", "</atem:function_calls>"),
        each=True,
        call='<atem:invoke name="',
        header='{name}">',
        call_end="</atem:invoke>",
        addressed="to={name}<|message|>",
        thoughts=("to=self<|message|>", "<|eom|>"),
        texts=("<|start|>assistant", "to=user<|message|>", "to=commentary<|message|>", "<|eot|>"),
        special=True,
    ),
    Format(
        "phi4_mini_json", Json(listed=True), section=("functools", ""), known_only=True, aliases=("firefunction_v2",)
    ),
    Format(
        "internlm",
        Json(arguments_key="parameters"),
        section=("<|action_start|><|plugin|>", "<|action_end|>"),
        each=True,
        special=True,
    ),
    Format("olmo3", Python(lines=True), section=("<function_calls>", "</function_calls>"), known_only=True),
    Format("longcat", Json(), section=("<longcat_tool_call>", "</longcat_tool_call>"), each=True, between="\n"),
    Format(
        "dots",
        Params('<parameter name="', '">', "</parameter>", newline="\n"),
        section=("<dots_function_call>", "</dots_function_call>"),
        call='<invoke name="',
        header='{name}">',
        call_end="</invoke>",
    ),
    Format(
        "step3",
        Params('<steptml:parameter name="', '">', "</steptml:parameter>"),
        section=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        call='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
        header='{name}">',
        call_end="</steptml:invoke><｜tool_call_end｜>",
        special=True,
    ),
    Format(
        "k2_horizon",
        Params(
            key="<ifm|arg_key>",
            key_end="</ifm|arg_key><ifm|arg_type>",
            kind_end="</ifm|arg_type>",
            text_kind="string",
            value="<ifm|arg_value>",
            value_end="</ifm|arg_value>",
        ),
        section=("<ifm|tool_calls>", "</ifm|tool_calls>"),
        call="<ifm|tool_call>",
        call_end="</ifm|tool_call>",
        special=True,
    ),
    Format(
        "plamo3",
        Named(),
        section=("<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>"),
        call="<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>",
        header="{name}<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json"
        "<|plamo:msg|>",
        call_end="<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
        special=True,
    ),
    Format("granite-20b-fc", Json(), section=("<function_call>", ""), each=True),
    Format(
        "xlam",
        Json(listed=True),
        section=("<tool_call>", "</tool_call>"),
        also=("[TOOL_CALLS]",),
        begins="[",
        known_only=True,
    ),
    Format("cohere_command_r", Json("tool_name", "parameters", listed=True), section=("Action:\n```json\n", "```")),
)
# By each of its names; as a flag a name, or what is said of the chat template or of none.
TOOL_FORMATS = {name: row for row in ROWS for name in (row.name, *row.aliases)}
TOOL_CALL_PARSERS = (AUTO, NONE, HF, *sorted(TOOL_FORMATS))

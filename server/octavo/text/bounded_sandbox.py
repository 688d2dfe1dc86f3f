"""jinja2's immutable sandbox for chat templates, with bounds on work and memory: `template_meter` counts, the code that
`template_compiler` writes asks it, and so do the filters, tests, methods and operators of `template_operations`."""

# ruff: noqa: D102 (methods of jinja2's)

from __future__ import annotations

from datetime import datetime
from functools import lru_cache
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2.ext
from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import Namespace
from markupsafe import Markup

from octavo.text.template_compiler import MeteredCodeGenerator, check_tree
from octavo.text.template_meter import current_meter
from octavo.text.template_operations import (
    TESTS,
    arithmetic,
    check_method,
    metered_filter,
    metered_test,
    tojson,
    widths,
)

MAX_SOURCE = 256 << 10  # characters of a template, which compile in 2 s
_PARSE_STEPS = 10  # of a character
_DICT_NAMES = frozenset(dir(dict))
_LOOP_NAMES = frozenset({"first", "last", "index", "index0", "length", "previtem", "nextitem"})
_OF_THE_COMPILER = ("_loop_vars", "_block_vars")


class Generation(jinja2.ext.Extension):
    """{% generation %} marks the assistant's part for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Renders what the sandbox renders. Raises UsedUpError while a rendering uses more than the current meter has."""

    code_generator_class = MeteredCodeGenerator
    intercepted_binops = frozenset({"-", "*", "/", "//", "%", "**"})  # "+" is the compiler's

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[Generation, jinja2.ext.loopcontrols]
        )
        self.filters["tojson"] = tojson
        self.filters = {name: metered_filter(name, filter) for name, filter in self.filters.items()}
        for name in TESTS & self.tests.keys():
            self.tests[name] = metered_test(name, self.tests[name])  # type: ignore[arg-type]
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        del self.globals["lipsum"]  # text by chance, as much as is asked for
        self.meter = current_meter

    def parse_checked(self, source: str) -> nodes.Template:
        """The syntax tree of a template that is not too large or deep. Raises TemplateSyntaxError."""
        if len(source) > MAX_SOURCE:
            raise TemplateSyntaxError(f"it has {len(source):,} characters, at most {MAX_SOURCE:,} are taken", 1)
        current_meter().toll(_PARSE_STEPS * len(source))
        try:
            tree = self.parse(source)
        except RecursionError:
            raise TemplateSyntaxError("expressions or blocks are nested too deeply", 1) from None
        check_tree(tree, current_meter())
        return tree

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _DICT_NAMES:  # as jinja2, without an exception for each
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if type(obj) is LoopContext and attribute in _LOOP_NAMES:  # as jinja2, which asks first whether it may
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(argument) is str or type(argument) is int:
            try:
                return obj[argument]
            except (TypeError, LookupError):
                return super().getitem(obj, argument)
        current_meter().weigh(argument)  # it is hashed, or named in an error
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return arithmetic(current_meter(), operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        meter = current_meter()
        meter.toll(2 + len(args) + len(kwargs))
        if isinstance(__obj, Macro):
            return super().call(__context, __obj, *args, **kwargs)
        named = {name: value for name, value in kwargs.items() if name not in _OF_THE_COMPILER}
        if isinstance(__obj, (BuiltinMethodType, MethodType)):
            owner = __obj.__self__
            if isinstance(owner, LoopContext):
                for value in args:
                    meter.weigh(value)  # loop.changed(value)
            elif not (isinstance(owner, type) and owner is not dict):
                args = check_method(meter, owner, __obj.__name__, args, named)
        elif __obj is dict or __obj is Namespace:
            for value in args:
                meter.weigh(value)
        return meter.made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Any:
        if super().wrap_str_format(value) is None:
            return None
        text, takes_map = value.__self__, value.__name__ == "format_map"
        formatter = _EscapeFormatter(self, escape=text.escape) if isinstance(text, Markup) else _Formatter(self)

        def format(*args: Any, **named: Any) -> str:
            if takes_map:
                (named,), args = args, ()
            current_meter().toll(1 + len(text), len(text))
            made: str = type(text)(formatter.vformat(text, args, named))
            return made

        return format


class _Fields(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        meter = current_meter()
        growth = 1 if isinstance(value, str) else 12
        meter.afford(6 * growth * meter.weigh(value) + widths(format_spec))
        meter.toll(10)
        return meter.made(super().format_field(value, format_spec))

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion is not None:
            meter = current_meter()
            meter.afford(12 * meter.weigh(value))
        return super().convert_field(value, conversion)


class _Formatter(_Fields):
    pass


class _EscapeFormatter(_Fields, SandboxedEscapeFormatter):
    pass


@lru_cache(maxsize=1)
def environment() -> BoundedEnvironment:
    """The one of all chat templates, whose compiled code it runs."""
    return BoundedEnvironment()


def _raise_exception(message: Any) -> None:
    raise TemplateError(current_meter().text(message))


def _strftime_now(format: str) -> str:
    current_meter().afford(256 * len(format))
    return datetime.now().strftime(format)

"""Chat templates compiled with tolls: each round of a loop, each call of a macro and each value made is counted.

Between two tolls runs no more than the template's own source, so nothing in it goes on uncounted. Constants are not
computed while compiling, where no meter runs.
"""

# ruff: noqa: D102, N802 (methods of jinja2's)

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from jinja2 import TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator, Frame

from octavo.text.template_meter import Meter, current_meter

_METHODS = ("toll", "text", "escaped", "joined", "plus", "made", "weighed", "inside")
_LOOPS = (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)
# Steps of about 0.1 µs; other nodes take one.
_STEPS: dict[type[nodes.Node], int] = {
    nodes.Call: 12,
    nodes.Filter: 8,
    nodes.Test: 5,
    nodes.Getattr: 4,
    nodes.Getitem: 4,
}
_ROUND = 4
_VALUES = 2
_BRANCHES = (nodes.If, nodes.CondExpr)
_DEPTH = 400  # of expressions and blocks in one another; Python's own compiler refuses 200 brackets


class MeteredCodeGenerator(CodeGenerator):
    """Writes what jinja2 does, with the meter's methods in place of what may take long or much."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._meter = current_meter()
        self._written: nodes.Node | None = None
        self._rounds: dict[int, tuple[int, int]] = {}  # costs of bodies
        self._tests: dict[int, int] = {}  # of loops' conditions

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        check_tree(node, self._meter)
        self._rounds = {id(loop.body): cost_of(loop.body) for loop in _loops(node)}
        self._tests = {id(loop.test): cost_of([loop.test])[0] for loop in node.find_all(nodes.For) if loop.test}
        super().visit_Template(node, frame)

    def write_commons(self) -> None:
        super().write_commons()
        self.writeline("meter = environment.meter()")
        for name in _METHODS:
            self.writeline(f"{name} = meter.{name}")

    def enter_frame(self, frame: Frame) -> None:
        self._meter.toll(50 + 10 * len(frame.symbols.loads))
        super().enter_frame(frame)

    def blockvisit(self, body: Iterable[nodes.Node], frame: Frame) -> None:
        if (cost := self._rounds.get(id(body))) is not None:
            self.writeline(f"toll({_ROUND + cost[0]}, {cost[1]})")
        super().blockvisit(body, frame)

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self._meter.toll(10)
        if (cost := self._tests.get(id(node))) is None:
            return super().visit(node, *args, **kwargs)
        self.write(f"(toll({_ROUND + cost}) or ")
        super().visit(node, *args, **kwargs)
        self.write(")")
        return None

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, (nodes.TemplateData, nodes.Const)):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self._written = node  # which is counted as text
        self.write("escaped(" if _escapes(frame) else "text(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(f", {_escapes(frame)})" if _escapes(frame) else ")")

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        if _is_short_sum(node):
            self.write("(" if node is self._written else "made(")
            self._write_sum(node, frame)
            self.write(")")
        else:
            self._call("plus", frame, node.left, node.right)

    def _write_sum(self, node: nodes.Expr, frame: Frame) -> None:
        if not isinstance(node, nodes.Add):
            self.visit(node, frame)
            return
        self.write("(")
        self._write_sum(node.left, frame)
        self.write(" + ")
        self._write_sum(node.right, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(f"), {_escapes(frame) or False})")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        first = node.ops[0]
        if len(node.ops) == 1 and first.op in ("in", "notin"):
            if _is_const(first.expr):  # ("a", "b")
                super().visit_Compare(node, frame)
                return
            self.write("(not " if first.op == "notin" else "(")
            self._call("inside", frame, node.expr, first.expr)
            self.write(")")
        elif len(node.ops) == 1 and (_is_const(node.expr) or _is_const(first.expr)):
            super().visit_Compare(node, frame)
        else:
            self.write("(")
            self._call("weighed", frame, node.expr)
            for operand in node.ops:
                self.visit(operand, frame)
            self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        if not _is_const(node.expr):
            node = nodes.Operand(node.op, _Weighed(node.expr))
        super().visit_Operand(node, frame)

    def visit__Weighed(self, node: Any, frame: Frame) -> None:
        self._call("weighed", frame, node.inner)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self.write("made(")
            super().visit_Getitem(node, frame)
            self.write(")")
        else:
            super().visit_Getitem(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("{")
        for pair in node.items:
            if _is_const(pair.key):
                self.visit(pair.key, frame)
            else:
                self._call("weighed", frame, pair.key)
            self.write(": ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("}")

    def _call(self, method: str, frame: Frame, *values: nodes.Node) -> None:
        self.write(f"{method}(")
        for value in values:
            self.visit(value, frame)
            self.write(", ")
        self.write(")")


class _Weighed:
    """Stands for an expression whose value is weighed."""

    def __init__(self, inner: nodes.Node) -> None:
        self.inner = inner


def _escapes(frame: Frame) -> str:
    """Return an expression that says whether autoescape is on; empty where it is off."""
    if frame.eval_ctx.volatile:
        return "context.eval_ctx.autoescape"
    return "True" if frame.eval_ctx.autoescape else ""


def _is_short_sum(node: nodes.Expr) -> bool:
    """Return whether a sum has at most two values besides constants: its size is then theirs, and it is counted
    once."""
    values, waiting = 0, [node]
    while waiting and values <= _VALUES:
        part = waiting.pop()
        if isinstance(part, nodes.Add):
            waiting += [part.left, part.right]
        else:
            values += not isinstance(part, nodes.Const)
    return values <= _VALUES


def _is_const(node: nodes.Node) -> bool:
    if isinstance(node, (nodes.List, nodes.Tuple)):
        return all(map(_is_const, node.items))
    return isinstance(node, nodes.Const)


def _loops(tree: nodes.Template) -> Iterator[Any]:
    yield from tree.find_all(_LOOPS)


def check_tree(tree: nodes.Template, meter: Meter) -> None:
    """Counts what compiling the tree takes: each block's names are looked for in all of it, and each branch copies all
    names. Raises TemplateSyntaxError for a tree that is too deep."""
    names: set[str] = set()
    branches, waiting = 0, list[tuple[nodes.Node, int, int]]([(tree, 0, 0)])
    while waiting:
        node, depth, loops = waiting.pop()
        if depth > _DEPTH:
            raise TemplateSyntaxError(f"more than {_DEPTH} expressions or blocks in one another", node.lineno)
        if isinstance(node, nodes.Name):
            names.add(node.name)
        branches += isinstance(node, _BRANCHES)
        meter.toll(3 + (depth >> 2) + 3 * loops)
        loops += isinstance(node, _LOOPS)
        waiting.extend((child, depth + 1, loops) for child in node.iter_child_nodes())
    meter.toll(2 * branches * len(names))


def cost_of(body: Iterable[nodes.Node]) -> tuple[int, int]:
    """Steps, and bytes of constants, that running through ``body`` once takes at most, loops' rounds aside."""
    steps, size = 1, 0
    for node in body:
        if isinstance(node, nodes.If):
            branches = [node.body, node.else_, *(branch.body for branch in node.elif_)]
            costs = [*map(cost_of, branches)]
            tests = cost_of([node.test, *(branch.test for branch in node.elif_)])
            steps += tests[0] + max(cost[0] for cost in costs)
            size += tests[1] + max(cost[1] for cost in costs)
            continue
        if isinstance(node, nodes.TemplateData):
            size += len(node.data)
        elif isinstance(node, nodes.Const):
            size += len(node.value) if isinstance(node.value, str) else 0
        steps += _STEPS.get(type(node), 1) - 1
        skipped = ("body", "test") if isinstance(node, _LOOPS) else ()
        inner = cost_of(node.iter_child_nodes(exclude=skipped))
        steps += inner[0]
        size += inner[1]
    return steps, size

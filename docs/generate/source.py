"""The product's source as syntax trees, and its modules by what they define, so that moved files are found again."""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("server/octavo", "kernels/octavo_kernels", "operator/octavo_operator")
SERVER, KERNELS, OPERATOR = PACKAGES


@functools.cache
def trees(*packages: str) -> dict[Path, ast.Module]:
    """The syntax tree of every module, by its path in the repository. All packages where none is named."""
    return {
        path.relative_to(ROOT): ast.parse(path.read_text())
        for package in packages or PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def module_defining(name: str, package: str) -> ModuleType:
    """The one module of `package` with a class, function or constant `name` at its top. Raises LookupError."""
    found = [path for path, tree in trees(package).items() if name in _defined(tree)]
    if len(found) != 1:
        raise LookupError(f"{name} is defined {len(found)} times in {package}: {', '.join(map(str, found))}")
    parts = found[0].with_suffix("").parts[1:]  # without server/, kernels/ or operator/
    return importlib.import_module(".".join(part for part in parts if part != "__init__"))


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id


def calls(name: str, *packages: str) -> Iterator[ast.Call]:
    """Every call of a function or class `name`, in the order of files and lines."""
    for tree in trees(*packages).values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == name:
                yield node


def template(node: ast.expr) -> str | None:
    """A string as it is written, with `...` for what is filled in when it is used. None: it is no string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(template(value) or "..." for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (template(node.left) or "...") + (template(node.right) or "...")
    return None


def constant(node: ast.expr | None) -> Any:
    return node.value if isinstance(node, ast.Constant) else None

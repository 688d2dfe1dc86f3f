"""`python -m benchmarks WHAT [FLAG ...]`, which `make bench WHAT=... ARGS=...` runs. WHAT "list": what there is."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent
# Shorter than the module's name.
NAMES = {"compare": "peers/compare", "client": "bench_client", "routing": "routing/bench", "parts": "run"}


def known() -> dict[str, str]:
    """The name of every benchmark, and what it measures: the first line of its module."""
    shorter = {module: name for name, module in NAMES.items()}
    found = {}
    for path in sorted(HERE.glob("**/*.py")):
        source, name = path.read_text(), path.relative_to(HERE).with_suffix("").as_posix()
        if "__main__" in source and not name.endswith(("__main__", "peers/install")):
            found[shorter.get(name, name)] = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return found


def main() -> int:
    name, benchmarks = sys.argv[1] if len(sys.argv) > 1 else "list", known()
    if name not in benchmarks:
        width = max(map(len, benchmarks))
        print("\n".join(f"{one:{width}}  {what}" for one, what in benchmarks.items()))
        if name != "list":
            print(f"there is no benchmark {name!r}: give one of these", file=sys.stderr)
        return 2 if name != "list" else 0
    del sys.argv[1]
    runpy.run_module("benchmarks." + NAMES.get(name, name).replace("/", "."), run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

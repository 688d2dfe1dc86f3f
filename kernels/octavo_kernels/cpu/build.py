"""``python -m octavo_kernels.cpu.build [--all]``: compile the C kernels for this machine, as `make setup` does."""

from __future__ import annotations

import argparse
import sys

from octavo_kernels.cpu import compiler


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m octavo_kernels.cpu.build", description="Compile the CPU kernels.")
    parser.add_argument(
        "--all", action="store_true", help="every instruction set of this architecture, not only this CPU's"
    )
    args = parser.parse_args()
    isas = compiler.all_isas() if args.all else compiler.supported_isas()[:1]
    if not isas:
        print(f"There are no CPU kernels for {compiler.machine()}: plain torch will be used, which is slower.")
    for isa in isas:
        try:
            print(compiler.build(isa))
        except compiler.BuildError as error:
            # A machine without a compiler can still be set up.
            print(f"CPU kernels not built: {error}. Plain torch will be used, which is slower.", file=sys.stderr)
            break
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""`octavo serve` as existing scripts call it: ``python -m octavo.entrypoints.openai.api_server --model X``."""

from __future__ import annotations

import sys

from octavo.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))

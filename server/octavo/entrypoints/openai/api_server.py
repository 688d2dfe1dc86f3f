"""``python -m octavo.entrypoints.openai.api_server --model X``: `octavo serve` under the name that scripts for vLLM
call."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "serve")
    runpy.run_module("octavo.cli.main", run_name="__main__", alter_sys=True)

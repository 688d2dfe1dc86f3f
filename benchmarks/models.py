"""Models of the sizes that people run on CPUs, beside llama.cpp and vLLM where they load them.

    python -m benchmarks models [--quick] [--only qwen3-0.6b-bf16] [--engines octavo,llama.cpp] [--resume]

Shapes of Qwen3 0.6B and 4B in bfloat16 and Q4_K_M, of Qwen3.5 0.8B (a hybrid) in Q4_K_M and Q8_0, and of gpt-oss 20B
with experts in MXFP4: random numbers through the real loaders. Everything else is as `peers/files` has it, which keeps
the figures. Needs 40 GB of disk, and 20 GiB of memory for gpt-oss.
"""

from __future__ import annotations

import sys

from benchmarks.peers.files import main
from benchmarks.peers.model_files import large_models

if __name__ == "__main__":
    sys.exit(main(known=large_models))

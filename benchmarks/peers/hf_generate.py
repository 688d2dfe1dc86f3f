"""Hugging Face's generate on the embedded model: one JSON line with output tokens a second (a process of its own).

python -m benchmarks peers/hf_generate DTYPE BATCH REQUESTS [--input-len 128] [--output-len 128]
"""

from __future__ import annotations

import argparse
import json
import time

import torch
import transformers

from benchmarks.peers.engines import checkpoint_folder, gguf_file, peers_folder
from octavo.bench.hugging_face import transformers_arguments


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dtype", choices=("float32", "bfloat16"))
    parser.add_argument("batch", type=int)
    parser.add_argument("requests", type=int)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    args = parser.parse_args()
    started = time.perf_counter()
    copy, file = checkpoint_folder(peers_folder()), gguf_file()  # the same values; the copy is read sooner
    where = {"pretrained_model_name_or_path": copy} if copy.exists() else transformers_arguments(file)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, args.dtype)).eval()
    ready = time.perf_counter() - started

    def generate(tokens: int, seed: int) -> None:
        torch.manual_seed(seed)
        ids = torch.randint(1000, 40_000, (args.batch, args.input_len))
        settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        model.generate(ids, attention_mask=torch.ones_like(ids), **settings)

    with torch.inference_mode():
        generate(4, 0)  # warms up
        started = time.perf_counter()
        for number in range(args.requests):
            generate(args.output_len, number + 1)
        seconds = time.perf_counter() - started
    tok_s = args.batch * args.requests * args.output_len / seconds
    print(json.dumps({"tok_s": tok_s, "ready_s": ready, "version": transformers.__version__}))


if __name__ == "__main__":
    main()

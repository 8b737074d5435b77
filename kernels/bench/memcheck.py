"""Prepared layers of real sizes, called once or twice: what compute-sanitizer is run on.

    compute-sanitizer --tool memcheck python kernels/bench/memcheck.py [--families mma-w4a16]

Kernels are compiled first, in processes that the tool does not follow. Workspaces are the caller's, exactly as large as
`workspace_bytes` says, and full of NaN.
"""

from __future__ import annotations

import argparse

import torch

from bench.hopper_bench import FORMATS, epilogue_of, random_experts
from bench.timing import SHAPES, inputs
from moeq_kernels.prepared import prepare_for
from moeq_kernels.warming import warmup


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3-30b,deepseek-v3-tp8")
    parser.add_argument("--formats", default="int4,mxfp4")
    parser.add_argument("--families", default="hopper-w4a16,mma-w4a16")
    parser.add_argument("--tokens", default="1,24,300,1000")
    options = parser.parse_args()
    for name in options.shapes.split(","):
        for stored in options.formats.split(","):
            shape = SHAPES[name]
            packed = random_experts(shape, FORMATS[stored])
            for family in options.families.split(","):
                x = torch.empty(0, shape.hidden, dtype=torch.bfloat16, device="cuda")
                layer = prepare_for(x, packed, shape.top_k, 1000, epilogue_of(shape), None, family=family)
                warmup([layer])
                for tokens in map(int, options.tokens.split(",")):
                    given = inputs(shape, tokens, 1)
                    size = layer.workspace_bytes(tokens)
                    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
                    y = layer(given.x, given.weights, given.ids, workspace=workspace)
                    torch.cuda.synchronize()
                    print(name, stored, family, tokens, bool(y.isfinite().all()), flush=True)
                    del workspace


if __name__ == "__main__":
    main()

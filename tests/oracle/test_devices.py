"""Conditions on devices, the device of a table that stands for another, sweeps over devices, and who loads a layer."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from oracle.asking import POLICY, gpu
from oracle.examples import SHAPE

from moeq.deploy.deployment import Gpu
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.oracle.devices import DeviceTerm, device_term, nearest_device
from moeq.oracle.engines.vllm.case import DEFAULT_ALL2ALL, Case, Method
from moeq.oracle.engines.vllm.gates import _blocks
from moeq.oracle.loaders import PlannedLayer, common, loaders_of, loads_in, sglang_reads
from moeq.oracle.sweep import Cell, deployments, matrix, matrix_markdown, required_axes, unmet


@pytest.mark.parametrize(
    ("text", "term"),
    [
        ("cpu", DeviceTerm("cpu", "cpu")),
        ("rocm gfx942", DeviceTerm("rocm gfx942", "rocm", arch="gfx942")),
        ("cuda 8.0+", DeviceTerm("cuda 8.0+", "cuda", (8, 0), None)),
        ("cuda 8.x+", DeviceTerm("cuda 8.x+", "cuda", (8, 0), None)),
        ("cuda 9.0", DeviceTerm("cuda 9.0", "cuda", (9, 0), (9, 0))),
        ("cuda 10.x", DeviceTerm("cuda 10.x", "cuda", (10, 0), (10, 99))),
        ("cuda 9.0..12.x", DeviceTerm("cuda 9.0..12.x", "cuda", (9, 0), (12, 99))),
    ],
)
def test_conditions(text: str, term: DeviceTerm) -> None:
    assert device_term(text) == term


@pytest.mark.parametrize("text", ["cuda Hopper", "cuda 9", "cuda 9.0..x", "cuda +"])
def test_a_condition_that_cannot_be_read(text: str) -> None:
    with pytest.raises(MoeqError, match=f"device condition '{text.replace('+', '.')}' cannot be read") as raised:
        device_term(text)
    assert raised.value.code == "bug.policy"


@pytest.mark.parametrize(
    ("text", "admitted"),
    [
        ("cuda", ["sm75", "sm80", "sm90", "sm100", "sm120"]),
        ("cuda 8.0+", ["sm80", "sm90", "sm100", "sm120"]),
        ("cuda 9.0", ["sm90"]),
        ("cuda 9.0..10.x", ["sm90", "sm100"]),
        ("cuda 10.x", ["sm100"]),
        ("rocm", ["gfx90a", "gfx942"]),
        ("rocm gfx942", ["gfx942"]),
        ("cpu", ["x86-amx"]),
    ],
)
def test_what_meets_a_condition(text: str, admitted: list[str]) -> None:
    names = ["sm75", "sm80", "sm90", "sm100", "sm120", "gfx90a", "gfx942", "x86-amx"]
    assert [name for name in names if device_term(text).admits(parse_gpu(name))] == admitted


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("sm90", "sm90"),
        ("sm88", "sm86"),
        ("sm70", None),
        ("sm121", "sm90"),
        ("gfx942", "gfx942"),
        ("gfx1200", "gfx1201"),
        ("gfx906", None),
        ("gfx90a", None),
        ("gfx950", None),
        ("x86-zen", None),
        ("x86-amx", "x86-amx"),
    ],
)
def test_the_device_that_stands_for_another(name: str, nearest: str | None) -> None:
    known = dict.fromkeys(("sm75", "sm80", "sm86", "sm90", "gfx900", "gfx942", "gfx1201", "gfx1100", "x86-amx"))
    known.pop("gfx900")
    assert nearest_device(parse_gpu(name), known) == nearest
    assert nearest_device(Gpu("gfx908", "rocm", "gfx908"), {"gfx906": 1, "gfx90a": 1}) == "gfx906"


def test_deployments_of_a_sweep() -> None:
    found = list(deployments(gpu("H100"), [parse_gpu("V100"), parse_gpu("A100")], [1, 2], [1]))
    assert [(one.gpu.name, one.tp, one.ep, one.dtype) for one in found] == [
        ("V100", 1, 1, "fp16"),
        ("V100", 2, 1, "fp16"),
        ("A100", 1, 1, "bf16"),
        ("A100", 2, 1, "bf16"),
    ]
    (one,) = deployments(gpu("H100", dtype="fp16"), [parse_gpu("MI300X")], [1], [4])
    assert (one.dtype, one.ep) == ("fp16", 4)


def cell(name: str, tp: int, ep: int, backend: str | None, **more: Any) -> Cell:
    chosen = None if backend is None else SimpleNamespace(backend=backend)
    advisories = more.pop("advisories", ())
    verdict: Any = SimpleNamespace(chosen=chosen, refusal="no", advisories=advisories, ok=chosen is not None)
    return Cell(name, tp, ep, verdict, **more)


CELLS = (
    cell("A100", 1, 1, "MARLIN"),
    cell("A100", 2, 4, None),
    cell("H100", 1, 1, "TRITON", refused="nothing to convert to", advisories=("x",)),
    cell("H100", 2, 4, "MARLIN", advisories=("x",)),
)


@pytest.mark.parametrize(
    ("required", "faults"),
    [
        (["A100/tp1"], []),
        (["a100/TP1/ep1=marlin"], []),
        (["A100"], ["A100/tp2/ep4: no"]),
        (["*/tp2", "A100/tp1=TRITON"], ["A100/tp2/ep4: no", "A100/tp1/ep1: MARLIN, not TRITON"]),
        (["all/ep1"], ["H100/tp1/ep1: TRITON runs it, and convert cannot write for it: nothing to convert to"]),
        (["H100/ep4=TRITON"], ["H100/tp2/ep4: MARLIN, not TRITON"]),
    ],
)
def test_faults_of_required_cells(required: list[str], faults: list[str]) -> None:
    assert unmet(CELLS, required) == faults


@pytest.mark.parametrize("text", ["V100", "A100/tp4", "A100/ep2", "A100/tp", "", "A100/tp2/ep1"])
def test_cells_that_a_sweep_lacks(text: str) -> None:
    with pytest.raises(MoeqError) as raised:
        unmet(CELLS, [text])
    assert (raised.value.code, raised.value.message) == (
        "usage.require",
        f"--require '{text}' names no cell of this sweep",
    )
    assert raised.value.hint == "write GPU[/tpN][/epN][=BACKEND] or all, such as H100/tp8=MARLIN"


def test_axes_that_required_cells_name() -> None:
    texts = ["H100/tp8", " a100/tp2/ep4=MARLIN ", "H100/tp2", "all/ep16", "*", "no cell/"]
    assert required_axes(texts) == (["H100", "a100"], [8, 2], [4, 16])


def test_the_table_of_a_sweep() -> None:
    rows = [["A100", "MARLIN", "-"], ["H100", "TRITON*", "MARLIN*"]]
    assert matrix(CELLS) == (["GPU", "TP1", "TP2 EP4"], rows)
    lines = ["| GPU | TP1 | TP2 EP4 |", "| --- | --- | --- |", "| A100 | MARLIN | - |", "| H100 | TRITON* | MARLIN* |"]
    assert matrix_markdown(CELLS).splitlines() == lines


VLLM, SGLANG, TRANSFORMERS, OWN = (
    "vLLM 0.26.0 to 0.33.0 (moeq's plug-in)",
    "SGLang 0.5.23 (moeq's plug-in)",
    "transformers 5.1 and newer",
    "moeq.load_experts",
)
EVERY = ("0.33.0", "0.32.0", "0.31.0", "0.30.0", "0.29.0", "0.28.0", "0.27.1", "0.27.0", "0.26.0")
LAYER = PlannedLayer(
    layout="marlin-wna16/1", model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", activation="silu",
    dtype="bf16", platform="cuda", tp=1, by_rank=False, own_kernel=True, vllm=EVERY, others=EVERY, family=True,
    own_config=False, heads=True, sglang=True, dispatched=False, moved=False, scales=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "titles"),
    [
        ({}, [VLLM, SGLANG, TRANSFORMERS, OWN]),
        ({"tp": 4}, [VLLM, SGLANG, TRANSFORMERS, OWN]),
        ({"family": False}, [SGLANG, TRANSFORMERS, OWN]),
        ({"heads": False}, [SGLANG, TRANSFORMERS, OWN]),
        ({"own_config": True}, [SGLANG, TRANSFORMERS, OWN]),
        ({"sglang": False}, [VLLM, TRANSFORMERS, OWN]),
        ({"dispatched": True}, [VLLM, TRANSFORMERS, OWN]),
        ({"dispatched": True, "scales": False}, [TRANSFORMERS, OWN]),
        ({"moved": True}, [VLLM, TRANSFORMERS, OWN]),
        ({"moved": True, "tp": 2}, [TRANSFORMERS, OWN]),
        ({"moved": True, "by_rank": True}, [OWN]),
        ({"moved": True, "own_kernel": False}, []),
        ({"by_rank": True}, [VLLM, SGLANG, OWN]),
        ({"model_type": "unheard_of"}, [VLLM, SGLANG, OWN]),
        ({"model_type": "olmoe"}, [VLLM, SGLANG, "transformers 5.23 and newer", OWN]),
        ({"others": ("0.33.0",)}, ["vLLM 0.33.0 (moeq's plug-in)", SGLANG, TRANSFORMERS, OWN]),
        ({"architecture": "OfAPackage"}, [VLLM, SGLANG, TRANSFORMERS, OWN]),
        ({"own_kernel": False}, [VLLM]),
        ({"own_kernel": False, "vllm": ("0.30.0", "0.26.0")}, ["vLLM 0.26.0 and 0.30.0 (moeq's plug-in)"]),
        ({"own_kernel": False, "scales": False}, []),
        ({"platform": "rocm"}, [VLLM, TRANSFORMERS, OWN]),
        ({"platform": "cpu", "own_kernel": False}, [VLLM, TRANSFORMERS]),
        ({"platform": "xpu", "own_kernel": False, "vllm": ()}, []),
        ({"activation": "swigluoai"}, [VLLM, SGLANG, TRANSFORMERS, OWN]),
        ({"layout": "marlin-mxfp4-interleaved/1"}, []),
        ({"layout": "marlin-mxfp4-interleaved/1", "activation": "swigluoai"}, [VLLM, SGLANG, TRANSFORMERS, OWN]),
        ({"layout": "marlin-fp8/1", "dtype": "fp16", "own_kernel": False}, []),
        ({"layout": "flashinfer-cutlass-fp8-block/1", "own_kernel": False}, [VLLM]),
    ],
)
def test_loaders_of_a_layer(changes: dict[str, Any], titles: list[str]) -> None:
    found = tuple(loaders_of(replace(LAYER, **changes)))
    assert [one.title for one in found] == titles
    assert loads_in(found) == (", ".join(titles) or "nothing yet")


def test_loaders_that_several_layers_have_in_common() -> None:
    all_of_them = tuple(loaders_of(LAYER))
    assert common([]) == ()
    assert common([all_of_them, all_of_them[1:3], all_of_them[2:]]) == all_of_them[2:3]


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


@pytest.mark.parametrize(
    ("config", "linear", "reads"),
    [
        (GPTQ, "gptq", True),
        ({**GPTQ, "quant_method": "GPTQ", "bits": 8, "group_size": -1}, None, True),
        *(({**GPTQ, name: value}, "gptq", False) for name, value in {"bits": 3, "group_size": 16}.items()),
        *(({**GPTQ, name: None}, "gptq", False) for name in ("sym", "desc_act")),
        ({**GPTQ, "sym": False}, "gptq", False),
        ({"quant_method": "awq"}, "awq", True),
        ({"quant_method": "fp8"}, None, True),
        ({"quant_method": "fp8"}, "fp8", False),
        ({"quant_method": "quark"}, None, False),
        ({}, None, False),
    ],
)
def test_layers_that_sglang_reads(config: dict[str, Any], linear: str | None, reads: bool) -> None:
    assert sglang_reads(config, linear) is reads


@pytest.mark.parametrize(
    ("options", "form", "ranks", "shared"),
    [
        ({}, "single", 1, 1),
        ({"tp": 2}, "tp", 2, 2),
        ({"pcp": 2}, "tp", 2, 2),
        ({"dp": 2}, "dp", 2, 2),
        ({"dp": 2, "tp": 2, "eplb": True}, "dp+eplb", 4, 4),
        ({"ep": 2, "tp": 2}, "ep", 2, 1),
        ({"ep": 2, "dp": 2}, f"ep:{DEFAULT_ALL2ALL}", 2, 1),
        ({"ep": 2, "pcp": 2}, f"ep:{DEFAULT_ALL2ALL}", 2, 1),
        ({"ep": 2, "dp": 2, "all2all": "deepep_low_latency", "eplb": True}, "ep:deepep_low_latency+eplb", 2, 1),
        ({"ep": 2, "dp": 2, "all2all": "unheard-of"}, f"ep:{DEFAULT_ALL2ALL}", 2, 1),
    ],
)
def test_names_of_parallel_forms(options: dict[str, Any], form: str, ranks: int, shared: int) -> None:
    case = Case(POLICY, gpu("H100", **options), SHAPE, Method("", "wna16", "gptq", "kInt4Static"))
    assert (case.parallel_form, case.ranks, case.moe_tp) == (form, ranks, shared)
    assert case.intermediate == SHAPE.intermediate_size // shared


@pytest.mark.parametrize(
    ("tp", "inner", "text"),
    [
        (1, 200, "intermediate size per rank 200 does not divide into blocks of 128 x 64"),
        (1, 128, None),
        (2, 256, None),
        (2, 384, "intermediate size per rank 192 does not divide into blocks of 128 x 64"),
    ],
)
def test_blocks_of_a_rank(tp: int, inner: int, text: str | None) -> None:
    method = Method("Fp8MoEMethod", "fp8", "fp8", "kFp8Static128BlockSym", block=(128, 64))
    case = Case(POLICY, gpu("H100", tp=tp), replace(SHAPE, intermediate_size=inner), method)
    assert [one.text for one in _blocks(case)] == ([] if text is None else [text])


@pytest.mark.parametrize(("tp", "wrong"), [(1, False), (2, True)])
def test_columns_of_blocks_count_where_a_rank_holds_a_part(tp: int, wrong: bool) -> None:
    method = Method("Fp8MoEMethod", "fp8", "fp8", "kFp8Static128BlockSym", block=(64, 128))
    case = Case(POLICY, gpu("H100", tp=tp), replace(SHAPE, intermediate_size=192 * tp), method)
    assert bool(list(_blocks(case))) is wrong

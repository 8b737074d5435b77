"""MXFP4 in the engine's kernels: the plug-in leaves what the engine's own preparation leaves."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import engine_preparation as preparation
from engines.engine_preparation import draw, layer_differences, prepared_layer
from engines.mxfp4_preparation import Generic, as_mxfp4, draw_gpt_oss, gpt_oss_layer, stand_in
from engines.vllm_engine import BACKENDS, loaded_layer
from load.deployments import convert
from vllm.model_executor.layers.quantization.utils import marlin_utils, mxfp4_utils
from vllm.platforms import current_platform

import moeq
from moeq.engines.vllm.backends import CONSTRUCTORS
from moeq.engines.vllm.engine_experts import RELEASE, VERSION
from moeq.errors import MoeqError
from moeq.layouts.registry import LAYOUTS

#: What the engine prepares, the layout, and `--moe-backend`; hidden and intermediate size of a rank.
CASES: list[tuple[str, str, str, int, int]] = [
    ("gpt-oss", "marlin-mxfp4-interleaved/1", "marlin", 288, 96),
    ("gpt-oss", "marlin-mxfp4-fp8act-interleaved/1", "marlin", 288, 96),
    ("gpt-oss", "trtllm-mxfp4/1", "flashinfer_trtllm", 288, 96),
    ("gpt-oss", "trtllm-mxfp4/1", "flashinfer_trtllm_afp8", 288, 96),
    ("gpt-oss", "flashinfer-cutlass-mxfp4-bf16/1", "flashinfer_cutlass", 288, 96),
    ("gpt-oss", "flashinfer-cutlass-mxfp4-mxfp8/1", "flashinfer_cutlass_afp8", 288, 96),
    ("gpt-oss", "triton-kernels-hopper/1", "triton", 288, 96),
    ("gpt-oss", "triton-kernels-blackwell/1", "triton", 288, 96),
    ("gpt-oss", "triton-kernels-cdna4/1", "triton", 256, 256),
    ("gpt-oss", "triton-kernels-hopper/1", "triton_unfused", 256, 128),
    ("gpt-oss", "triton-kernels-cdna4/1", "aiter_triton_mxfp4_bf16", 256, 256),
    ("gpt-oss", "aiter-a16w4/1", "aiter", 256, 256),
    ("mxfp4", "marlin-mxfp4/1", "marlin", 288, 96),
    ("mxfp4", "marlin-mxfp4-fp8act/1", "marlin", 288, 96),
    ("mxfp4", "trtllm-mxfp4/1", "flashinfer_trtllm", 288, 96),
    ("mxfp4", "trtllm-mxfp4/1", "flashinfer_trtllm_afp8", 288, 96),
    ("mxfp4", "flashinfer-cutlass-mxfp4-bf16/1", "flashinfer_cutlass", 288, 96),
    ("mxfp4", "flashinfer-cutlass-mxfp4-mxfp8/1", "flashinfer_cutlass_afp8", 288, 96),
    ("mxfp4", "deepgemm-mxfp4/1", "deep_gemm", 288, 96),
    ("mxfp4", "triton-kernels-cdna4/1", "aiter_triton_mxfp4_bf16", 256, 256),
    ("mxfp4", "aiter-a16w4/1", "aiter", 256, 256),
    ("mxfp4", "aiter-shuffle/1", "aiter_mxfp4_mxfp4", 256, 256),
    ("mxfp4", "aiter-gfx1250/1", "aiter_triton_mxfp4_mxfp4", 256, 256),
    ("mxfp4", "mxfp4-identity/1", "xpu", 288, 128),
    ("mxfp4", "mxfp4-identity/1", "b12x", 256, 96),
    ("ct", "mxfp4-identity/1", "b12x", 256, 96),
]


def fp8_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose Marlin has them."""
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "fp8")
    monkeypatch.setattr(
        type(current_platform), "is_device_capability", classmethod(lambda cls, wanted, *_: wanted == 89)
    )
    monkeypatch.setattr(marlin_utils, "get__quant_fp8_method", lambda: None)


def options_of(layout: str) -> list[str]:
    return [row.option for row in (BACKENDS[layout], *BACKENDS[layout].instead)] if layout in BACKENDS else []


def in_this_version(case: tuple[str, str, str, int, int]) -> bool:
    """Up to 0.27.1 the engine's method for other models than gpt-oss prepares nothing for FlashInfer's CUTLASS."""
    kind, layout, option, *_ = case
    late = kind == "mxfp4" and layout.startswith("flashinfer-cutlass") and VERSION < (0, 28)
    return option in options_of(layout) and not late


CASES = [case for case in CASES if in_this_version(case)]


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    preparation.stand_in(monkeypatch)


@pytest.mark.cover("kind", "layout", "where")
@pytest.mark.parametrize(("kind", "layout", "option", "hidden", "inner"), CASES)
@pytest.mark.parametrize("where", [{}, {"ep": (1, 2)}, {"tp": (1, 2)}], ids=["whole", "ep", "tp"])
def test_the_layer_is_as_the_engine_leaves_it(
    kind, layout, option, hidden, inner, where, checkpoints: Path, tmp_path: Path, monkeypatch
) -> None:
    """Random experts: weights, every scale and size that the kernel is built from, to the bit."""
    stand_in(monkeypatch, layout)
    if "fp8act" in layout:
        fp8_activations(monkeypatch)
    if "ep" in where and option == "b12x":
        pytest.skip("the engine's B12X experts refuse expert parallelism")
    ranks: dict[str, Any] = {name: size for name, (_, size) in where.items()}
    sizes = (hidden, inner * ranks.get("tp", 1))
    seed = zlib.crc32(f"{kind} {layout}".encode())
    options = {**where, "dtype": torch.bfloat16, "moe_backend": option}
    if kind == "gpt-oss":
        source = draw_gpt_oss(checkpoints / "mxfp4-gptoss", tmp_path / "source", *sizes, experts=4, seed=seed)
        theirs = gpt_oss_layer(source, **options)
    else:
        source = draw(checkpoints / "ct-mxfp4-qwen3moe", tmp_path / "source", *sizes, experts=4, seed=seed)
        own = (as_mxfp4(source, tmp_path / "as"), Generic()) if kind == "mxfp4" else (source, None)
        theirs = prepared_layer(own[0], config=own[1], **options)
    folder = convert(source, tmp_path / "out", layout, **ranks)
    ours = loaded_layer(folder, kernels="engine", **options)
    for layer in (ours, theirs):
        assert layer.quant_method.skip_forward_padding == theirs.quant_method.skip_forward_padding
        assert layer.quant_method.has_unpadded_output == theirs.quant_method.has_unpadded_output
    assert layer_differences(ours, theirs) == []


def test_the_plug_in_makes_experts_for_every_reader_of_a_layout() -> None:
    """In this version it takes what the layouts declare for it, with the engine's own names."""
    readers = {layout: kind.vllm_readers() for layout, kind in LAYOUTS.items() if kind.vllm_readers()}
    assert set(CONSTRUCTORS) == set(readers)
    for layout, declared in readers.items():
        read = [reader for reader in declared if RELEASE in reader.versions]
        rows = [BACKENDS[layout], *BACKENDS[layout].instead] if layout in BACKENDS else []
        assert [row.reader for row in rows] == read
        assert all(row.title.partition(" ")[0] == row.reader.backend and row.classes() for row in rows), layout


@pytest.fixture
def gpt_oss(checkpoints: Path, tmp_path: Path) -> Path:
    return draw_gpt_oss(checkpoints / "mxfp4-gptoss", tmp_path / "source", 256, 256, experts=4, seed=3)


def test_a_difference_would_be_found(gpt_oss: Path, tmp_path: Path, monkeypatch) -> None:
    """In what triton_kernels wraps, too."""
    stand_in(monkeypatch, "triton-kernels-blackwell/1")
    ours = loaded_layer(convert(gpt_oss, tmp_path / "out", "triton-kernels-blackwell/1"), kernels="engine")
    theirs = gpt_oss_layer(gpt_oss, moe_backend="triton")
    assert layer_differences(ours, theirs) == []
    ours.w2_weight.storage.data[1, 5, 3] ^= 1
    scale = ours.quant_method.moe_quant_config._w1.scale.weight_scale
    scale.storage.data.view(-1)[7] ^= 1
    scale.shape = [1, 2, 3]
    found = "\n".join(layer_differences(ours, theirs))
    for what in ("w2_weight: 1 of", "weight_scale.storage.data: 1 of", "weight_scale.shape"):
        assert what in found


def test_memory_is_the_checkpoints(gpt_oss: Path, tmp_path: Path, monkeypatch) -> None:
    """The engine's tensors of triton_kernels lie on the parameters that were filled: no second copy."""
    stand_in(monkeypatch, "triton-kernels-hopper/1")
    layer = loaded_layer(convert(gpt_oss, tmp_path / "out", "triton-kernels-hopper/1"), kernels="engine")
    scale = layer.quant_method.moe_quant_config._w1.scale.weight_scale
    assert scale.data_ptr() == layer.w13_scale.data_ptr()
    assert "w13_weight" not in dict(layer.named_parameters())


def test_another_arrangement_of_triton_kernels_is_refused(gpt_oss: Path, tmp_path: Path, monkeypatch) -> None:
    """CDNA4 with more ranks than two keeps scales in their order, and a newer package arranges otherwise."""
    layout = "triton-kernels-cdna4/1"
    folder = convert(gpt_oss, tmp_path / "out", layout)
    stand_in(monkeypatch, layout)
    with monkeypatch.context() as patch:
        patch.setattr(mxfp4_utils, "should_use_cdna4_mx_scale_swizzle", lambda: False)
        with pytest.raises(MoeqError, match="arranges weights and scales as"):
            loaded_layer(folder, kernels="engine")
    from triton_kernels import tensor

    monkeypatch.setattr(tensor, "SparseMatrix", object, raising=False)
    with pytest.raises(MoeqError, match=r"newer than generation 3\.5\.1"):
        loaded_layer(folder, kernels="engine")


@pytest.mark.parametrize(
    ("layout", "value", "words"),
    [
        ("marlin-mxfp4-interleaved/1", "fp8", "asks Marlin for fp8 activations"),
        ("marlin-mxfp4-fp8act-interleaved/1", None, "is not set"),
        ("marlin-mxfp4-fp8act-interleaved/1", "int8", "asks Marlin for int8 activations"),
    ],
)
def test_marlin_for_other_activations_is_refused(layout, value, words, gpt_oss, tmp_path, monkeypatch) -> None:
    folder = convert(gpt_oss, tmp_path / "out", layout)
    fp8_activations(monkeypatch)
    if value:
        monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", value)
    else:
        monkeypatch.delenv("VLLM_MARLIN_INPUT_DTYPE")
    with pytest.raises(MoeqError, match=words):
        loaded_layer(folder, kernels="engine")


@pytest.mark.skipif("trtllm-mxfp4/1" not in BACKENDS, reason="not in this version")
def test_the_backend_that_was_converted_for_comes_first(gpt_oss: Path, tmp_path: Path, monkeypatch) -> None:
    """Two backends of the engine read the bytes; `--moe-backend` decides before the conversion does."""
    stand_in(monkeypatch, "trtllm-mxfp4/1")
    where = {"gpu": moeq.gpu("B200"), "backend": "flashinfer_trtllm_afp8"}
    moeq.convert(gpt_oss, tmp_path / "out", moeq.Deployment(**where))
    found = [
        loaded_layer(tmp_path / "out", kernels="engine", moe_backend=option).quant_method.engine.reader.backend
        for option in ("auto", "flashinfer_trtllm_afp8", "flashinfer_trtllm")
    ]
    quantised, plain = "FLASHINFER_TRTLLM_MXFP4_MXFP8", "FLASHINFER_TRTLLM_MXFP4_BF16"
    assert found == [quantised, quantised, plain]

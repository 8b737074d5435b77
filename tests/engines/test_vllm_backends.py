"""`run-check --engine vllm`: the engine's backends on the small checkpoints' experts, against the reference.

Without a GPU the engine's Triton kernels run in Triton's interpreter, with fp16 activations (it gets bf16 products
wrong). That a GPU is there is pretended to its classes; three compiled operators, and the quantiser of rows whose
rounding the interpreter lacks, are replaced by what they compute.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines.vllm_engine import vllm
from load.deployments import convert
from torch import Tensor
from vllm.model_executor.layers.fused_moe import utils as fused_moe_utils
from vllm.model_executor.layers.fused_moe.experts import triton_moe
from vllm.platforms import current_platform
from vllm.v1.worker import workspace

import moeq
from moeq.api.engine_backends import CONVERTED, chosen_backends
from moeq.check.engine_check import BackendResult, EngineBackend, check_backends
from moeq.check.run_check import CheckOptions, layer_checks, open_both
from moeq.cli.app import run
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.engines.vllm import engine_experts, one_layer
from moeq.engines.vllm.one_layer import engine, source_layer
from moeq.pipeline.plan.decide import decide

CPU = torch.device("cpu")
RELEASE = vllm.__version__.partition("+")[0]
OPTIONS = CheckOptions(layers=(1,), tokens=(1, 5), experts=range(4))


def align(ids: Tensor, experts: int, block: int, order: Tensor, blocks: Tensor, used: Tensor, *_: Any) -> None:
    """`moe_align_block_size`: choices sorted by expert, each expert's filled up to whole blocks."""
    flat, first = ids.flatten(), 0
    order.fill_(flat.numel())
    blocks.fill_(-1)
    for expert in range(experts):
        chosen = torch.where(flat == expert)[0]
        count = -(-len(chosen) // block)
        order[first * block : first * block + len(chosen)] = chosen.int()
        blocks[first : first + count] = expert
        first += count
    used.fill_(first * block)


def silu_and_mul(out: Tensor, rows: Tensor) -> None:
    gate, up = rows.float().chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def by_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scales = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / scales).round().to(torch.int8), scales


@pytest.fixture(autouse=True)
def a_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: CPU)
    monkeypatch.setattr(type(current_platform), "get_device_name", classmethod(lambda cls, number=0: "none"))
    for kind in (triton_moe.TritonExperts, triton_moe.TritonWNA16Experts):
        monkeypatch.setattr(kind, "_supports_current_device", staticmethod(lambda: True))
    monkeypatch.setattr(triton_moe.TritonExperts, "_supports_quant_scheme", staticmethod(lambda weight, act: True))
    moe = SimpleNamespace(moe_align_block_size=align, moe_sum=lambda x, out, *_: out.copy_(x.float().sum(1)))
    monkeypatch.setattr(torch.ops, "_moe_C", moe, raising=False)
    monkeypatch.setattr(torch.ops, "_C", SimpleNamespace(silu_and_mul=silu_and_mul), raising=False)
    monkeypatch.setattr(fused_moe_utils, "per_token_quant_int8", by_rows)
    yield
    workspace.reset_workspace_manager()


def results(source: Path, dst: Path, layout: str) -> dict[str, BackendResult]:
    """Return the results by backend: the converted folder's, and Triton's and Humming's on the source."""
    opened = open_both(convert(source, dst, layout, dtype="fp16"), source)
    (check,), _ = layer_checks(opened, OPTIONS, CPU)
    verdict = decide(opened.reference, Deployment(parse_gpu("A100"), engine=f"vllm@{RELEASE}", dtype="fp16"))
    rows = {row.name: row for row in chosen_backends(verdict, opened, CPU, every=True)}

    def build(layer: int, option: str = "triton") -> Any:
        return source_layer(opened.reference, layer, option, CPU, torch.float16)

    def swapped(layer: int) -> Any:
        """An engine that exchanges two experts: right backend, wrong words."""
        experts, run_layer = build(layer)
        order = torch.tensor([0, 2, 1, 3])
        return experts, lambda x, weights, ids: run_layer(x, weights, order[ids.long()].int())

    wanted = [rows[CONVERTED], EngineBackend("TRITON", rows["TRITON"].activations, build)]
    wanted += [EngineBackend("swapped", rows["TRITON"].activations, swapped)]
    wanted += [EngineBackend("HUMMING", "", lambda layer: build(layer, "humming"))]
    with engine(CPU):
        return {row.backend: row for row in check_backends(check, wanted)}


@pytest.mark.parametrize(
    ("name", "layout"), [("ct-int4-g128-qwen3moe", "marlin-wna16/1"), ("ct-w8a8-qwen3moe", "int8-w8a8/1")]
)
def test_right_backends_are_right_and_wrong_ones_are_found(name, layout, checkpoints, tmp_path) -> None:
    found = results(checkpoints / name, tmp_path / "out", layout)
    for backend in (CONVERTED, "TRITON"):
        row = found[backend]
        assert row.refused is None
        assert row.error is not None
        assert row.allowed is not None
        assert 0 < row.error < row.allowed < 0.1
        assert not row.wrong
    assert found["swapped"].wrong
    assert found["swapped"].expert is not None
    assert found["swapped"].expert[0] in (1, 2)
    assert "does not support" in str(found["HUMMING"].refused)
    assert not found["HUMMING"].wrong


def test_where_a_gpu_is_needed_the_backends_are_named(checkpoints, tmp_path, capsys) -> None:
    source = checkpoints / "ct-int4-g128-qwen3moe"
    folder = convert(source, tmp_path / "out", "marlin-wna16/1")
    command = ["run-check", str(folder), "--source", str(source), "--engine", "vllm", "--all-backends"]
    assert run(command) == 3
    said = capsys.readouterr().err
    assert "those for A100 need a GPU" in said
    assert "MARLIN" in said
    with pytest.raises(moeq.MoeqError, match="need a GPU"):
        moeq.run_engine_check(folder, source, all_backends=True)


def test_from_python_a_report_says_what_ran(checkpoints, tmp_path, monkeypatch) -> None:
    """That the engine has kernels for this device is pretended; its Triton kernels run in the interpreter."""
    source = checkpoints / "ct-int4-g128-qwen3moe"
    folder = convert(source, tmp_path / "out", "marlin-wna16/1", dtype="fp16")
    monkeypatch.setattr(one_layer, "needs_gpu", lambda: False)
    monkeypatch.setattr(engine_experts, "current_gpu", lambda: parse_gpu("A100"))
    report = moeq.run_engine_check(folder, source, layers=(1,), tokens=(5,), all_backends=True)
    ran = {row.backend for row in report.backends if row.refused is None}
    assert CONVERTED in ran
    assert len(report.backends) > 2
    assert report.ok == (not any(row.wrong for row in report.backends))
    assert report.to_json()["engine"] == "vllm"


def test_rows_are_padded_to_the_width_that_the_engine_allocated() -> None:
    """Marlin's MXFP4 weights are wider than gpt-oss's activations; the engine's runner pads those and cuts results."""

    def forward(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        assert x.shape == (2, 128)
        assert not x[:, 96:].any()
        return x * 2

    method = SimpleNamespace(
        skip_forward_padding=False, is_monolithic=False, process_weights_after_loading=lambda layer: None
    )
    layer = SimpleNamespace(quant_method=method, moe_config=SimpleNamespace(hidden_dim=128), forward_modular=forward)
    x = torch.randn(2, 96)
    with engine(CPU):
        found = one_layer.ready(layer)[1](x, torch.ones(2, 1), torch.zeros(2, 1))
    torch.testing.assert_close(found, x * 2, rtol=0, atol=0)

"""Parity with an engine's own packing. `MOEQ_TEST_VLLM` names a folder that holds vLLM 0.33.0's `vllm/`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import ExitCode, MoeqError
from moeq.pipeline.convert import convert
from moeq.prove.engine_code import find_engine
from moeq.prove.parity import _converted_units as converted_units
from moeq.prove.parity import _sampled as sampled
from moeq.prove.parity import _source_units as source_units
from moeq.prove.parity import parity

SITE = os.environ.get("MOEQ_TEST_VLLM")
with_vllm = pytest.mark.skipif(SITE is None, reason="needs MOEQ_TEST_VLLM=<folder with vllm/>")
A100 = parse_gpu("A100")

EQUAL = [
    ("gptq-int4-g32-qwen3moe", "marlin-wna16/1"),
    ("gptq-int8-g64-qwen3moe", "marlin-wna16/1"),
    ("awq-int4-g32-qwen3moe", "marlin-wna16/1"),
    ("ct-int4-asym-g32-mixtral", "marlin-wna16/1"),
    ("ct-w8a8-qwen3moe", "marlin-wna16/1"),
    ("ct-mxfp4-qwen3moe", "marlin-mxfp4/1"),
    ("mxfp4-gptoss", "marlin-mxfp4/1"),
    ("mxfp4-gptoss", "marlin-mxfp4-interleaved/1"),
]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder in the form of an unpacked wheel."""
    folder = tmp_path / "vllm"
    (folder / "model_executor").mkdir(parents=True)
    (folder / "_version.py").write_text("__version__ = version = '9.8.7'\n")
    return tmp_path


def test_without_the_engine_it_says_what_to_install(checkpoints, tmp_path) -> None:
    with pytest.raises(MoeqError, match="vLLM is not below") as caught:
        parity(checkpoints / "gptq-int4-g32-qwen3moe", site=tmp_path)
    assert caught.value.exit_code == ExitCode.ENVIRONMENT
    assert "pip install vllm==0.33.0" in caught.value.hint


def test_functions_are_taken_out_of_files_that_cannot_be_imported(package) -> None:
    (package / "vllm" / "model_executor" / "utils.py").write_text(
        "import a_gpu_library\n\nTILE: int = 16\n\n\n"
        "@a_gpu_library.register\ndef rounded(size: a_gpu_library.Size) -> a_gpu_library.Size:\n"
        "    return helper(size, TILE)\n\n\ndef unused():\n    return a_gpu_library.run()\n"
    )
    engine = find_engine(package)
    assert engine.version == "9.8.7"
    namespace = {"helper": lambda size, tile: -(-size // tile) * tile}
    engine.load("model_executor/utils.py", ["TILE", "rounded"], namespace)
    assert namespace["rounded"](33) == 48
    assert "unused" not in namespace


def test_another_version_of_the_engine_is_refused_by_name(package, checkpoints) -> None:
    file = package / "vllm" / "model_executor" / "layers" / "quantization" / "utils" / "quant_utils.py"
    file.parent.mkdir(parents=True)
    file.write_text("def get_pack_factor(bits):\n    return 32 // bits\n")
    with pytest.raises(MoeqError, match=r"vLLM 9\.8\.7: .*does not define pack_cols, unpack_cols") as caught:
        parity(checkpoints / "gptq-int4-g32-qwen3moe", site=package)
    assert caught.value.exit_code == ExitCode.ENVIRONMENT


def test_layouts_without_an_engine_packing_are_named(package, checkpoints) -> None:
    with pytest.raises(MoeqError, match="packing of triton-wna16/1 does not run on a CPU") as caught:
        parity(checkpoints / "gptq-int4-g32-qwen3moe", site=package, layout="triton-wna16/1")
    assert caught.value.exit_code == ExitCode.ENVIRONMENT
    assert "marlin-wna16/1" in caught.value.hint
    with pytest.raises(MoeqError, match="no layout with an engine's packing holds layer 0"):
        parity(checkpoints / "gptq-int4-g32-actorder-qwen3moe", site=package)


def test_samples_are_spread_over_all_experts() -> None:
    assert sampled(4, 8) == [0, 1, 2, 3]
    assert sampled(9, 3) == [0, 4, 8]
    assert sampled(128, 1) == [0]
    assert sampled(128, 4) == [0, 42, 85, 127]


@pytest.mark.parametrize(("tp", "ranks"), [(1, [(None, 0, 128)]), (2, [(0, 0, 64), (1, 64, 128)])])
def test_every_rank_is_compared_with_the_same_sample(tp, ranks, checkpoints, tmp_path) -> None:
    deployment = Deployment(gpu=A100, tp=tp)
    source = checkpoints / "mxfp4-gptoss"
    convert(source, tmp_path / "out", deployment, layout="marlin-mxfp4/1", force_layout=True)
    wanted = [(layer, rank, (0, 2, 3), start, stop) for layer in (0, 1) for rank, start, stop in ranks]
    for found in (
        converted_units(moeq.open(tmp_path / "out"), 3),
        source_units(moeq.open(source), "marlin-mxfp4/1", tp, 3),
    ):
        units = [(one.layer, one.rank, one.experts, one.intermediate.start, one.intermediate.stop) for one in found]
        assert units == wanted


@with_vllm
@pytest.mark.parametrize(("name", "layout"), EQUAL, ids=str)
def test_bit_equal_to_the_engine(name, layout, checkpoints, tmp_path) -> None:
    convert(checkpoints / name, tmp_path / "out", Deployment(gpu=A100), layout=layout, force_layout=True)
    found = parity(tmp_path / "out", site=Path(str(SITE)), sample=4)
    assert found.equal, found
    assert {part.experts for part in found.parts} == {(0, 1, 2, 3)}
    source = parity(checkpoints / name, site=Path(str(SITE)), layout=layout)
    assert source.equal
    assert source.engine == "vLLM 0.33.0"


@with_vllm
def test_rank_by_rank(checkpoints, tmp_path) -> None:
    deployment = Deployment(gpu=A100, tp=2)
    convert(checkpoints / "mxfp4-gptoss", tmp_path / "out", deployment, layout="marlin-mxfp4/1", force_layout=True)
    found = parity(tmp_path / "out", site=Path(str(SITE)))
    assert found.equal, found
    assert {part.rank for part in found.parts} == {0, 1}


@with_vllm
@pytest.mark.parametrize("name", ["gptq-int4-g128-mixtral", "ct-int4-g128-qwen3moe"])
def test_where_the_engine_is_wrong(name, checkpoints, tmp_path) -> None:
    """The group size equals the intermediate size: vLLM 0.33.0 orders the scales of w13 as if there were one group."""
    convert(checkpoints / name, tmp_path / "out", Deployment(gpu=A100), layout="marlin-wna16/1", force_layout=True)
    found = parity(tmp_path / "out", site=Path(str(SITE)), sample=4)
    assert [(part.role, part.part, part.differing) for part in found.parts if part.differing] == [
        ("w13", "scale", (0, 1, 2, 3))
    ] * 2
    verdict = next(part.verdict for part in found.parts if part.differing)
    assert verdict.startswith("moeq is right")
    assert "128 with the intermediate size 128" in verdict


@with_vllm
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("gptq-int4-g32-qwen3moe", {("w13", "scale")}),
        ("ct-int4-asym-g32-mixtral", {("w13", "scale")}),
        ("awq-int4-g32-qwen3moe", {("w13", "scale"), ("w2", "scale")}),
    ],
)
def test_one_padded_group_per_rank(name, wrong, checkpoints, tmp_path) -> None:
    """tp 4 leaves 32 features, one group, per rank; vLLM takes that size for K where it orders scales."""
    convert(
        checkpoints / name, tmp_path / "out", Deployment(gpu=A100, tp=4), layout="marlin-wna16/1", force_layout=True
    )
    found = parity(tmp_path / "out", site=Path(str(SITE)))
    differing = [part for part in found.parts if part.differing]
    assert {(part.role, part.part) for part in differing} == wrong
    assert all("32 with the intermediate size 32 per rank" in part.verdict for part in differing)

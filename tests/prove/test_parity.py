"""Parity with an engine's own packing. `MOEQ_TEST_VLLM` names a folder that holds vLLM 0.33.0's `vllm/`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import moeq
from moeq.checkpoint.manifest import StackedRole
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import ExitCode, MoeqError
from moeq.layouts.registry import get_layout
from moeq.matrix import QuantizedMatrix
from moeq.model import Checkpoint
from moeq.model.tensor_bytes import flat_bytes
from moeq.pipeline.convert import convert
from moeq.prove.parity import ParityUnit, parity
from moeq.prove.parity import _compare as compare
from moeq.prove.parity import _converted_units as converted_units
from moeq.prove.parity import _packed as packed_parts
from moeq.prove.parity import _sampled as sampled
from moeq.prove.parity import _source_units as source_units
from moeq.prove.parity_vllm import PACKERS, EngineCode, ParityExperts, find_engine

SITE = os.environ.get("MOEQ_TEST_VLLM")
with_vllm = pytest.mark.skipif(SITE is None, reason="needs MOEQ_TEST_VLLM=<folder with vllm/>")
A100 = parse_gpu("A100")

Parts = dict[str, torch.Tensor]
Change = Callable[[str, Parts], Parts]

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
    convert(checkpoints / "gptq-int4-g32-qwen3moe", package / "out", Deployment(gpu=A100), layout="triton-wna16/1",
            force_layout=True)  # fmt: skip
    with pytest.raises(MoeqError, match="packing of triton-wna16/1 does not run on a CPU"):
        parity(package / "out", site=package)
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


def test_experts_of_a_rank_are_its_rows(checkpoints, tmp_path) -> None:
    """A rank that holds experts from 1 on has expert 2 in row 1."""
    convert(
        checkpoints / "mxfp4-gptoss", tmp_path / "out", Deployment(gpu=A100), layout="marlin-mxfp4/1", force_layout=True
    )
    opened = moeq.open(tmp_path / "out")
    unit = replace(next(converted_units(opened, 1)), experts=(2,), first=1)
    found = packed_parts(opened, unit, "w2", 2, opened.matrix(0, 2, "w2"))
    names = unit.matrices["w2"].tensors
    assert found.keys() == names.keys()
    for part, name in names.items():
        row = opened.source.read_row(opened.source.entry(name), 1)
        assert flat_bytes(found[part]).tolist() == flat_bytes(row).tolist()


class Engine:
    """An engine that packs as moeq does, but for a change of one role's parts; it keeps what it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, layout: str, change: Change = lambda role, parts: parts):
        self.given: list[ParityExperts] = []
        self.layout, self.change = get_layout(layout), change
        monkeypatch.setitem(PACKERS, layout, self)

    def __call__(self, engine: EngineCode, experts: ParityExperts) -> dict[str, Parts]:
        self.given.append(experts)
        found = {}
        for role, matrices in experts.padded.items():
            packed = [self.layout.pack(matrix) for matrix in matrices]
            stacks = {part: torch.stack([row[part] for row in packed]) for part in packed[0]}
            found[role] = self.change(role, stacks)
        return found


def flipped(role: str, part: str, index: int) -> Change:
    """Change the last byte of a part of one expert."""

    def change(found: str, parts: Parts) -> Parts:
        if found == role:
            flat_bytes(parts[part][index])[-1] ^= 1
        return parts

    return change


def replaced(part: str, by: Callable[[torch.Tensor], torch.Tensor | None]) -> Change:
    """Replace a part of w2; by None, leave it out."""

    def change(role: str, parts: Parts) -> Parts:
        found = {**parts, part: by(parts[part])} if role == "w2" else parts
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    return change


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("sample", [1, 3])
@pytest.mark.parametrize("converted", [True, False])
def test_equal_bytes(sample, converted, package, checkpoints, tmp_path, monkeypatch) -> None:
    engine, source, seen = Engine(monkeypatch, "marlin-wna16/1"), checkpoints / "awq-int4-g32-qwen3moe", []
    if converted:
        convert(source, tmp_path / "out", Deployment(gpu=A100), layout="marlin-wna16/1", force_layout=True)
    asked = tmp_path / "out" if converted else source
    found = parity(asked, site=package, sample=sample, progress=lambda *step: seen.append(step))
    assert found.equal, found
    assert (found.checkpoint, found.engine, found.layout) == (str(asked), "vLLM 9.8.7", ("marlin-wna16/1",))
    parts = [(part.layer, part.role, part.part) for part in found.parts]
    kinds = ("weight", "scale", "zero")
    assert parts == [(layer, role, part) for layer in (0, 1) for role in ("w13", "w2") for part in kinds]
    assert {part.experts for part in found.parts} == {(0,) if sample == 1 else (0, 2, 3)}
    assert seen == [(1, 2, "layer 0"), (2, 2, "layer 1")]
    assert {(one.awq, one.group_size, one.interleaved, len(one.w2)) for one in engine.given} == {
        (True, 32, False, sample)
    }
    assert found.to_json()["parts"][0]["differing"] == ()
    assert not replace(found, parts=()).equal


def test_what_the_engine_is_given(package, checkpoints, monkeypatch) -> None:
    engine = Engine(monkeypatch, "marlin-mxfp4-interleaved/1")
    assert parity(checkpoints / "mxfp4-gptoss", site=package, layout="marlin-mxfp4-interleaved/1").equal
    assert {(one.awq, one.group_size, one.interleaved) for one in engine.given} == {(False, 32, True)}


@pytest.mark.parametrize(
    ("change", "part", "differing", "verdict"),
    [
        (flipped("w2", "weight", 1), ("w2", "weight"), (2,), "moeq is right: .* values, the engine's do not"),
        (flipped("w13", "scale", 0), ("w13", "scale"), (0,), "moeq is right: .* values, the engine's do not"),
        (replaced("scale", lambda t: None), ("w2", "scale"), (0, 2, 3), r"another size \(absent, here \[4, 256\]\)"),
        (replaced("scale", lambda t: torch.cat([t, t], 1)), ("w2", "scale"), (0, 2, 3), r"another size \(\[8, 256\]"),
        (replaced("scale", lambda t: t.view(torch.uint8)), None, None, None),
    ],
)
def test_different_bytes(change, part, differing, verdict, package, checkpoints, monkeypatch) -> None:
    Engine(monkeypatch, "marlin-wna16/1", change)
    found = parity(checkpoints / "gptq-int4-g32-qwen3moe", site=package, sample=3)
    assert found.equal is (part is None)
    for row in found.parts:
        if (row.role, row.part) == part:
            assert row.differing == differing
            assert re.search(verdict, row.verdict)
        else:
            assert (row.differing, row.verdict) == ((), None)


def test_bytes_that_no_kernel_reads(package, checkpoints, tmp_path, monkeypatch) -> None:
    """A rank has one group, which triton-kernels pads to four: what lies there makes neither side wrong."""
    layout, out = "triton-kernels-hopper/1", tmp_path / "out"
    convert(checkpoints / "ct-mxfp4-qwen3moe", out, Deployment(gpu=A100, tp=4), layout=layout, force_layout=True)
    Engine(monkeypatch, layout, flipped("w2", "scale", 1))
    found = parity(out, site=package, sample=3)
    assert not found.equal
    differing = [row for row in found.parts if row.differing]
    assert {(row.role, row.part, row.differing) for row in differing} == {("w2", "scale", (2,))}
    assert {row.verdict for row in differing} == {"both are right: the kernel reads the same values from both"}


@pytest.mark.parametrize(("role", "advisory"), [("w13", True), ("w2", False)])
def test_scales_of_a_rank_with_one_group(role, advisory, package, checkpoints, monkeypatch) -> None:
    Engine(monkeypatch, "marlin-wna16/1", flipped(role, "scale", 0))
    found = parity(checkpoints / "gptq-int4-g128-mixtral", site=package)
    row = next(row for row in found.parts if row.differing)
    groups = "compares the group size 128 with the intermediate size 128" in row.verdict
    assert (groups, "marlin-w13-scale-order" in row.verdict) == (advisory, advisory)  # w2 has one group


def test_bytes_of_moeq_that_are_wrong(package, checkpoints, monkeypatch) -> None:
    Engine(monkeypatch, "marlin-wna16/1")
    source = moeq.open(checkpoints / "gptq-int4-g32-qwen3moe")
    unit = next(source_units(source, "marlin-wna16/1", 1, 2))

    def packed(
        checkpoint: Checkpoint, unit: ParityUnit, role: StackedRole, expert: int, padded: QuantizedMatrix
    ) -> Mapping[str, torch.Tensor]:
        parts = dict(unit.layout.pack(padded))
        if (role, expert) == ("w2", 3):
            flat_bytes(parts["weight"])[0] ^= 1
        return parts

    monkeypatch.setattr("moeq.prove.parity._packed", packed)
    found = compare(find_engine(package), source, unit)
    (row,) = [row for row in found if row.differing]
    assert (row.layer, row.role, row.part, row.differing) == (0, "w2", "weight", (3,))
    assert row.verdict == "moeq is wrong: its bytes do not unpack to the source's values"


def test_an_engine_whose_packing_fails(package, checkpoints, monkeypatch) -> None:
    def fail(role: str, parts: Parts) -> Parts:
        raise ValueError("no such shape")

    Engine(monkeypatch, "marlin-wna16/1", fail)
    with pytest.raises(MoeqError, match=r"vLLM 9\.8\.7's own packing of layer 0 fails: ValueError: no such") as caught:
        parity(checkpoints / "gptq-int4-g32-qwen3moe", site=package)
    assert caught.value.code == "environment.engine-code"


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

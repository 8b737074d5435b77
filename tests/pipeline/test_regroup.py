"""`--regroup`: groups cut into smaller ones that repeat scale and zero point; the same values, and the way back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import moeq
from moeq.checkpoint.manifest import read_manifest
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.layouts import words
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.model.regroup import regroup, regroup_problem, ungroup
from moeq.prove.restore import restore
from moeq.prove.verify import verify

A100 = parse_gpu("A100")


def any_matrix(generator: torch.Generator, k: int, group: int, *, zeros: bool) -> QuantizedMatrix:
    groups, n = -(-k // group), 8
    spec = MatrixSpec("w2", n, k, "int4", group, "f16", symmetric=not zeros)
    codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    scales = torch.rand(n, groups, generator=generator).to(torch.float16)
    points = torch.randint(0, 16, (n, groups), generator=generator, dtype=torch.uint8) if zeros else None
    return QuantizedMatrix(spec, codes, scales, points)


def values(matrix: QuantizedMatrix) -> torch.Tensor:
    """Dequantised column by column, by hand."""
    columns = []
    for column in range(matrix.spec.k):
        at = column // matrix.spec.group_size
        zero = 8 if matrix.zeros is None else matrix.zeros[:, at].float()
        columns.append(matrix.scales[:, at].float() * (matrix.codes[:, column].float() - zero))
    return torch.stack(columns, dim=1)


@pytest.fixture(params=["reference", "fast"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both paths; these matrices are too small for the fast one otherwise."""
    if request.param == "fast":
        pytest.importorskip("numba")
        monkeypatch.setattr(words, "COMPILED_FROM", 0)


@pytest.mark.cover(every=2)
def test_random_matrices_keep_their_values_and_come_back() -> None:
    generator = torch.Generator().manual_seed(20261122)
    for group, small in ((128, 64), (128, 32), (64, 32), (96, 32), (128, 16)):
        for k in (group * 2, group * 3 + small, group * 2 + 8):  # with a partial last group too
            for zeros in (False, True):
                before = any_matrix(generator, k, group, zeros=zeros)
                after = regroup(before, small)
                assert after.spec.group_size == small
                assert after.scales.shape == (8, after.spec.num_groups)
                assert torch.equal(values(before), values(after))
                back = ungroup(after, group)
                assert back.spec == before.spec
                assert torch.equal(back.scales, before.scales)
                assert before.zeros is None or torch.equal(back.zeros, before.zeros)


def test_a_group_whose_parts_disagree_is_damage() -> None:
    after = regroup(any_matrix(torch.Generator().manual_seed(0), 256, 128, zeros=False), 64)
    after.scales[3, 1] += 1
    with pytest.raises(MoeqError) as caught:
        ungroup(after, 128)
    assert caught.value.code == "source.regrouped"


@pytest.mark.parametrize(
    ("spec", "group", "why"),
    [
        (MatrixSpec("w2", 8, 256, "int4", 128, "f16", act_order=True), 64, "act-order"),
        (MatrixSpec("w2", 8, 256, "int4", 256, "f16"), 64, "one scale per output channel"),
        (MatrixSpec("w2", 8, 256, "e2m1", 32, "e8m0"), 16, "fixes groups of 32"),
        (MatrixSpec("w2", 8, 256, "int4", 128, "f16"), 48, "do not consist of groups of 48"),
        (MatrixSpec("w2", 8, 256, "int4", 64, "f16"), 128, "do not consist of groups of 128"),
    ],
)
def test_what_cannot_be_regrouped(spec: MatrixSpec, group: int, why: str) -> None:
    assert why in str(regroup_problem(spec, group))


@pytest.mark.cover
@pytest.mark.parametrize("name", ["gptq-int8-g64-qwen3moe", "ct-int4-g128-qwen3moe"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_conversion_with_smaller_groups(name: str, tp: int, checkpoints: Path, tmp_path: Path) -> None:
    """Written, verified against the source, restored byte for byte; what the packed bytes mean is the source's."""
    source, out, back = checkpoints / name, tmp_path / "out", tmp_path / "back"
    if name.startswith("ct-int4-g128"):  # I = 128: down has a single group, which cannot be divided
        with pytest.raises(MoeqError, match="one scale per output channel"):
            moeq.convert(source, out, Deployment(A100, tp=tp), regroup=64, force_layout=True)
        return
    moeq.convert(source, out, Deployment(A100, tp=tp), regroup=32)
    manifest = read_manifest(out)
    assert {entry.source_group for entry in manifest.layers} == {64}
    assert {entry.matrices["w2"].spec.group_size for entry in manifest.layers} == {32}
    found = verify(out, source)
    assert found.ok, found.mismatches
    checkpoint, converted = moeq.open(source), moeq.open(out)
    for projection in ("gate", "up", "down"):
        ours, theirs = (one.dequantize(1, 2, projection) for one in (converted, checkpoint))  # type: ignore[arg-type]
        assert torch.equal(ours, theirs)
    restore(out, back)
    for path in source.iterdir():
        assert (back / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.cover(every=2)
def test_groups_that_a_shard_would_cut(checkpoints: Path, tmp_path: Path) -> None:
    """int8 g64, I = 128, tp 4: 32 per rank cuts groups of 64, and holds whole groups of 32."""
    source = checkpoints / "gptq-int8-g64-qwen3moe"
    where = Deployment(A100, tp=4, engine="moeq")
    with pytest.raises(MoeqError) as caught:
        moeq.convert(source, tmp_path / "out", where)
    assert "regroup=32" in str(caught.value.hint)
    moeq.convert(source, tmp_path / "out", where, regroup=32)
    assert verify(tmp_path / "out", source).ok
    for rank in range(4):
        experts = moeq.load_experts(tmp_path / "out", 0, tp_rank=rank, tp_size=4)
        assert experts.w2.group_size == 32


def test_a_damaged_group_is_found(checkpoints: Path, tmp_path: Path) -> None:
    source = checkpoints / "gptq-int8-g64-qwen3moe"
    moeq.convert(source, tmp_path / "out", Deployment(A100), regroup=32)
    path = tmp_path / "out" / "moeq.json"
    document = json.loads(path.read_text())
    document["layers"][0]["source_group"] = 48
    path.write_text(json.dumps(document))
    with pytest.raises(MoeqError) as caught:
        moeq.open(tmp_path / "out")
    assert caught.value.code == "source.bad-manifest"

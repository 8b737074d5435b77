"""What a transcoding writes, from headers alone: files, names, units of work, places, and the name of the job."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint.builder import HIDDEN, Stored, Tensors, config, experts, gptq, quantization, router, write
from gguf_files import write_model
from refusing import refuses

from moeq.matrix import MatrixSpec
from moeq.model import open as open_checkpoint
from moeq.transcode import transcode_plan
from moeq.transcode.survey import TranscodeRequest
from moeq.transcode.transcode_plan import (
    ExpertItem,
    ModuleItem,
    TranscodePlan,
    TranscodeUnit,
    _require_distinct,
    item_specs,
    make_transcode_plan,
)

ATTENTION = tuple(f"model.layers.0.self_attn.{name}_proj" for name in ("q", "k", "v", "o"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two experts, four quantised modules of attention, and three tensors that are copied."""
    tensors: Tensors = {**router(), **experts()}
    for name in ATTENTION:
        tensors |= {f"{name}.{part}": stored for part, stored in gptq(64, HIDDEN).items()}
    tensors["model.norm.weight"] = Stored("BF16", (HIDDEN,))
    tensors["lm_head.weight"] = Stored("BF16", (16, HIDDEN))
    return write(tmp_path_factory.mktemp("plan"), tensors, config(quantization_config=quantization()))


def planned(source: Path, to: str = "compressed-tensors", **asked: Any) -> TranscodePlan:
    return make_transcode_plan(open_checkpoint(source), TranscodeRequest(str(source), to, **asked))


def items_of(plan: TranscodePlan) -> dict[str, tuple[Any, ...]]:
    return {unit.id: unit.items for unit in plan.units if isinstance(unit, TranscodeUnit)}


def test_files_and_units(source: Path) -> None:
    plan = planned(source)
    copied, modules, layer = plan.files
    assert [file.name for file in plan.files] == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert list(copied.tensors) == ["model.layers.0.mlp.gate.weight", "model.norm.weight", "lm_head.weight"]
    assert set(modules.tensors) == {
        f"{name}.{part}" for name in ATTENTION for part in ("weight_packed", "weight_scale", "weight_shape")
    }
    assert len(layer.tensors) == 2 * 3 * 3
    assert items_of(plan) == {
        f"modules/{ATTENTION[0]}": tuple(map(ModuleItem, ATTENTION)),
        "layer-0/w13": (ExpertItem(0, 0, "w13"), ExpertItem(0, 1, "w13")),
        "layer-0/w2": (ExpertItem(0, 0, "w2"), ExpertItem(0, 1, "w2")),
    }
    checkpoint = open_checkpoint(source)
    consumed = [entry for name, entry in checkpoint.source.tensors.items() if ".experts." in name or "attn" in name]
    assert plan.expert_bytes_in == sum(entry.nbytes for entry in consumed)
    for unit in plan.units:
        if isinstance(unit, TranscodeUnit):
            assert unit.padding_bytes == 0
            assert sum(stop - start for start, stop in unit.places) == unit.bytes_out
    assert sum(unit.bytes_in for unit in plan.units if isinstance(unit, TranscodeUnit)) == plan.expert_bytes_in
    pieces = list(plan.units[-1].pieces(layer.form, None))
    assert [piece.tensor for piece in pieces] == [
        f"model.layers.0.mlp.experts.{expert}.down_proj.{part}"
        for expert in (0, 1)
        for part in ("weight_packed", "weight_scale", "weight_shape")
    ]
    for piece in pieces:
        assert (piece.start, piece.stop) == layer.form.ranges[piece.tensor]


@pytest.mark.parametrize(("most", "counts"), [(2, [2, 2]), (1, [1, 1, 1, 1]), (3, [3, 1]), (4, [4]), (0, [1] * 4)])
def test_modules_are_cut_into_units(
    source: Path, monkeypatch: pytest.MonkeyPatch, most: int, counts: list[int]
) -> None:
    """A unit is as large as it may be, except where one module alone is larger."""
    nbytes = 64 * HIDDEN // 2 + 64 * (HIDDEN // 32) * 2 + 16
    monkeypatch.setattr(transcode_plan, "_UNIT_BYTES", most * nbytes)
    found = {name: items for name, items in items_of(planned(source)).items() if name.startswith("modules/")}
    assert [len(items) for items in found.values()] == counts
    assert [item.name for items in found.values() for item in items] == list(ATTENTION)
    assert list(found) == [f"modules/{items[0].name}" for items in found.values()]


@pytest.mark.parametrize(
    ("rows", "expected"), [(64, [None]), (63, [(0, 63), (63, 64)]), (24, [(0, 24), (24, 48), (48, 64)]), (0, 64)]
)
def test_large_modules_are_decoded_row_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, expected: Any
) -> None:
    """Only where GGUF's blocks become floats: other rows may share scales, or codes a word."""
    made = write_model(tmp_path / "m.gguf", layers=1, experts=2, hidden=256, expert_type="q8_0", other_type="q8_0")
    monkeypatch.setattr(transcode_plan, "_ITEM_NUMBERS", 256 * rows)
    plan = planned(made, "fp8", allow_lossy=True)
    items = [item for some in items_of(plan).values() for item in some if isinstance(item, ModuleItem)]
    embedding = [item.rows for item in items if item.name == "model.embed_tokens"]
    assert embedding == ([(row, row + 1) for row in range(64)] if expected == 64 else expected)
    coded = [item.rows for item in items if "self_attn" in item.name]
    assert coded == [None] * 4


def test_some_rows_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = write_model(tmp_path / "m.gguf", layers=1, experts=2, hidden=256, expert_type="q8_0", other_type="q8_0")
    monkeypatch.setattr(transcode_plan, "_ITEM_NUMBERS", 256 * 24)
    plan = planned(made, "bf16", allow_lossy=True)
    form = next(file.form for file in plan.files if "model.embed_tokens.weight" in file.tensors)
    start, _ = form.ranges["model.embed_tokens.weight"]
    found = plan.outputs(ModuleItem("model.embed_tokens", (24, 40)), form)["down"]
    assert found.module == "model.embed_tokens rows 24..39"
    assert found.places == {"weight": (start + 24 * 512, start + 40 * 512)}
    assert (found.described.spec.n, found.projected.spec.n, found.projected.source.spec.n) == (16, 16, 16)
    assert found.signatures["weight"].shape == (16, 256)
    assert [spec.n for spec in item_specs(plan, ModuleItem("model.embed_tokens", (24, 40)))] == [16]
    assert [spec.n for spec in item_specs(plan, ModuleItem("model.embed_tokens"))] == [64]
    whole = plan.outputs(ModuleItem("model.embed_tokens"), form)["down"]
    assert (whole.module, whole.places) == ("model.embed_tokens", {"weight": (start, start + 64 * 512)})


@pytest.mark.parametrize("names", ["source", "stacked"])
def test_places_of_experts(source: Path, names: Any) -> None:
    """Rows of a stack follow each other; its shape is written by the first expert alone."""
    plan = planned(source, names=names)
    form = plan.files[-1].form
    prefix = "model.layers.0.mlp.experts"
    for expert in (0, 1):
        found = plan.outputs(ExpertItem(0, expert, "w2"), form)["down"]
        if names == "source":
            assert found.module == f"{prefix}.{expert}.down_proj"
            assert found.places == {part: form.ranges[f"{found.module}.{part}"] for part in found.signatures}
            continue
        assert found.module == f"{prefix}.down_proj"
        start, stop = form.ranges[f"{prefix}.down_proj_packed"]
        size = (stop - start) // 2
        assert found.places["weight_packed"] == (start + expert * size, start + expert * size + size)
        shape = {"weight_shape": form.ranges[f"{prefix}.down_proj_shape"]} if expert == 0 else {}
        assert {part: place for part, place in found.places.items() if part == "weight_shape"} == shape
    specs = item_specs(plan, ExpertItem(0, 1, "w13"))
    assert [(spec.role, spec.n) for spec in specs] == (
        [("w13", 64)] if names == "stacked" else [("gate", 32), ("up", 32)]
    )
    if names == "stacked":
        assert plan.files[-1].tensors[f"{prefix}.down_proj_shape"] == ((3,), "I64")
        assert plan.files[-1].tensors[f"{prefix}.down_proj_packed"] == ((2, 64, 4), "I32")
        assert len(plan.files[-1].tensors) == 6


def test_two_tensors_cannot_have_one_name() -> None:
    _require_distinct(["a", "b"])
    with refuses("usage.names", "two tensors would be called b", 'names="source" keeps names'):
        _require_distinct(iter(["a", "b", "c", "b"]))


def test_the_name_of_a_job_depends_on_all_of_it(source: Path, checkpoints: Path) -> None:
    """Except on where the source lies."""
    first = planned(source)
    same = make_transcode_plan(open_checkpoint(source), replace(first.request, src="elsewhere"))
    assert same.digest == first.digest
    changes = {"to": "gptq", "regroup": 16, "names": "per-expert", "allow_lossy": True, "sort_act_order": True}
    changes |= {"numa": 1, "revision": "main"}
    assert set(changes) | {"src"} == {field.name for field in fields(TranscodeRequest)}
    digests = [planned(source, **{"to": "compressed-tensors", key: value}).digest for key, value in changes.items()]
    assert len({first.digest, *digests}) == 1 + len(changes)
    assert planned(checkpoints / "gptq-int4-g32-qwen3moe").digest not in digests


def test_scales_of_a_key_value_cache_are_kept(tmp_path: Path) -> None:
    """Only between configs of compressed-tensors, which say how they are to be read."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    table = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "kv_cache_scheme": {"num_bits": 8},
    }

    def packed(n: int, k: int) -> Tensors:
        return {
            "weight_packed": Stored("I32", (n, k // 8)),
            "weight_scale": Stored("BF16", (n, k // 32)),
            "weight_shape": Stored("I64", (2,)),
        }

    made = write(tmp_path, {**router(), **experts(make=packed)}, config(quantization_config=table))
    kept = planned(made)
    assert kept.config is not None
    assert kept.config["kv_cache_scheme"] == {"num_bits": 8}
    other = planned(made, "gptq_v2")
    assert other.config is not None
    assert "kv_cache_scheme" not in other.config
    assert planned(made, "bf16", allow_lossy=True).config is None


def test_parts_of_a_matrix(source: Path) -> None:
    """All except the static scale of its activations."""
    plan = planned(source)
    output = plan.outputs(ModuleItem(ATTENTION[0]), plan.files[1].form)["down"]
    assert output.packed == output.signatures
    spec = output.described.spec
    assert spec == MatrixSpec("down", 64, HIDDEN, "int4", 32, "f16")

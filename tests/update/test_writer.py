"""Experts written in place: the bytes of a fresh conversion of the updated checkpoint."""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from layouts.pairs import DEPLOYMENT
from refusing import refuses
from update.marks import PAIRS, written_kinds
from update.updates import Experts, Span, changes, cut, write

import moeq
from moeq.errors import MoeqError
from moeq.pipeline.convert import convert
from moeq.update.layers import WritableLayer
from moeq.update.writer import pack as pack_matrix

REFUSALS = ("usage.shared-tensor", "usage.scales-not-shared", "answer.lossy")

#: Weights of an expert's gate or up.
ONES = torch.ones(128, 256, dtype=torch.float16)


def layers_of(folder: Path) -> dict[int, WritableLayer]:
    checkpoint = moeq.open(folder)
    return {entry.layer: moeq.writable_layer(checkpoint, entry.layer) for entry in checkpoint.manifest.layers}


def same_bytes(one: WritableLayer, other: WritableLayer) -> list[str]:
    return [
        f"layer {one.layer} {role}_{part}"
        for role in ("w13", "w2")
        for part, tensor in one.tensors[role].items()
        if not torch.equal(tensor.view(-1).view(torch.uint8), other.tensors[role][part].view(-1).view(torch.uint8))
    ]


def pack(source: Path, out: Path, layout: str) -> Path:
    convert(source, out, DEPLOYMENT, layout=layout, force_layout=True, allow_lossy=True)
    return out


def sizes_of(layer: WritableLayer) -> dict[str, Span]:
    """Rows and columns of an expert's projections."""
    w13, w2 = layer.specs["w13"], layer.specs["w2"]
    return {"gate": (w13.n // 2, w13.k), "up": (w13.n // 2, w13.k), "down": (w2.n, w2.k)}


def run(source: Path, layout: str, tmp_path: Path, seed: int, count: int) -> tuple[Counter[str], Counter[str]]:
    """Write random experts and slices, then compare with a fresh conversion.

    Returns the numbers of those that were written and refused, by kind.
    """
    experts = Experts.read(source)
    layers = layers_of(pack(source, tmp_path / "before", layout))
    writer, sizes = moeq.Writer(layers.values(), DEPLOYMENT), sizes_of(layers[0])
    addresses = {n: t.data_ptr() for layer in writer.layers.values() for n, t in layer.tensors["w13"].items()}
    written, refused = Counter[str](), Counter[str]()
    for change in changes(experts, sizes, seed, count):
        before, spans = writer.digest(change.layer), {"rows": change.rows, "columns": change.columns}
        try:
            found = writer.update(change.layer, change.expert, *change.target, **spans, expected=before)
        except MoeqError as error:
            if error.code not in REFUSALS:
                raise
            assert writer.digest(change.layer) == before
            refused[change.kind] += 1
            continue
        write(experts, sizes, change)
        written[change.kind] += 1
        assert found.digest == writer.digest(change.layer)
    fresh = layers_of(pack(experts.save(tmp_path / "source"), tmp_path / "after", layout))
    for number, layer in writer.layers.items():
        assert same_bytes(layer, fresh[number]) == []
        assert moeq.snapshot(layer) == writer.digest(number) == moeq.Writer([fresh[number]]).digest(number)
    assert addresses == {n: t.data_ptr() for layer in writer.layers.values() for n, t in layer.tensors["w13"].items()}
    return written, refused


@pytest.mark.cover(every=52)
@pytest.mark.parametrize(("name", "layout"), PAIRS, ids=str)
def test_updates_equal_a_fresh_conversion(name, layout, checkpoints, tmp_path) -> None:
    _, refused = run(checkpoints / name, layout, tmp_path, seed=zlib.crc32(f"{name} {layout}".encode()), count=8)
    assert refused.keys().isdisjoint(written_kinds(name, layout))


@pytest.mark.parametrize(
    "count", [pytest.param(125, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.night)]
)
@pytest.mark.parametrize(("name", "layout"), PAIRS, ids=str)
def test_many_updates_equal_a_fresh_conversion(name, layout, count, checkpoints, tmp_path) -> None:
    written, refused = run(checkpoints / name, layout, tmp_path, seed=1, count=count)
    claimed = written_kinds(name, layout)
    assert refused.keys().isdisjoint(claimed), "docs/reference/update-matrix.md says that these are written"
    assert claimed <= written.keys() | {"block"}, "some sizes have slices of rows and of columns, but not of both"


@pytest.fixture(scope="module")
def gptq(converted, checkpoints) -> tuple[Experts, Path]:
    name = "gptq-int4-g32-qwen3moe"
    return Experts.read(checkpoints / name), converted[name]


def test_slices_of_rows_and_columns_are_written_in_place(gptq) -> None:
    experts, folder = gptq
    layers, sliced = layers_of(folder), layers_of(folder)
    whole, writer = moeq.Writer(layers.values()), moeq.Writer(sliced.values())
    parts = experts.parts(0, 1, "down")
    n, k = parts["scales"].shape[1], parts["qweight"].shape[0] * 8
    whole.update(0, 0, "down", parts)
    # Scales are of one row each: blocks of rows need not be as tall as groups are wide.
    edges = [*range(0, 32, 8), *range(32, n + 1, 32)]
    for start, stop in pairwise(edges):
        rows = slice(start, stop)
        for left in range(0, k, 64):
            words, groups = slice(left // 8, left // 8 + 8), slice(left // 32, left // 32 + 2)
            cut = {
                "qweight": parts["qweight"][words, rows],
                "scales": parts["scales"][groups, rows],
                "qzeros": parts["qzeros"][groups, start // 8 : stop // 8],
            }
            writer.update(0, 0, "down", cut, rows=(start, stop), columns=(left, left + 64))
    assert same_bytes(layers[0], sliced[0]) == []
    assert whole.digest(0) == writer.digest(0) == moeq.snapshot(sliced[0])


@pytest.mark.parametrize(
    ("name", "layout", "rows", "columns", "code", "text"),
    [
        ("ct-w8a8-qwen3moe", "int8-w8a8/1", None, (0, 64), "usage.shared-tensor", "all columns of a row"),
        ("gptq-int4-g32-actorder-qwen3moe", "marlin-act-order/1", (0, 64), None, "usage.shared-tensor", "act-order"),
        ("ct-fp8-tensor-qwen3moe", "marlin-fp8/1", (0, 64), None, "usage.shared-tensor", "the whole matrix"),
        ("ct-nvfp4-qwen3moe", "flashinfer-b12x-nvfp4/1", (0, 64), None, "usage.shared-tensor", "weights that stay"),
        ("ct-fp8-block-qwen3moe", "marlin-fp8/1", (0, 64), None, "usage.illegal-slice", "64 % 128 = 64"),
        ("ct-mxfp4-qwen3moe", "marlin-mxfp4/1", None, (32, 48), "usage.illegal-slice", "48 % 32 = 16"),
        (
            "ct-mxfp8-qwen3moe",
            "marlin-mxfp8/1",
            None,
            (32, 128),
            "usage.illegal-slice",
            "columns 32 .. 128 are empty or outside 0 .. 64",
        ),
    ],
    ids=str,
)
def test_slices_that_share_numbers_with_the_rest_are_refused(
    name, layout, rows, columns, code, text, checkpoints, tmp_path
) -> None:
    experts, folder = Experts.read(checkpoints / name), pack(checkpoints / name, tmp_path / "out", layout)
    layers, kept = layers_of(folder), layers_of(folder)
    parts = cut(experts.parts(0, 1, "down"), sizes_of(layers[0])["down"], rows, columns)
    with pytest.raises(MoeqError) as caught:
        moeq.Writer(layers.values()).update(0, 0, "down", parts, rows=rows, columns=columns)
    assert (caught.value.code, text in caught.value.message) == (code, True), caught.value.message
    assert caught.value.hint or "outside" in text
    assert same_bytes(layers[0], kept[0]) == []


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"layer": 7}, "usage.no-such-layer", "no layer 7"),
        ({"expert": 99}, "usage.no-such-expert", "not 99"),
        ({"expert": -1}, "usage.no-such-expert", "not -1"),
        ({"expert": True}, "usage.no-such-expert", "not True"),
        ({"projection": "gates"}, "usage.no-such-projection", "'gates'"),
        ({"expected": "0" * 64}, "usage.stale-digest", "000000"),
        ({"columns": (16, 64)}, "usage.illegal-slice", "16 % 32 = 16"),
        ({"rows": (0, 1 << 20)}, "usage.illegal-slice", "0 .. 1048576"),
        ({"projection": "w13", "rows": (0, 32)}, "usage.illegal-slice", "one projection, not 'w13'"),
        ({"projection": "w13", "tensors": torch.ones(2)}, "usage.update-tensors", "the tensors of gate and up"),
        ({"projection": "w13", "tensors": {"gate": ONES}}, "usage.update-tensors", "the tensors of gate and up"),
        (
            {"projection": "w13", "tensors": {"gate": ONES, "up": ONES, "down": ONES}},
            "usage.update-tensors",
            "the tensors of gate and up",
        ),
        ({"rows": (0, 12)}, "usage.update-tensors", "[256, 128]"),
        ({"rows": (64, 32)}, "usage.illegal-slice", "64 .. 32"),
        ({"tensors": {}}, "usage.update-tensors", "these tensors are nothing"),
        ({"tensors": None}, "usage.update-tensors", "not NoneType"),
        ({"tensors": torch.zeros(3, 5, dtype=torch.bfloat16)}, "usage.update-tensors", "[3, 5]"),
        ({"tensors": torch.full((256, 128), float("nan"), dtype=torch.float16)}, "source.bad-data", "nan"),
    ],
    ids=str,
)
def test_hostile_updates_are_refused_and_write_nothing(change, code, text, gptq) -> None:
    experts, folder = gptq
    layers, kept = layers_of(folder), layers_of(folder)
    writer = moeq.Writer(layers.values())
    asked = {"layer": 0, "expert": 0, "projection": "down", "tensors": experts.parts(0, 1, "down")} | change
    with pytest.raises(MoeqError) as caught:
        writer.update(**asked)
    assert caught.value.code == code
    assert text in caught.value.message
    assert same_bytes(layers[0], kept[0]) == []


def test_a_layer_that_is_not_the_expected_one_is_left_alone(gptq) -> None:
    layers = layers_of(gptq[1])
    writer, spec = moeq.Writer(layers.values()), layers[0].specs["w2"]
    text = f"layer 0 has digest {writer.digest(0)[:16]}..., the update expects 0123456789012345..."
    hint = "an earlier update is missing or was written twice: send the whole layer"
    for given in (torch.zeros(4, spec.n, spec.k), None):
        with refuses("usage.stale-digest", text, hint):
            if given is None:
                writer.update_expert(0, 0, {}, expected="0123456789" * 6)
            else:
                writer.update_layer(0, "down", given, expected="0123456789" * 6)
    with refuses("usage.no-such-layer", "this writer has no layer 7", "its layers: 0, 1"):
        writer.update_layer(7, "down", torch.zeros(1))
    with refuses("usage.no-such-expert", "layer 0 has experts 0 to 3, not 4"):
        writer.update_expert(0, 4, {})


@pytest.mark.parametrize("part", ["qweight", "scales", "qzeros"])
def test_parts_of_other_shapes_and_dtypes_are_refused(part, gptq) -> None:
    experts, folder = gptq
    writer = moeq.Writer(layers_of(folder).values())
    parts = experts.parts(0, 1, "down")
    for tensor in (parts[part][:-1], parts[part].to(torch.int64), parts[part].reshape(-1)):
        with pytest.raises(MoeqError) as caught:
            writer.update(0, 0, "down", parts | {part: tensor})
        assert caught.value.code == "usage.update-tensors", caught.value


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers_are_refused_and_write_nothing(number, gptq) -> None:
    experts, folder = gptq
    layers, kept = layers_of(folder), layers_of(folder)
    writer = moeq.Writer(layers.values())
    parts, before = experts.parts(0, 1, "down"), writer.digest(0)
    scales = parts["scales"].clone()
    scales[1, 3] = number
    with pytest.raises(MoeqError) as caught:
        writer.update(0, 0, "down", parts | {"scales": scales})
    assert caught.value.code == "source.bad-data"
    assert same_bytes(layers[0], kept[0]) == []
    assert writer.digest(0) == before


@pytest.mark.parametrize("names", [["down"], ["gate", "up", "down"]], ids=["projection", "expert"])
def test_a_copy_that_fails_leaves_the_old_expert(names, gptq, monkeypatch) -> None:
    """The last copy of all fails, after those of other parts and of the other matrix."""
    experts, folder = gptq
    layers, kept = layers_of(folder), layers_of(folder)
    writer = moeq.Writer(layers.values())

    def last_part_cut(layer: object, layout: object, role: str, matrix: object) -> tuple[object, object, int]:
        packed, held, losses = pack_matrix(layer, layout, role, matrix)
        *_, last = packed
        return packed | ({last: packed[last][:-1]} if role == "w2" else {}), held, losses

    before = writer.digest(0)
    monkeypatch.setattr("moeq.update.writer.pack", last_part_cut)
    with pytest.raises(RuntimeError, match="size"):
        writer.update_expert(0, 0, {name: experts.parts(0, 1, name) for name in names})
    assert same_bytes(layers[0], kept[0]) == []
    assert writer.digest(0) == before


def test_projections_of_an_expert_are_written_together_or_not_at_all(gptq) -> None:
    experts, folder = gptq
    layers, kept = layers_of(folder), layers_of(folder)
    writer, single = moeq.Writer(layers.values()), moeq.Writer(layers_of(folder).values())
    new = {name: experts.parts(1, 3, name) for name in ("gate", "up", "down")}
    with pytest.raises(MoeqError, match="given twice"):
        writer.update_expert(0, 0, new | {"w2": new["down"]})
    with pytest.raises(MoeqError, match="scales are not finite"):
        writer.update_expert(0, 0, new | {"down": new["down"] | {"scales": new["down"]["scales"] * float("inf")}})
    assert same_bytes(layers[0], kept[0]) == []
    assert writer.update_expert(0, 0, {}).written_bytes == 0
    done = writer.update_expert(0, 0, new)
    parts = [
        single.update(0, 0, "w13", {name: new[name] for name in ("gate", "up")}),
        single.update(0, 0, "down", new["down"]),
    ]
    assert done.projections == parts[0].projections | parts[1].projections
    assert done.written_bytes == sum(one.written_bytes for one in parts)
    assert done.digest == single.digest(0) == moeq.snapshot(layers[0])


def test_an_update_of_a_layer_that_ends_early_says_which_experts_are_new(checkpoints, tmp_path) -> None:
    folder = pack(checkpoints / "modelopt-nvfp4-qwen3moe", tmp_path / "out", "marlin-nvfp4/1")
    layers, kept = layers_of(folder), layers_of(folder)
    spec = layers[0].specs["w2"]
    weights = torch.randn(len(layers[0].experts), spec.n, spec.k, generator=torch.Generator().manual_seed(0)).bfloat16()
    bad = weights.clone()
    bad[1, 0, 0] = float("inf")
    writer = moeq.Writer(layers.values())
    with pytest.raises(
        MoeqError, match="is inf; new weights are in expert 0 of layer 0, old ones in all other experts"
    ):
        writer.update_layer(0, "down", bad)
    for expert in layers[0].experts:
        same = all(
            torch.equal(tensor[expert], kept[0].tensors["w2"][part][expert])
            for part, tensor in layers[0].tensors["w2"].items()
        )
        assert same == (expert > 0)
    writer.update_layer(0, "down", weights)
    assert writer.digest(0) == moeq.snapshot(layers[0])


def test_unsuitable_tensors_are_refused(gptq) -> None:
    _, folder = gptq
    checkpoint = moeq.open(folder)
    good = {role: dict(parts) for role, parts in moeq.writable_layer(checkpoint, 0).tensors.items()}

    def refused(role: str, part: str, tensor: torch.Tensor, text: str) -> None:
        with pytest.raises(MoeqError, match=text) as caught:
            moeq.writable_layer(checkpoint, 0, tensors=good | {role: good[role] | {part: tensor}})
        assert caught.value.code == "usage.update-target"

    scale = good["w2"]["scale"]
    refused("w2", "scale", scale[:, :1].expand_as(scale), "strides")
    refused("w2", "scale", scale[:-1], r"not torch\.\w+ \[\d+, 4, 256\]")
    refused("w2", "scale", scale.view(torch.int16), "int16")
    refused("w2", "scale", scale.clone().requires_grad_(), "gradient")
    refused(
        "w13",
        "scale",
        good["w13"]["weight"]
        .view(torch.float16)
        .view(-1)[: good["w13"]["scale"].numel()]
        .view(good["w13"]["scale"].shape),
        "share memory",
    )
    one = moeq.writable_layer(checkpoint, 0)
    with pytest.raises(MoeqError, match="given twice"):
        moeq.Writer([one, one])


def test_float_weights_take_the_bias_that_the_layer_has(gptq, checkpoints, tmp_path) -> None:
    biased = layers_of(pack(checkpoints / "mxfp4-gptoss", tmp_path / "out", "marlin-mxfp4-interleaved/1"))
    for layers, fits in ((biased, True), (layers_of(gptq[1]), False)):
        spec = layers[0].specs["w2"]
        weight, writer = torch.ones(spec.n, spec.k, dtype=torch.bfloat16), moeq.Writer(layers.values())
        if fits:
            bias = torch.full((spec.n,), 3.0, dtype=torch.bfloat16)
            writer.update(0, 0, "down", {"weight": weight, "bias": bias})
            assert (layers[0].tensors["w2"]["bias"][0] == 3).all()
        for size in (spec.n - 1, *([] if fits else [spec.n])):
            with pytest.raises(MoeqError, match="bias is") as caught:
                writer.update(0, 0, "down", {"weight": weight, "bias": torch.zeros(size, dtype=torch.bfloat16)})
            assert caught.value.code == "usage.update-tensors"


def test_float_gate_and_up_of_nvfp4_share_a_global_scale_in_either_form(checkpoints, tmp_path) -> None:
    folder = pack(checkpoints / "modelopt-nvfp4-qwen3moe", tmp_path / "out", "marlin-nvfp4/1")
    layers, wrapped = layers_of(folder), layers_of(folder)
    spec, made = layers[0].specs["w13"], torch.Generator().manual_seed(0)
    # The largest weights differ, and so would two scales.
    gate, up = (torch.randn(spec.n // 2, spec.k, generator=made).to(torch.bfloat16) * size for size in (1, 7))
    moeq.Writer(layers.values()).update(0, 0, "w13", {"gate": gate, "up": up})
    moeq.Writer(wrapped.values()).update(0, 0, "w13", {"gate": {"weight": gate}, "up": {"weight": up}})
    assert same_bytes(layers[0], wrapped[0]) == []


def test_an_expert_that_cannot_be_read_stops_an_update_of_another(checkpoints, converted) -> None:
    """All digests are read before a byte changes: an error leaves the layer as it was."""
    name = "gptq-int4-g32-actorder-qwen3moe"
    parts = Experts.read(checkpoints / name).parts(0, 0, "down")
    layer, before, whole = (replace(moeq.writable_layer(converted[name], 0), digests={}) for _ in range(3))
    for one in (layer, before):
        one.tensors["w2"]["permutation"][2, 5] = -1
    with pytest.raises(MoeqError) as caught:
        moeq.Writer([layer], gather=False).update(0, 1, "down", parts)
    assert caught.value.code == "source.bad-data"
    assert same_bytes(layer, before) == []
    assert moeq.Writer([whole], gather=False).update(0, 1, "down", parts).rows == (1,)

"""moeq.json: written and read back, and refused where it cannot be what it says."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from refusing import refuses

import moeq
from moeq.checkpoint.manifest import (
    MANIFEST_NAME,
    CopiedLayer,
    FileDigest,
    LayerEntry,
    Manifest,
    MatrixEntry,
    RankEntry,
    RestoreEntry,
    Sharding,
    SourceEntry,
    read_manifest,
    seal,
)
from moeq.errors import ExitCode, MoeqError
from moeq.matrix import MatrixSpec


def matrices(suffix: str = "", k: int = 128) -> dict[Any, MatrixEntry]:
    return {
        "w13": MatrixEntry(
            MatrixSpec("w13", 2 * k, 256, "int4", 32, "f16"), 256, 256, {"weight": f"w13_weight{suffix}"}
        ),
        "w2": MatrixEntry(
            MatrixSpec("w2", 256, k, "int4", 32, "f16", act_order=True, all_groups=4), 256, 128, {"scale": f"s{suffix}"}
        ),
    }


def manifest() -> Manifest:
    ranks = tuple(RankEntry(r, (0, 2), (64 * r, 64 * r + 64), matrices(f".rank{r}", 64)) for r in range(2))
    layers = (
        LayerEntry(0, "model.layers.0.mlp.experts", 2, "marlin-wna16/1", matrices(), {"gate": ("a", "b")}),
        LayerEntry(
            3,
            "model.layers.3.mlp.experts",
            2,
            "marlin-act-order/1",
            matrices(),
            {"down": ("c", "d")},
            Sharding("tp", "ranks", "why"),
            ranks,
            losses=5,
        ),
    )
    return Manifest(
        moeq_version="1.2.3",
        source=SourceEntry("somewhere", "abc", {"model.safetensors": 10}, "id"),
        model={"name": "somewhere"},
        backend="MARLIN",
        deployment={"tp": 2},
        layers=layers,
        digest="blake3/moeq-logical-2",
        advisories=("one",),
        copied=(CopiedLayer(1, "its experts are not quantised"),),
        restore=RestoreEntry("moeq-restore.data", ("model.safetensors",), ("a.g_idx",), ("old.bin",)),
    )


def write(folder: Path, document: object) -> Path:
    (folder / MANIFEST_NAME).write_text(document if isinstance(document, str) else json.dumps(document))
    return folder


def test_what_is_written_is_read_back(tmp_path) -> None:
    before = manifest()
    after = read_manifest(write(tmp_path, before.to_json()))
    assert after == before
    assert after.layer(3).tensors == ("w13_weight.rank0", "s.rank0", "w13_weight.rank1", "s.rank1")
    assert after.layer(0).tensors == ("w13_weight", "s")
    assert after.layer(3).matrices["w2"].padded_spec.num_groups == 4


def test_fields_that_older_manifests_lack_have_defaults(tmp_path) -> None:
    document = json.loads(json.dumps(manifest().to_json()))
    for name in ("copied", "restore", "advisories"):
        del document[name]
    for name in ("sharding", "ranks", "losses"):
        del document["layers"][0][name]
    del document["layers"][0]["matrices"]["w2"]["spec"]["all_groups"]
    found = read_manifest(write(tmp_path, document))
    assert (found.copied, found.restore, found.advisories) == ((), None, ())
    assert found.layer(0).sharding.written == "unsharded"


def test_only_a_manifest_with_digests_of_files_has_a_seal() -> None:
    assert "seal" not in manifest().to_json()
    document = dataclasses.replace(manifest(), files={}).to_json()
    assert document.pop("seal") == seal(document)


@pytest.mark.parametrize("name", ["../up", "/root", "a//b", "a\0b"])
@pytest.mark.parametrize("field", ["file", "files", "missing", "copied", "stripped", "digests"])
def test_no_name_leads_out_of_the_folder(field: str, name: str, tmp_path) -> None:
    if field == "digests":
        damaged = dataclasses.replace(manifest(), files={name: FileDigest(1, "00")})
    else:
        value = name if field == "file" else (name,)
        damaged = dataclasses.replace(manifest(), restore=RestoreEntry(**{"file": "data", field: value}))
    folder = write(tmp_path, damaged.to_json())
    with pytest.raises(MoeqError) as caught:
        read_manifest(folder)
    assert caught.value.code == "source.unsafe-path"


def test_files_that_are_kept_apart_are_told_apart(tmp_path) -> None:
    """The same name may be copied and left out, but no list has it twice."""
    for first, second, good in (("files", "missing", False), ("copied", "stripped", False), ("files", "copied", True)):
        entry = RestoreEntry(**{"file": "data", first: ("one",), second: ("ONE",)})
        folder = write(tmp_path, dataclasses.replace(manifest(), restore=entry).to_json())
        if good:
            assert read_manifest(folder).restore == entry
            continue
        with pytest.raises(MoeqError, match="one file on systems that ignore case"):
            read_manifest(folder)


def test_a_missing_layer_names_those_there_are() -> None:
    with pytest.raises(MoeqError, match="layer 1 has no converted experts") as caught:
        manifest().layer(1)
    assert "0, 3" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("{", "not valid JSON: .* at line 1 column 2"),
        ("[]", "holds a list, expected a JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ({"schema": "moeq.manifest/3"}, "schema 'moeq.manifest/3'"),
        ({"schema": "moeq.manifest/1"}, "the document lacks 'moeq_version'"),
        ({**manifest().to_json(), "schema": "moeq.manifest/2"}, "files does not belong to schema moeq.manifest/2"),
        ({**manifest().to_json(), "layers": []}, "layers is empty"),
        ({**manifest().to_json(), "layers": [manifest().to_json()["layers"][0]] * 2}, "layers: layer 0 appears twice"),
        ({**manifest().to_json(), "copied": [{"layer": 3, "reason": ""}]}, "copied: layer 3 appears twice"),
    ],
)
def test_what_cannot_be_understood_is_refused(damage, message, tmp_path) -> None:
    with pytest.raises(MoeqError, match=message) as caught:
        read_manifest(write(tmp_path, damage))
    assert caught.value.code == "source.bad-manifest"
    assert caught.value.exit_code == ExitCode.SOURCE


def changed(path: tuple[Any, ...], value: object) -> dict[str, Any]:
    """The manifest with one value changed below its second layer; the last key is removed where there is no value."""
    document = json.loads(json.dumps(manifest().to_json()))
    place = document["layers"][1]
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return document


W2 = ("matrices", "w2")
RANK_W2 = ("ranks", 1, *W2)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("num_experts",), 0, r"layers\[1\].num_experts is 0"),
        (("ranks", 1, "rank"), 0, r"layers\[1\].ranks are not numbered 0 to 1"),
        (("ranks", 1, "rank"), 2, r"layers\[1\].ranks are not numbered 0 to 1"),
        (("ranks", 1, "matrices", "w2", "tensors", "scale"), "s", "layers: tensor 's' appears twice"),
        (W2, None, r"layers\[1\].matrices lacks w2"),
        (RANK_W2, None, r"layers\[1\].ranks.matrices lacks w2"),
        ((*RANK_W2, "spec", "n"), 0, r"layers\[1\].ranks.matrices.w2.spec.n is 0"),
        ((*W2, "spec", "k"), 1 << 40, "w2.spec.k is 1099511627776, expected a size from 1 to 1,099,511,627,775"),
        ((*W2, "spec", "group_size"), -1, "w2.spec.group_size is -1"),
        ((*W2, "spec", "all_groups"), 0, "w2.spec.all_groups is 0"),
        ((*W2, "padded_n"), 0, "w2.padded_n is 0, expected a size from 1 to 1,099,511,627,775"),
        ((*W2, "padded_k"), 0, "w2.padded_k is 0, expected a size from 1 to 1,099,511,627,775"),
        ((*W2, "padded_n"), 255, "w2.padded_n is 255, less than the 256 before padding"),
        ((*W2, "padded_k"), 127, "w2.padded_k is 127, less than the 128 before padding"),
        ((*W2, "spec", "bias_dtype"), "bf16x", "w2.spec.bias_dtype is 'bf16x', expected one of"),
        ((*RANK_W2, "spec", "scale_dtype"), "f8", "w2.spec.scale_dtype is 'f8', expected one of"),
        ((*W2, "padded_group"), 0, "w2.padded_group is 0"),
        ((*W2, "spec", "role"), "w13", "w2.spec describes w13 of 'int4'"),
        ((*RANK_W2, "spec", "element"), "int99", "w2.spec describes w2 of 'int99'"),
        (("source_group",), 0, "source_group is 0, expected a size from 1 to 1,099,511,627,775"),
        (("source_group",), 48, "source_group is 48, which the groups of w13 do not divide"),
    ],
)
def test_every_size_and_kind_of_a_matrix_is_checked(path, value, message, tmp_path) -> None:
    with pytest.raises(MoeqError, match=message) as caught:
        read_manifest(write(tmp_path, changed(path, value)))
    assert caught.value.code == "source.bad-manifest"


def test_groups_of_the_source_may_be_several_of_those_written(tmp_path) -> None:
    assert read_manifest(write(tmp_path, changed(("source_group",), 64))).layer(3).source_group == 64


def test_a_folder_without_one(tmp_path) -> None:
    with pytest.raises(MoeqError, match="not a finished output") as caught:
        read_manifest(tmp_path)
    assert caught.value.code == "source.no-manifest"


def test_folders_that_have_none_are_told_apart(tmp_path) -> None:
    """None at all, unfinished work, a source checkpoint, a conversion that lost it."""
    missing, work, folder = tmp_path / "missing", tmp_path / "out.moeq-partial", tmp_path / "a b"
    work.mkdir()
    folder.mkdir()
    with refuses("source.missing", f"{missing}: no such folder", None):
        read_manifest(missing)
    again = "the command that began it, run again, goes on where it stopped"
    with refuses("source.unfinished", f"{work} holds unfinished work of moeq", again):
        read_manifest(work)
    (folder / "config.json").write_text('{"quant_method": "gptq"}')
    text = f"{folder} is a source checkpoint, not an output of `moeq convert`"
    with refuses("usage.not-converted", text, f"convert it first: moeq convert '{folder}' DST --gpu NAME"):
        read_manifest(folder)
    (folder / "config.json").write_text('{"quant_method" :\n"moeq"}')
    text = f"{folder} has no moeq.json: it is not a finished output of `moeq convert`"
    with refuses("source.no-manifest", text, "convert it first: moeq convert SRC DST"):
        read_manifest(folder)


def test_a_conversion_that_lost_it_is_no_source(checkpoints, tmp_path) -> None:
    shutil.copytree(checkpoints / "ct-w8a8-qwen3moe", tmp_path / "folder")
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "moeq", "manifest": "moeq.json"}
    (tmp_path / "folder" / "config.json").write_text(json.dumps(config))
    with pytest.raises(MoeqError, match=r"moeq wrote this, and moeq\.json is missing") as caught:
        moeq.open(tmp_path / "folder")
    assert caught.value.code == "source.no-manifest"


@pytest.mark.parametrize(("gated", "projections"), [(True, ("gate", "up", "down")), (False, ("up", "down"))])
def test_projections_and_groups_of_the_source(gated: bool, projections: tuple[str, ...]) -> None:
    entry = manifest().layers[0]
    w13 = dataclasses.replace(entry.matrices["w13"], spec=dataclasses.replace(entry.matrices["w13"].spec, gated=gated))
    entry = dataclasses.replace(entry, matrices={**entry.matrices, "w13": w13})
    assert entry.projections == projections
    assert entry.source_spec("w13") == w13.spec
    assert dataclasses.replace(entry, source_group=64).source_spec("w13") == dataclasses.replace(
        w13.spec, group_size=64
    )

"""Conversions that were tampered with, manifest and all: what verify says, with the source and without it."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attacks.running import moeq_command
from blake3 import blake3

from moeq.cli.app import run

__all__ = ["moeq_command"]

SOURCES = ("gptq-int4-g32-qwen3moe", "mxfp4-gptoss")


@pytest.fixture(scope="module", params=SOURCES)
def pair(
    request: pytest.FixtureRequest, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A source and its conversion."""
    out = tmp_path_factory.mktemp("tampered") / "out"
    assert run(["convert", str(checkpoints / request.param), str(out), "--gpu", "a100", "--quiet"]) == 0
    return checkpoints / request.param, out


@pytest.fixture
def source(pair: tuple[Path, Path]) -> Path:
    return pair[0]


@pytest.fixture
def out(pair: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pair[1], tmp_path / "out"))


# What an attacker has: tools to rewrite a folder consistently.


def manifest_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "moeq.json").read_text())


def write_manifest(out: Path, manifest: dict[str, Any]) -> None:
    (out / "moeq.json").write_text(json.dumps(manifest, indent=2) + "\n")


def tensors(path: Path) -> tuple[dict[str, Any], int]:
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    table = json.loads(raw[8 : 8 + length])
    table.pop("__metadata__", None)
    return table, 8 + length


def places(out: Path) -> dict[str, tuple[Path, int, int]]:
    """Every tensor of the weight files: file, first and last byte."""
    return {
        name: (path, base + entry["data_offsets"][0], base + entry["data_offsets"][1])
        for path in sorted(out.glob("*.safetensors"))
        for table, base in [tensors(path)]
        for name, entry in table.items()
    }


def rewrite(place: tuple[Path, int, int], data: bytes, at: int = 0) -> None:
    with place[0].open("r+b") as file:
        file.seek(place[1] + at)
        file.write(data)


def bytes_of(place: tuple[Path, int, int]) -> bytes:
    return place[0].read_bytes()[place[1] : place[2]]


def safetensors(held: dict[str, tuple[str, list[int], bytes]], path: Path) -> None:
    """A weight file of these tensors."""
    table, data = {}, b""
    for name, (dtype, shape, raw) in held.items():
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    header = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def contents(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    table, base = tensors(path)
    raw = path.read_bytes()
    return {
        name: (entry["dtype"], entry["shape"], raw[base + entry["data_offsets"][0] : base + entry["data_offsets"][1]])
        for name, entry in table.items()
    }


def consistent(out: Path) -> None:
    """Make the manifest's digests those of the folder as it is: whoever can change a folder can do this."""
    manifest = manifest_of(out)
    packed = {name for layer in manifest["layers"] for name in packed_names(layer)}
    manifest["files"] = {}
    for path in sorted(out.iterdir()):
        if path.name == "moeq.json" or path.is_dir():
            continue
        raw = path.read_bytes()
        row: dict[str, Any] = {"bytes": len(raw), "blake3": blake3(raw).hexdigest(), "tensors": {}}
        if path.suffix == ".safetensors":
            table, base = tensors(path)
            row["blake3"] = blake3(raw[:base]).hexdigest()
            for name, entry in table.items():
                start, stop = (base + offset for offset in entry["data_offsets"])
                piece = (stop - start) // entry["shape"][0] if name in packed else 2 << 20
                digests = b"".join(blake3(raw[at : min(at + piece, stop)]).digest() for at in range(start, stop, piece))
                row["tensors"][name] = {"piece": piece, "blake3": blake3(digests).hexdigest()}
        manifest["files"][path.name] = row
    write_manifest(out, manifest)


def packed_names(layer: dict[str, Any]) -> Iterator[str]:
    for home in [layer["matrices"], *(rank["matrices"] for rank in layer["ranks"])]:
        for matrix in home.values():
            yield from matrix["tensors"].values()


# What is done to it. Each returns nothing and leaves a folder that opens, or is refused.


def digest_list_deleted(out: Path) -> None:
    manifest = manifest_of(out)
    manifest["layers"][0]["digests"].pop("up")
    write_manifest(out, manifest)


def all_digests_deleted(out: Path) -> None:
    manifest = manifest_of(out)
    manifest["layers"][0]["digests"] = {}
    write_manifest(out, manifest)


def digest_list_shortened(out: Path) -> None:
    manifest = manifest_of(out)
    manifest["layers"][0]["digests"]["up"].pop()
    write_manifest(out, manifest)


def losses_in_a_lossless_layout(out: Path) -> None:
    manifest = manifest_of(out)
    manifest["layers"][0]["losses"] = 1
    name = next(packed_names(manifest["layers"][0]))
    write_manifest(out, manifest)
    place = places(out)[name]
    rewrite(place, bytes([bytes_of(place)[0] ^ 1]))
    consistent(out)
    relabel(out)


def relabel(out: Path) -> None:
    """Logical digests of what the folder now holds."""
    import moeq
    from moeq.digest import expert_digests

    manifest, converted = manifest_of(out), moeq.open(out)
    for layer in manifest["layers"]:
        for expert in range(layer["num_experts"]):
            for name, digest in expert_digests(converted, layer["layer"], expert, layer["digests"]).items():
                layer["digests"][name][expert] = digest
    write_manifest(out, manifest)


def layer_listed_twice(out: Path) -> None:
    manifest = manifest_of(out)
    manifest["layers"].append(manifest["layers"][0])
    write_manifest(out, manifest)


def weights_changed_and_relabelled(out: Path) -> None:
    manifest = manifest_of(out)
    place = places(out)[next(packed_names(manifest["layers"][0]))]
    rewrite(place, bytes([bytes_of(place)[7] ^ 0x10]), 7)
    consistent(out)
    relabel(out)


def head_zeroed_with_its_bytes_kept(out: Path) -> None:
    """The true bytes go to the restore data, where an old verify looked for them."""
    name = next(name for name in places(out) if "experts" not in name)
    place = places(out)[name]
    true = bytes_of(place)
    table, _ = tensors(place[0])
    rewrite(place, bytes(len(true)))
    held = contents(out / "moeq-restore.data")
    held[f"tensor/{name}"] = (table[name]["dtype"], table[name]["shape"], true)
    safetensors(held, out / "moeq-restore.data")
    manifest = manifest_of(out)
    manifest["restore"]["kept"].append(name)
    write_manifest(out, manifest)
    consistent(out)


def layers_exchanged(out: Path) -> None:
    """The tensors of two layers change places, and the manifest says so."""
    manifest = manifest_of(out)
    one, two = manifest["layers"][:2]
    found = places(out)
    for first, second in zip(packed_names(one), packed_names(two), strict=True):
        a, b = bytes_of(found[first]), bytes_of(found[second])
        rewrite(found[first], b)
        rewrite(found[second], a)
    one["digests"], two["digests"] = two["digests"], one["digests"]
    write_manifest(out, manifest)
    consistent(out)


def layers_renamed(out: Path) -> None:
    """Layer 0 is said to be layer 1 and the other way round."""
    manifest = manifest_of(out)
    one, two = manifest["layers"][:2]
    for name in ("matrices", "ranks", "digests", "prefix"):
        one[name], two[name] = two[name], one[name]
    write_manifest(out, manifest)


def experts_exchanged(out: Path) -> None:
    manifest = manifest_of(out)
    for name in packed_names(manifest["layers"][0]):
        place = places(out)[name]
        data = bytes_of(place)
        row = len(data) // manifest["layers"][0]["num_experts"]
        rewrite(place, data[row : 2 * row] + data[:row])
    for values in manifest["layers"][0]["digests"].values():
        values[0], values[1] = values[1], values[0]
    write_manifest(out, manifest)
    consistent(out)


def single_file_beside_the_index(out: Path) -> None:
    """transformers takes model.safetensors before any index."""
    shutil.copy(next(out.glob("*.safetensors")), out / "model.safetensors")


def pickle_beside(out: Path) -> None:
    (out / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def adapter_beside(out: Path) -> None:
    """transformers loads an adapter that lies beside a model by itself."""
    (out / "adapter_config.json").write_text('{"peft_type": "LORA"}')


def code_added(out: Path) -> None:
    (out / "modeling_evil.py").write_text("import os")


def code_added_and_recorded(out: Path) -> None:
    code_added(out)
    consistent(out)


def auto_map_added(out: Path) -> None:
    config = json.loads((out / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "org/evil--modeling.Evil"}
    (out / "config.json").write_text(json.dumps(config))
    consistent(out)


def folder_added(out: Path) -> None:
    (out / "original").mkdir()
    (out / "original" / "consolidated.safetensors").write_bytes(b"x")


def link_added(out: Path) -> None:
    (out / "tokenizer.model").symlink_to("/etc/hostname")


def expert_in_restore_data(out: Path) -> None:
    held = contents(out / "moeq-restore.data")
    held["tensor/model.layers.0.mlp.experts.0.gate_proj.qweight"] = ("U8", [4], b"evil")
    safetensors(held, out / "moeq-restore.data")
    consistent(out)


def stray_in_restore_data(out: Path) -> None:
    held = contents(out / "moeq-restore.data")
    held["text/evil.json"] = ("U8", [2], b"{}")
    safetensors(held, out / "moeq-restore.data")
    consistent(out)


def config_in_restore_data(out: Path) -> None:
    held = contents(out / "moeq-restore.data")
    dtype, _, raw = held["text/config.json"]
    changed = raw.replace(b'"vocab_size"', b'"vocab_siza"')
    held["text/config.json"] = (dtype, [len(changed)], changed)
    safetensors(held, out / "moeq-restore.data")
    consistent(out)


def restore_entry_deleted(out: Path) -> None:
    manifest = manifest_of(out)
    manifest["restore"]["kept"] = ["model.norm.weight"]
    write_manifest(out, manifest)


def index_points_elsewhere(out: Path) -> None:
    """A second file with other bytes under the same name; the index takes that one."""
    path = out / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = next(name for name in index["weight_map"] if "experts" not in name)
    dtype, shape, raw = contents(out / index["weight_map"][name])[name]
    safetensors({name: (dtype, shape, bytes(len(raw)))}, out / "model-00099-of-00099.safetensors")
    index["weight_map"][name] = "model-00099-of-00099.safetensors"
    path.write_text(json.dumps(index))
    consistent(out)


def duplicate_outside_the_index(out: Path) -> None:
    """A loader that globs takes the last file."""
    path = next(out.glob("*.safetensors"))
    name, (dtype, shape, raw) = next(iter(contents(path).items()))
    safetensors({name: (dtype, shape, bytes(len(raw)))}, out / "model-00099-of-00099.safetensors")
    consistent(out)


def tensor_added(out: Path) -> None:
    path = out / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    safetensors({"model.evil.weight": ("U8", [4], b"evil")}, out / "model-00099-of-00099.safetensors")
    index["weight_map"]["model.evil.weight"] = "model-00099-of-00099.safetensors"
    path.write_text(json.dumps(index))
    consistent(out)


def index_with_other_size(out: Path) -> None:
    path = out / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["evil"] = "x"
    path.write_text(json.dumps(index))
    consistent(out)


def header_metadata_changed(out: Path) -> None:
    path = max(out.glob("*.safetensors"))
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'"format":"pt"', b'"format":"tf"', 1))
    consistent(out)


def routing_changed(out: Path) -> None:
    manifest = manifest_of(out)
    manifest["model"]["routing"]["scaling_factor"] = 2.0
    write_manifest(out, manifest)


def top_k_changed(out: Path) -> None:
    manifest = manifest_of(out)
    manifest["model"]["top_k"] = 1
    write_manifest(out, manifest)


def activation_changed(out: Path) -> None:
    manifest = manifest_of(out)
    manifest["model"]["activation"] = "relu"
    write_manifest(out, manifest)


def tokenizer_changed(out: Path) -> None:
    own = ("moeq.json", "config.json", "model.safetensors.index.json")
    side = next((path for path in sorted(out.glob("*.json")) if path.name not in own), out / "generation_config.json")
    side.write_text('{"changed": true}')
    consistent(out)


def files_taken_out_of_the_manifest(out: Path) -> None:
    """As if an old version had written it; then a copied tensor is changed."""
    name = next(name for name in places(out) if "experts" not in name)
    place = places(out)[name]
    rewrite(place, bytes([bytes_of(place)[0] ^ 1]))
    manifest = manifest_of(out)
    del manifest["files"]
    manifest["schema"] = "moeq.manifest/1"
    write_manifest(out, manifest)


def identity_of_another(out: Path) -> None:
    manifest = manifest_of(out)
    manifest["source"]["identity"] = "0" * 64
    write_manifest(out, manifest)


def layer_left_out(out: Path) -> None:
    """A converted layer is said to have been copied."""
    manifest = manifest_of(out)
    entry = manifest["layers"].pop()
    manifest["copied"].append({"layer": entry["layer"], "reason": "was not converted"})
    write_manifest(out, manifest)


# What a second look came up with. The manifest is sealed again: a seal is no signature.


def sealed(out: Path, manifest: dict[str, Any] | None = None) -> None:
    from moeq.checkpoint.manifest import seal

    manifest = manifest_of(out) if manifest is None else manifest
    write_manifest(out, {**manifest, "seal": seal(manifest)})


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document, indent=2) + "\n")


def whole_numbers_become_floats(out: Path) -> None:
    """Equal to Python, not to every reader: `range(2.0)`."""
    change_json(out / "config.json", lambda config: config.update(num_hidden_layers=float(config["num_hidden_layers"])))
    consistent(out)
    sealed(out)


def truth_becomes_a_number(out: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        name = next(name for name, value in config.items() if isinstance(value, bool))
        config[name] = int(config[name])

    change_json(out / "config.json", change)
    consistent(out)
    sealed(out)


def total_becomes_a_float(out: Path) -> None:
    def change(index: dict[str, Any]) -> None:
        index["metadata"]["total_size"] = float(index["metadata"]["total_size"])

    change_json(out / "model.safetensors.index.json", change)
    consistent(out)
    sealed(out)


def way_back_removed(out: Path) -> None:
    (out / "moeq-restore.data").unlink()
    consistent(out)
    sealed(out, {**manifest_of(out), "restore": None})


def restore_metadata_changed(out: Path) -> None:
    path = out / "moeq-restore.data"
    path.write_bytes(path.read_bytes().replace(b'"moeq-restore/1"', b'"moeq-restore/2"', 1))
    consistent(out)
    sealed(out)


def restore_shapes_changed(out: Path) -> None:
    """The same bytes as another kind of number."""
    held = contents(out / "moeq-restore.data")
    held["text/config.json"] = ("I8", held["text/config.json"][1], held["text/config.json"][2])
    safetensors(held, out / "moeq-restore.data")
    consistent(out)
    sealed(out)


def file_digest_changed(out: Path) -> None:
    """So that a later look without the source finds fault with a folder that is right, or looks at nothing."""
    manifest = manifest_of(out)
    manifest["files"]["config.json"]["blake3"] = "0" * 64
    sealed(out, manifest)


def tensor_digest_changed(out: Path) -> None:
    manifest = manifest_of(out)
    row = next(row for row in manifest["files"].values() if row["tensors"])
    row["tensors"][next(iter(row["tensors"]))]["blake3"] = "0" * 64
    sealed(out, manifest)


def file_left_out_of_the_manifest(out: Path) -> None:
    manifest = manifest_of(out)
    del manifest["files"]["config.json"]
    sealed(out, manifest)


def unknown_file_in_the_manifest(out: Path) -> None:
    manifest = manifest_of(out)
    manifest["files"]["modeling_evil.py"] = {"bytes": 0, "blake3": blake3(b"").hexdigest(), "tensors": {}}
    sealed(out, manifest)


def weights_are_a_link(out: Path) -> None:
    """To the right bytes, outside, where they can change at any time."""
    path = min(out.glob("*.safetensors"))
    shutil.move(path, out.parent / "elsewhere.safetensors")
    path.symlink_to("../elsewhere.safetensors")


def config_is_a_link(out: Path) -> None:
    shutil.move(out / "config.json", out.parent / "elsewhere.json")
    (out / "config.json").symlink_to(out.parent / "elsewhere.json")


def folder_is_a_link(out: Path) -> None:
    (out / "additional_chat_templates").symlink_to(out.parent)


def template_in_a_folder(out: Path) -> None:
    """transformers reads these."""
    (out / "additional_chat_templates").mkdir()
    (out / "additional_chat_templates" / "default.jinja").write_text("{{ evil }}")


def tensor_in_a_folder_of_tools(out: Path) -> None:
    """Of what is there, loaders read what the index names."""
    path = out / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = next(name for name in index["weight_map"] if "experts" not in name)
    dtype, shape, raw = contents(out / index["weight_map"][name])[name]
    (out / ".cache").mkdir()
    safetensors({name: (dtype, shape, bytes(len(raw)))}, out / ".cache" / "model.safetensors")
    index["weight_map"][name] = ".cache/model.safetensors"
    path.write_text(json.dumps(index))
    consistent(out)
    sealed(out)


def names_in_other_letters(out: Path) -> None:
    """One file with another, where case does not count."""
    shutil.copy(out / "config.json", out / "Config.json")


def another_index(out: Path) -> None:
    shutil.copy(out / "model.safetensors.index.json", out / "a.safetensors.index.json")


def sharding_changed(out: Path) -> None:
    manifest = manifest_of(out)
    manifest["layers"][0]["sharding"]["axis"] = "tp"
    sealed(out, manifest)


def tokenizer_of_terabytes(out: Path) -> None:
    """Sparse; hashing it takes hours."""
    own = ("moeq.json", "config.json", "model.safetensors.index.json")
    side = next((path for path in sorted(out.glob("*.json")) if path.name not in own), out / "moeq-restore.data")
    os.truncate(side, 1 << 43)


def experts_cut_off(out: Path) -> None:
    """One expert fewer is said to be there; the rest of the stack is padding nobody looks at."""
    manifest = manifest_of(out)
    layer = manifest["layers"][0]
    layer["num_experts"] -= 1
    for values in layer["digests"].values():
        values.pop()
    sealed(out, manifest)


def groups_renamed(out: Path) -> None:
    manifest = manifest_of(out)
    manifest["layers"][0]["source_group"] = 4 * manifest["layers"][0]["matrices"]["w13"]["spec"]["group_size"]
    sealed(out, manifest)


def two_parts_of_one_tensor(out: Path) -> None:
    """The scales of one matrix are those of the other."""
    manifest = manifest_of(out)
    w13, w2 = (manifest["layers"][0]["matrices"][role]["tensors"] for role in ("w13", "w2"))
    w13["scale"], w2["scale"] = w2["scale"], w13["scale"]
    sealed(out, manifest)


def bytes_after_the_end(out: Path) -> None:
    with (out / "config.json").open("ab") as file:
        file.write(b'{"auto_map": {}}')
    consistent(out)
    sealed(out)


def a_key_twice(out: Path) -> None:
    """The last one counts for Python, the first one for others."""
    path = out / "config.json"
    path.write_text('{"auto_map": {"AutoConfig": "evil.Evil"}, "auto_map": {},' + path.read_text().lstrip()[1:])
    consistent(out)
    sealed(out)


def a_mark_before_the_manifest(out: Path) -> None:
    path = out / "moeq.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())


SECOND: tuple[Callable[[Path], None], ...] = (
    whole_numbers_become_floats,
    truth_becomes_a_number,
    total_becomes_a_float,
    way_back_removed,
    restore_metadata_changed,
    restore_shapes_changed,
    file_digest_changed,
    tensor_digest_changed,
    file_left_out_of_the_manifest,
    unknown_file_in_the_manifest,
    weights_are_a_link,
    config_is_a_link,
    folder_is_a_link,
    template_in_a_folder,
    tensor_in_a_folder_of_tools,
    names_in_other_letters,
    another_index,
    sharding_changed,
    tokenizer_of_terabytes,
    experts_cut_off,
    groups_renamed,
    two_parts_of_one_tensor,
    bytes_after_the_end,
    a_key_twice,
    a_mark_before_the_manifest,
)


@pytest.mark.cover
@pytest.mark.parametrize("tamper", SECOND, ids=lambda tamper: tamper.__name__)
def test_with_the_source_again(tamper, out, source, moeq_command) -> None:
    tamper(out)
    answer = moeq_command("verify", out, "--source", source, "--json")
    assert answer.code in (1, 4), answer.out
    assert answer.document["ok"] is False


TAMPERING: tuple[Callable[[Path], None], ...] = (
    digest_list_deleted,
    all_digests_deleted,
    digest_list_shortened,
    losses_in_a_lossless_layout,
    layer_listed_twice,
    weights_changed_and_relabelled,
    head_zeroed_with_its_bytes_kept,
    layers_exchanged,
    layers_renamed,
    experts_exchanged,
    single_file_beside_the_index,
    pickle_beside,
    adapter_beside,
    code_added,
    code_added_and_recorded,
    auto_map_added,
    folder_added,
    link_added,
    expert_in_restore_data,
    stray_in_restore_data,
    config_in_restore_data,
    restore_entry_deleted,
    index_points_elsewhere,
    duplicate_outside_the_index,
    tensor_added,
    index_with_other_size,
    header_metadata_changed,
    routing_changed,
    top_k_changed,
    activation_changed,
    tokenizer_changed,
    files_taken_out_of_the_manifest,
    identity_of_another,
    layer_left_out,
)

#: Changes that make the manifest agree with the folder again: only the source, or a signature, tells.
CONSISTENT = {
    losses_in_a_lossless_layout,
    weights_changed_and_relabelled,
    head_zeroed_with_its_bytes_kept,
    layers_exchanged,
    layers_renamed,
    experts_exchanged,
    code_added_and_recorded,
    auto_map_added,
    expert_in_restore_data,
    stray_in_restore_data,
    config_in_restore_data,
    index_points_elsewhere,
    duplicate_outside_the_index,
    tensor_added,
    index_with_other_size,
    header_metadata_changed,
    tokenizer_changed,
    routing_changed,
    top_k_changed,
    activation_changed,
    restore_entry_deleted,
    files_taken_out_of_the_manifest,
    identity_of_another,
}


@pytest.mark.cover
@pytest.mark.parametrize("slow", [False, True], ids=["fast", "slow"])
@pytest.mark.parametrize("tamper", TAMPERING, ids=lambda tamper: tamper.__name__)
def test_with_the_source(tamper, slow, out, source, moeq_command) -> None:
    tamper(out)
    answer = moeq_command("verify", out, "--source", source, "--json", *(["--slow"] if slow else []))
    assert answer.code in (1, 4), answer.out
    assert answer.document["ok"] is False


@pytest.mark.cover
@pytest.mark.parametrize("tamper", TAMPERING, ids=lambda tamper: tamper.__name__)
def test_without_the_source(tamper, out, moeq_command) -> None:
    """What the digests in the manifest tell; what they cannot tell is said."""
    tamper(out)
    answer = moeq_command("verify", out, "--json")
    if tamper in CONSISTENT:
        assert answer.code != 0 or any("integrity" in note for note in answer.document["notes"])
    else:
        assert answer.code in (1, 4), answer.out


def test_untouched(out, source, moeq_command) -> None:
    for argv in ((), ("--source", source), ("--source", source, "--slow")):
        answer = moeq_command("verify", out, "--json", *argv)
        assert (answer.code, answer.document["mismatches"]) == (0, [])


def test_a_flipped_bit_anywhere(out, source, moeq_command) -> None:
    """In every file, at random: the digests in the manifest see it, and so does the source."""
    dice = random.Random(7)
    for path in sorted(out.iterdir()):
        original = path.read_bytes()
        for _ in range(6 if path.suffix != ".json" else 3):
            at = dice.randrange(len(original))
            path.write_bytes(original[:at] + bytes([original[at] ^ 1 << dice.randrange(8)]) + original[at + 1 :])
            if path.name != "moeq.json":
                answer = moeq_command("verify", out)
                assert answer.code in (1, 4), (path.name, at)
                if not json_equal(original, path.read_bytes()):
                    assert moeq_command("verify", out, "--source", source).code in (1, 4), (path.name, at)
        path.write_bytes(original)


def json_equal(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


def test_every_file_missing(out, source, moeq_command) -> None:
    for path in sorted(out.iterdir()):
        original = path.read_bytes()
        path.unlink()
        for argv in ((), ("--source", source)):
            assert moeq_command("verify", out, *argv).code in (1, 2, 4), path.name
        path.write_bytes(original)


def test_what_is_not_known_is_listed(out, source, moeq_command) -> None:
    """Files that a Hub adds do no harm, and verify says that it knows nothing of them."""
    (out / ".gitattributes").write_text("* filter=lfs\n")
    os.mkdir(out / ".cache")
    (out / ".cache" / "x.py").write_text("x")
    for argv in ((), ("--source", source)):
        answer = moeq_command("verify", out, "--json", *argv)
        assert answer.code == 0, answer.out
        assert answer.document["unproven"] == [".cache/", ".gitattributes"]
    shown = moeq_command("verify", out).out
    assert all(f"unproven  {name}" in shown for name in (".cache/", ".gitattributes"))


@pytest.mark.parametrize("name", ["moeq.json", "config.json", "model.safetensors.index.json", "weights"])
@pytest.mark.parametrize("with_source", [False, True])
def test_a_folder_that_changes_while_it_is_verified(name, with_source, out, source) -> None:
    """What was looked at is exchanged for something else, with its size and its time put back."""
    from moeq.errors import MoeqError
    from moeq.prove.verify import verify

    path = min(out.glob("*.safetensors")) if name == "weights" else out / name
    info, raw = path.stat(), path.read_bytes()
    changed: list[bool] = []

    def progress(done: int, total: int, label: str) -> None:
        if not changed:
            changed.append(True)
            path.write_bytes(raw[:-2] + b" \n")
            os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))

    try:
        found = verify(out, source if with_source else None, workers=1, progress=progress)
    except MoeqError as error:
        code = int(error.exit_code)
    else:
        code = int(not found.ok)
    assert changed
    assert code in (1, 4)


def test_an_old_manifest_says_what_is_not_covered(out, moeq_command) -> None:
    manifest = manifest_of(out)
    del manifest["files"]
    write_manifest(out, {**manifest, "schema": "moeq.manifest/1"})
    answer = moeq_command("verify", out)
    assert answer.code == 0
    assert "without --source only the experts were checked" in answer.out

"""What an attacker does to a conversion: tools that rewrite a folder consistently, and changes made with them."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from blake3 import blake3

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

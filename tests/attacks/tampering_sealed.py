"""Changes after which the manifest is sealed again, since a seal is no signature. Each folder opens or is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attacks.tampering import consistent, contents, manifest_of, safetensors, write_manifest
from blake3 import blake3


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


SEALED: tuple[Callable[[Path], None], ...] = (
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

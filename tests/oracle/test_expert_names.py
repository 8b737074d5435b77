"""Names of experts that engines' model classes load: the facts, and what commands make of them."""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from moeq.checkpoint.families import FAMILIES
from moeq.cli.app import run
from moeq.oracle.engines.vllm import expert_names
from moeq.oracle.engines.vllm.expert_names import EXPERT, ClassNames, StoredName, names_of_class
from vllm_tables.model_classes import MODELS
from vllm_tables.names import CONTAINERS, merged

VERSIONS = expert_names.versions()
LONG, SHORT = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


def modules(container: str, spelled: tuple[str, ...]) -> list[StoredName]:
    return [StoredName(f"{container}.{EXPERT}.{name}") for name in spelled]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("model_type", MODELS)
def test_classes_load_what_their_family_publishes(model_type: str, version: str) -> None:
    known = names_of_class(version, MODELS[model_type][0])
    family = next((family for family in FAMILIES if model_type in family.model_types), None)
    if known is None or family is None or family.title in ("gpt-oss", "Granite-MoE", "Aria"):
        pytest.skip("stacked, or not known")
    assert known.problem(modules(family.experts, family.projections)) is None
    elsewhere = next(path for path in CONTAINERS if path != family.experts)
    said = known.problem(modules(elsewhere, family.projections))
    assert said is not None
    assert f"does not load {elsewhere}.{EXPERT}.{family.projections[0]}" in said
    assert family.experts in said


def test_versions_differ() -> None:
    """Mixtral's class took up every spelling after 0.26.0."""
    old, new = (names_of_class(version, "MixtralForCausalLM") for version in ("0.26.0", "0.33.0"))
    assert old is not None
    assert new is not None
    names = modules("block_sparse_moe.experts", LONG)
    assert "w1" in str(old.problem(names))
    assert new.problem(names) is None
    assert new.problem(modules("mlp.experts", LONG)) is not None


def test_gpt_oss_is_stacked() -> None:
    for version in VERSIONS:
        known = names_of_class(version, "GptOssForCausalLM")
        assert known is not None
        own = [f"mlp.experts.{name}_{part}" for name in ("gate_up_proj", "down_proj") for part in ("blocks", "scales")]
        assert known.problem([StoredName(name, "interleaved") for name in own]) is None
        assert known.problem(modules("mlp.experts", LONG)) is not None


def test_order_of_rows() -> None:
    names = ClassNames(
        "C", ["model.layers"], {"e.*.w13": "halves", "e.*.w1": "any"}, {"e.gate_up_proj": "transposed", "e.w2": "as-is"}
    )
    assert names.problem([StoredName("e.gate_up_proj", "transposed"), StoredName("e.w2", "interleaved")]) is None
    assert names.problem([StoredName("e.*.w1", "interleaved")]) is None
    assert "as transposed, and they are halves" in str(names.problem([StoredName("e.gate_up_proj")]))
    assert "as halves, and they are interleaved" in str(names.problem([StoredName("e.*.w13", "interleaved")]))
    # A part that no class was asked about says nothing.
    assert names.problem([StoredName("e.gate_up_proj_bias")]) is None
    assert names.problem([StoredName("e.gate_up_proj_packed")]) is not None


@pytest.mark.cover(every=5)
@pytest.mark.parametrize("seed", range(20))
def test_every_version_keeps_its_own(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random tables, put together version by version in any order, are found again."""
    rng = random.Random(seed)

    def table() -> dict[str, Any]:
        paths = rng.sample([f"{path}.{EXPERT}.{leaf}" for path in CONTAINERS for leaf in LONG], 3)
        tensors = {rng.choice(CONTAINERS) + ".w13": "halves"}
        return {"stacks": ["model.layers"], "modules": dict.fromkeys(paths, "any"), "tensors": tensors}

    tables = [table() for _ in range(3)]
    versions = ["0.26.0", "0.9.1", "0.33.0", "0.100.2"]
    found = {
        version: {name: rng.choice(tables) for name in rng.sample(["A", "B", "C", "D"], 3)} for version in versions
    }
    document: dict[str, Any] = {}
    for version in rng.sample(versions, 4):
        document = merged(document, version, found[version])
    assert document["versions"] == ["0.9.1", "0.26.0", "0.33.0", "0.100.2"]
    assert merged(document, "0.33.0", found["0.33.0"]) == document
    monkeypatch.setattr(expert_names, "read_facts", lambda name: json.loads(json.dumps(document)))
    for version in versions:
        for name in "ABCD":
            known = names_of_class(version, name)
            row = found[version].get(name)
            assert (known and {key: getattr(known, key) for key in ("stacks", "modules", "tensors")}) == row


def said(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    capsys.readouterr()
    run([*map(str, argv), "--json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def refused(document: dict[str, Any]) -> str | None:
    """What the gate of names says."""
    gates = [gate for gate in document["verdict"]["gates"] if gate["code"] == "G12"]
    return gates[0]["text"] if gates else None


@pytest.mark.cover(every=25)
@pytest.mark.parametrize("version", ["0.26.0", "0.33.0"])
@pytest.mark.parametrize("names", ["source", "mlp", "block-sparse-moe", "per-expert", "stacked"])
@pytest.mark.parametrize(
    "name",
    ["gptq-int4-g128-mixtral", "ct-int4-asym-g32-mixtral", "ct-int4-g128-qwen3moe", "ct-fp8-block-qwen3moe",
     "mxfp4-gptoss"],
)  # fmt: skip
def test_the_command_mends_the_names(name, names, version, checkpoints: Path, tmp_path: Path, capsys) -> None:
    """Every spelling of every checkpoint: where names are refused, what is suggested leads to some that are not."""
    made, where = tmp_path / "made", ("--gpu", "H100", "--engine", f"vllm@{version}")
    if run(["transcode", str(checkpoints / name), str(made), "--to", "compressed-tensors", "--names", names]):
        pytest.skip("the target has no such spelling")
    found = said(capsys, "oracle", made, *where)
    problem = refused(found)
    doctor = said(capsys, "doctor", made, *where)["deployment"]
    assert doctor["transcode"] == found["transcode"]
    container = {"mlp": "mlp", "block-sparse-moe": "block_sparse_moe"}.get(names)
    family = "block_sparse_moe" if "mixtral" in name else "mlp"
    if container is not None:
        assert (problem is None) == (container == family and "gptoss" not in name)
    if problem is None:
        return
    assert not found["verdict"]["ok"]
    assert problem in found["verdict"]["refusal"]
    if found["transcode"] is None:  # gpt-oss' own format keeps the container
        assert (name, names) == ("mxfp4-gptoss", "block-sparse-moe")
        return
    words = shlex.split(found["transcode"]["command"])[1:]
    words[words.index("DST")] = str(tmp_path / "mended")
    assert run(words) == 0
    again = said(capsys, "oracle", tmp_path / "mended", *where)
    assert refused(again) is None
    assert again["verdict"]["ok"]
    run(["oracle", str(made), *where])
    assert problem in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_published_names_pass(checkpoints: Path, capsys) -> None:
    """Checkpoints with their family's own names are not refused by any version."""
    for version in VERSIONS:
        for name in ("gptq-int4-g32-qwen3moe", "mxfp4-gptoss", "ct-nvfp4-qwen3moe"):
            found = said(capsys, "oracle", checkpoints / name, "--gpu", "H100", "--engine", f"vllm@{version}")
            assert refused(found) is None


def test_unchecked_names_are_said(checkpoints: Path, tmp_path: Path, capsys) -> None:
    """A class that moeq has no names of says so in the verdict; one that it has says nothing."""
    made = tmp_path / "made"
    shutil.copytree(checkpoints / "gptq-int4-g32-qwen3moe", made)
    config = json.loads((made / "config.json").read_text())
    for architecture, said_so in (("BailingMoeForCausalLM", True), ("Qwen3MoeForCausalLM", False)):
        (made / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
        notes = said(capsys, "oracle", made, "--gpu", "H100", "--engine", "vllm@0.30.0")["verdict"]["notes"]
        assert any("names of experts were not checked" in note for note in notes) is said_so


KNOWN = ClassNames(
    "XForCausalLM",
    ("model.layers",),
    {f"mlp.experts.{EXPERT}.gate_proj": "any", f"mlp.experts.{EXPERT}.up_proj": "any",
     f"mlp.experts.{EXPERT}.w13": "halves"},
    {"mlp.experts.gate_up_proj": "either", "mlp.experts.w2": "as-is", "mlp.experts.w2_packed": "as-is",
     "mlp.experts.w13_blocks": "interleaved"},
)  # fmt: skip


@pytest.mark.parametrize(
    ("path", "order", "problem"),
    [
        (f"mlp.experts.{EXPERT}.gate_proj", "interleaved", None),
        (f"mlp.experts.{EXPERT}.w13", "halves", None),
        (f"mlp.experts.{EXPERT}.w13", None, None),
        (f"mlp.experts.{EXPERT}.w13", "interleaved", "takes the rows of .* as halves, and they are interleaved"),
        ("mlp.experts.gate_up_proj", "halves", None),
        ("mlp.experts.gate_up_proj", "transposed", None),
        ("mlp.experts.gate_up_proj", "interleaved", "as either, and they are interleaved"),
        ("mlp.experts.w2", "interleaved", None),
        ("mlp.experts.w13_blocks", "halves", "as interleaved, and they are halves"),
        # A name nobody asked the class about is unknown; one that it was asked about and has no answer for is refused.
        ("mlp.experts.strange", "halves", None),
        ("mlp.experts.gate_up_proj.qweight", "halves", "does not load mlp.experts.gate_up_proj.qweight, but"),
        ("moe.w2_packed", "halves", "does not load moe.w2_packed, but"),
        (f"moe.{EXPERT}.up_proj", "halves", "does not load"),
    ],
)
def test_one_name_of_a_class(path: str, order: str | None, problem: str | None) -> None:
    fine = StoredName(f"mlp.experts.{EXPERT}.up_proj")
    said = KNOWN.problem([fine, StoredName(path, order)])
    if problem is None:
        assert said is None
        return
    assert said is not None
    assert said.startswith("XForCausalLM ")
    assert re.search(problem, said)
    if "does not load" in problem:  # stacked names with an end of their own are left out where plain ones tell as much
        assert said.endswith(
            f"but mlp.experts.{EXPERT}.{{gate_proj, up_proj, w13}} or mlp.experts.{{gate_up_proj, w2}}"
        )

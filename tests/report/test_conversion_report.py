"""Model card and job summary: facts off the manifest, hostile names and front matter kept harmless."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from moeq.checkpoint.manifest import Manifest, read_manifest
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.pipeline.convert import Conversion, convert
from moeq.report.conversion_facts import conversion_facts, render_failure, render_summary
from moeq.report.publishing import KEPT_FIELDS, CardOptions, read_front_matter, render_card

OPTIONS = CardOptions("org/name", "org/source", 1 << 20, None, {})


@pytest.fixture(scope="module")
def by_rank(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    """Written rank by rank: two packings of every matrix."""
    out = tmp_path_factory.mktemp("facts") / "out"
    deployment = Deployment(gpu=parse_gpu("B200"), tp=2)
    return convert(checkpoints / "mxfp4-gptoss", out, deployment, layout="trtllm-mxfp4/1", force_layout=True)


@pytest.fixture(scope="module")
def manifest(by_rank: Conversion) -> Manifest:
    return read_manifest(by_rank.destination)


def test_facts(manifest: Manifest) -> None:
    facts = conversion_facts(manifest)
    assert (facts.layers, facts.experts, facts.layouts) == ("0-1", 4, ("trtllm-mxfp4/1",))
    assert (facts.scheme, conversion_facts(replace(manifest, model={})).scheme) == ("mxfp4 e2m1 g32 sym", "unknown")
    assert facts.packed == 2 * 2 * 4 * 2, "layers, roles, experts, ranks"
    assert facts.digests == 2 * 3 * 4
    assert facts.deployment == "B200, TP 2, bf16, vllm@0.33.0"
    layers = manifest.layers
    swapped = replace(layers[0], digests={**layers[0].digests, "gate": layers[0].digests["gate"][::-1]})
    assert conversion_facts(replace(manifest, layers=(swapped, layers[1]))).digest != facts.digest


def test_the_digest_of_all_digests_does_not_depend_on_the_layout(
    manifest: Manifest, checkpoints: Path, tmp_path: Path
) -> None:
    other = convert(checkpoints / "mxfp4-gptoss", tmp_path / "out", Deployment(gpu=parse_gpu("H100")))
    assert other.manifest
    assert conversion_facts(other.manifest).layouts != conversion_facts(manifest).layouts
    assert conversion_facts(other.manifest).digest == conversion_facts(manifest).digest


def test_job_summary(by_rank: Conversion, manifest: Manifest) -> None:
    text = render_summary("/secret/home/out", by_rank.plan, manifest, 2.0)
    assert text.startswith("### moeq convert: out\n")
    assert "secret" not in text
    assert "| source | mxfp4-gptoss |" in text
    assert "| proof | 32 of 32 packed matrices" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.replace("\\|", "").count("|") == 3 for line in rows), "two cells each"


@pytest.mark.parametrize(
    ("revision", "shown"), [(None, "name"), ("0123abcd", "org/name, revision 0123abcd")], ids=["folder", "Hub"]
)
def test_a_repository_is_named_whole_and_a_folder_by_its_last_part(
    by_rank: Conversion, manifest: Manifest, revision: str | None, shown: str
) -> None:
    named = replace(manifest, source=replace(manifest.source, name="org/name", revision=revision))
    assert f"| source | {shown} |" in render_summary("out", by_rank.plan, named, 1.0)


def test_a_name_stays_in_its_cell(by_rank: Conversion, manifest: Manifest) -> None:
    odd = replace(manifest, source=replace(manifest.source, name="a|b\n<img src=x>"))
    text = render_summary("out", by_rank.plan, odd, 1.0)
    assert "| source | a\\|b\\\\n&lt;img src=x> |" in text
    failed = render_failure("moeq convert", MoeqError("source.x", "a\nb | c", None))
    assert "| what | a b \\| c |" in failed


@pytest.mark.parametrize(
    ("card", "fields"),
    [
        (b"---\nlicense: mit\nbase_model: a/b\n---\ntext", {"license": "mit"}),
        (b"\xef\xbb\xbf---\r\nlicense: mit\r\n---\r\n", {"license": "mit"}),
        (b"---\nlicense: other\nlicense_name: x\nlicense_link: http://x\nlanguage: [en, de]\n---\n", None),
        (b"no front matter", {}),
        (b"---\nlicense: mit\nnever ended", {}),
        (b"---\nlicense: [unclosed\n---\n", {}),
        (b"---\n- a list\n---\n", {}),
        (
            b"---\nlicense: {a: 1}\nlanguage: [1, 2]\npipeline_tag: text-generation\n---\n",
            {"pipeline_tag": "text-generation"},
        ),
        (b"---\n!!python/object/apply:os.system ['true']\n---\n", {}),
        (b"---\nlicense: mit\n---\n" + b"\xff" * 100, {"license": "mit"}),
        (b"", {}),
    ],
)
def test_fields_of_the_source_card(manifest: Manifest, card: bytes, fields: dict[str, object] | None) -> None:
    found = read_front_matter(card)
    text = render_card(manifest, replace(OPTIONS, source_fields=found))
    front = yaml.safe_load(text.split("---\n")[1])
    kept = {name: value for name, value in front.items() if name in KEPT_FIELDS}
    assert kept == (found if fields is None else fields)
    assert front["base_model"] == "org/source"
    assert front["base_model_relation"] == "quantized"


def test_a_long_field_of_the_source_card_stays_one_line(manifest: Manifest) -> None:
    name = " ".join(["words"] * 500)
    lines = render_card(manifest, replace(OPTIONS, source_fields={"license_name": name})).splitlines()
    assert f"license_name: {name}" in lines


def test_fields_of_the_source_card_come_first_and_as_they_are(manifest: Manifest) -> None:
    text = render_card(manifest, replace(OPTIONS, source_fields={"license": "other", "license_name": "Größe"}))
    assert text.startswith("---\nlicense: other\nlicense_name: Größe\nbase_model: org/source\n")


def test_a_lossy_conversion_says_so(manifest: Manifest) -> None:
    lossy = replace(manifest, layers=(replace(manifest.layers[0], losses=7), manifest.layers[1]))
    text = render_card(lossy, OPTIONS)
    assert "7 stored numbers were changed by the layout" in text
    assert "No number was changed" not in text
    assert "No number was changed" in render_card(manifest, OPTIONS)


def test_a_source_that_is_not_on_the_hub(manifest: Manifest) -> None:
    text = render_card(manifest, replace(OPTIONS, base_model=None))
    assert "base_model" not in text
    assert "| source | not on the Hub |" in text
    assert "moeq verify model  " in text

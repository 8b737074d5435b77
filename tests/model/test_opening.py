"""What a name opens, and what is said of sources without experts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeq import model
from moeq.checkpoint.facts import Facts
from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.model import describe
from moeq.model.checkpoint import _not_moe
from moeq.model.expert_kinds import _refuse_unknown
from moeq.model.regroup import repeat_groups, ungroup
from moeq.model.stored_parts import interleaved


@pytest.mark.parametrize(
    ("first", "second", "opened"),
    [
        (None, None, "safetensors"),
        ("source.no-config", None, "gguf"),
        ("source.no-weights", None, "gguf"),
        ("environment.hub", None, "environment.hub"),
        ("source.no-weights", "source.no-weights", "source.no-weights"),
        ("source.no-config", "source.no-weights", "source.no-config"),  # neither kind: the first reason
        ("source.no-config", "source.bad-header", "source.bad-header"),
    ],
)
def test_a_repository_is_opened_by_the_files_that_it_has(
    first: str | None, second: str | None, opened: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str, str | None]] = []

    def opening(kind: str, code: str | None) -> Any:
        def call(text: str, revision: str | None) -> str:
            asked.append((kind, text, revision))
            if code is not None:
                raise MoeqError(code, kind)
            return kind

        return call

    monkeypatch.setattr(model, "open_repository", opening("safetensors", first))
    monkeypatch.setattr(model, "open_gguf_repository", opening("gguf", second))
    try:
        found = str(model._repository("org/tiny", "abc"))
    except MoeqError as error:
        found = error.code
    assert found == opened
    kinds = ["safetensors"] if first in (None, "environment.hub") else ["safetensors", "gguf"]
    assert asked == [(kind, "org/tiny", "abc") for kind in kinds]


def test_a_revision_is_of_a_repository(tmp_path: Path) -> None:
    with pytest.raises(MoeqError, match=r"'abc' names a revision of a Hub repository, and .* is a path") as caught:
        model.open(tmp_path, revision="abc")
    assert caught.value.code == "usage.revision-of-path"


@pytest.mark.parametrize(
    ("experts", "refusal", "code", "said"),
    [
        (None, None, "answer.not-moe", "a: no routed experts among 2 tensors, and its config declares no experts"),
        (None, "no way", "answer.not-moe", "its config declares no experts"),
        (8, None, "source.not-moe", "its config declares 8 experts"),
        (8, "no way", "source.unsupported-format", "a: no way (config.json)"),
    ],
)
def test_sources_without_experts(experts: int | None, refusal: str | None, code: str, said: str) -> None:
    source: Any = SimpleNamespace(name="a", tensors={"x": 1, "y": 2})
    facts: Any = SimpleNamespace(experts=lambda: experts)
    declaration: Any = SimpleNamespace(refusal=refusal, origin="config.json")
    error = _not_moe(source, facts, declaration)
    assert error.code == code
    assert said in error.message
    if refusal is None:
        assert _not_moe(source, facts, None).code == code


@pytest.mark.parametrize("method", [None, "gptq"])
def test_tensors_of_no_known_format_are_shown(method: str | None) -> None:
    parts: Any = {"b": SimpleNamespace(dtype="U8", shape=(2, 3)), "a": SimpleNamespace(dtype="F16", shape=(4,))}
    declared = "the config says gptq, and " if method else ""
    with pytest.raises(MoeqError) as caught:
        _refuse_unknown("m", parts, method)
    expected = f"m: {declared}no format that moeq knows has the tensors a F16[4], b U8[2, 3]"
    assert (caught.value.code, caught.value.message) == ("source.unsupported-format", expected)


def matrix(groups: int, group: int, zeros: bool, k: int = 96) -> QuantizedMatrix:
    spec = MatrixSpec("w2", 2, k, "int4", group, "f32", symmetric=not zeros)
    scales = torch.arange(2.0 * groups).view(2, groups)
    return QuantizedMatrix(
        spec, torch.zeros(2, k, dtype=torch.uint8), scales, scales.to(torch.uint8) if zeros else None
    )


@pytest.mark.parametrize("zeros", [False, True])
def test_groups_are_cut_and_joined_again(zeros: bool) -> None:
    """The last of two groups of 64 has 32 columns: it becomes one group of 32."""
    whole = matrix(2, 64, zeros)
    cut = repeat_groups(whole, matrix(3, 32, zeros).spec)
    assert cut.scales.tolist() == [[0.0, 0.0, 1.0], [2.0, 2.0, 3.0]]
    assert (cut.zeros is not None) is zeros
    assert cut.zeros is None or cut.zeros.tolist() == cut.scales.tolist()
    joined = ungroup(cut, 64)
    assert joined.spec == whole.spec
    assert torch.equal(joined.scales, whole.scales)
    assert joined.zeros is None or torch.equal(joined.zeros, whole.zeros)
    assert ungroup(cut, None) is cut
    for part in ("scales", "zeros") if zeros else ("scales",):
        damaged = repeat_groups(whole, cut.spec)
        getattr(damaged, part)[1, 1] += 1
        with pytest.raises(
            MoeqError, match="w2: parts of a group of 64 have different scales or zero points"
        ) as caught:
            ungroup(damaged, 64)
        assert caught.value.code == "source.regrouped"


def test_gate_and_up_are_interleaved() -> None:
    spec = MatrixSpec("w13", 6, 32, "int4", 32, "f32")
    codes = torch.arange(6, dtype=torch.uint8).view(6, 1).expand(6, 32)
    found = interleaved(QuantizedMatrix(spec, codes, torch.arange(6.0).view(6, 1), None))
    assert found.codes[:, 0].tolist() == [0, 3, 1, 4, 2, 5]
    assert found.scales[:, 0].tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]


@pytest.mark.parametrize(
    ("config", "hidden", "inner", "latent"),
    [
        ({"hidden_size": 64, "moe_intermediate_size": 32}, 64, 32, 64),
        ({"hidden_size": 64, "moe_intermediate_size": 32, "moe_latent_size": 16}, 64, 32, 16),
        ({"moe_intermediate_size": 32}, 0, 32, 0),
        ({"hidden_size": 64}, 64, 0, 64),
    ],
)
def test_sizes_of_formats_that_are_not_read_are_the_configs(
    config: dict[str, int], hidden: int, inner: int, latent: int
) -> None:
    specs = {"w2": MatrixSpec("w2", 1, 2, "int4", 32, "f16"), "up": MatrixSpec("up", 3, 4, "int4", 32, "f16")}
    kind: Any = SimpleNamespace(spec=specs.get, scheme=SimpleNamespace(format="foreign"))
    family: Any = SimpleNamespace(intermediate_keys=("moe_intermediate_size",))
    down, up = describe.sizes(kind, family, Facts(config))
    assert (down.n, down.k, up.n, up.k) == (hidden, inner, inner, latent)
    kind.scheme.format = "gptq"
    assert describe.sizes(kind, family, Facts(config)) == (specs["w2"], specs["up"])

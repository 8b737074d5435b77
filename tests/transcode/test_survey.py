"""What does not fit a target is refused with the module, the arithmetic and the nearest thing that works."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint.builder import Stored, Tensors, config, ct, ct_config, experts, gptq, quantization, router, write

from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec
from moeq.schemes.registry import read_dialect
from moeq.transcode.survey import TranscodeRequest, _check_regroup, _whole_groups
from moeq.transcode.transcode import open_transcode
from moeq.transcode.transcode_plan import _as_read

WHERE = "model.layers.0.mlp.experts"


def refusal(src: Path, to: str, **asked: Any) -> tuple[str, str, str | None]:
    with pytest.raises(MoeqError) as caught:
        open_transcode(TranscodeRequest(str(src), to, **asked))
    return caught.value.code, caught.value.message, caught.value.hint


def spec(k: int, group: int, **more: Any) -> MatrixSpec:
    return MatrixSpec("down", 8, k, "int4", group, "f16", symmetric=True, **more)


@pytest.mark.parametrize(
    ("group", "asked", "hint"),
    [(128, 96, "regroup=128 or regroup=64 or regroup=32 or regroup=16"), (32, 64, "regroup=32 or regroup=16")],
)
def test_groups_that_are_not_made_of_smaller_ones(group: int, asked: int, hint: str) -> None:
    with pytest.raises(MoeqError) as caught:
        _check_regroup(spec(256, group), asked, "down")
    assert (caught.value.code, caught.value.hint) == ("usage.regroup", hint)
    times = f"{group} / {asked} = {group / asked:g}"
    assert caught.value.message == f"down: groups of {group} are not made of whole groups of {asked} ({times})"


def test_columns_in_activation_order_have_no_smaller_groups() -> None:
    _check_regroup(spec(256, 128), 64, "down")
    with pytest.raises(MoeqError, match="columns are assigned to groups in activation order") as caught:
        _check_regroup(spec(256, 128, act_order=True), 64, "down")
    assert caught.value.hint == "leave out regroup"


@pytest.mark.parametrize(
    ("k", "group", "declared", "expected"),
    [(256, 128, 128, 128), (192, 128, -1, -1), (64, 64, 128, 64), (192, 128, 128, "1.5"), (40, 16, 16, "2.5")],
)
def test_readers_of_compressed_tensors_take_whole_groups(k: int, group: int, declared: int, expected: Any) -> None:
    """A projection narrower than a group is one group of its own size."""
    if not isinstance(expected, str):
        assert _whole_groups(spec(k, group), declared, "down") == expected
        return
    with pytest.raises(MoeqError, match=f"down: K={k} is {expected} groups of {group}, and readers") as caught:
        _whole_groups(spec(k, group), declared, "down")
    assert caught.value.hint == {192: "regroup=64", 40: "regroup=8"}[k]


def test_a_number_of_columns_without_common_groups() -> None:
    with pytest.raises(MoeqError, match=r"K=36 is 1\.125 groups of 32") as caught:
        _whole_groups(spec(36, 32), 32, "down")
    assert caught.value.hint is None


def test_options_that_do_not_fit_the_target(tmp_path: Path) -> None:
    made = write(tmp_path / "made", {**router(), **experts()})
    code, message, hint = refusal(made, "fp8", regroup=16, allow_lossy=True)
    assert (code, hint) == ("usage.regroup", "leave out regroup")
    assert "becomes fp8" in message
    assert message.endswith("whose groups have one size; regroup is for integer codes")
    code, message, hint = refusal(made, "compressed-tensors", names="stacked", sort_act_order=True)
    assert (code, message) == ("usage.names", 'sort_act_order=True cannot be combined with names="stacked"')
    assert hint == 'names="per-expert"'


def test_act_order_that_compressed_tensors_dropped(tmp_path: Path) -> None:
    document = config(quantization_config=quantization(desc_act=True))
    tensors = {**router(), **experts(make=lambda n, k: gptq(n, k) | {"g_idx": Stored("I32", (k,), order(k))})}
    code, message, hint = refusal(write(tmp_path, tensors, document), "compressed-tensors")
    assert code == "usage.act-order"
    assert "its columns are in activation order (g_idx)" in message
    assert hint == 'to="gptq_v2" keeps g_idx'


def order(k: int) -> bytes:
    groups = [column * (k // 32) // k for column in range(k)]
    return b"".join(group.to_bytes(4, "little") for group in reversed(groups))


def plain(n: int, k: int) -> Tensors:
    return {"weight": Stored("BF16", (n, k))}


def test_experts_that_are_quantised_in_several_ways(tmp_path: Path) -> None:
    table = ct_config()["quantization_config"]
    (group,) = table["config_groups"].values()
    wide = {**group, "targets": [r"re:.*experts\.1\..*"], "weights": {**group["weights"], "num_bits": 8}}
    table = {**table, "config_groups": {"group_0": group, "group_1": wide}}
    both = {**experts(make=ct(4)), **{n: t for n, t in experts(make=ct(8)).items() if ".1." in n}}
    made = write(tmp_path / "both", {**router(), **both}, config(quantization_config=table))
    code, message, hint = refusal(made, "compressed-tensors", names="stacked")
    assert (code, hint) == ("usage.mixed-experts", 'names="per-expert"')
    assert message == f"{WHERE}: its experts are quantised in 2 ways and cannot be stacked"


def test_a_checkpoint_without_quantised_modules(tmp_path: Path) -> None:
    made = write(tmp_path, {**router(), **experts(make=plain)}, config(quantization_config=None))
    code, message, hint = refusal(made, "fp8")
    assert (code, hint) == ("source.not-quantized", "there is nothing to do")
    assert message.endswith("nothing in it is quantised")


def test_a_config_that_would_be_misread_is_a_bug(checkpoints: Path) -> None:
    """What is written is described as a reader describes it: by its headers together with the config."""
    plan = open_transcode(TranscodeRequest(str(checkpoints / "gptq-int4-g32-qwen3moe"), "compressed-tensors")).plan
    assert plan.config is not None
    declaration = read_dialect("compressed-tensors", plan.config, "written config")
    (projected, _), described = next(iter(plan.described.items()))
    module = f"{WHERE}.0.gate_proj"
    assert _as_read(projected, module, declaration) == described
    for wrong, declared in (
        (projected, replace(declaration, resolve=lambda module: None)),
        (replace(projected, spelling="gptq"), None),
    ):
        with pytest.raises(MoeqError, match="the config to be written does not describe it as") as caught:
            _as_read(wrong, module, declared)
        assert caught.value.code == "bug.config"
        assert str(wrong.spec) in caught.value.message

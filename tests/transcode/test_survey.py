"""What does not fit a target is refused with the module, the arithmetic and the nearest thing that works."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint.builder import Stored, Tensors, config, ct, ct_config, experts, gptq, quantization, router, write

from moeq.checkpoint.header import TensorEntry
from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec
from moeq.model import open as open_checkpoint
from moeq.model.quantized_modules import QuantizedModule
from moeq.schemes.base import QuantKey, ScaleKey, Scheme
from moeq.schemes.format import Described
from moeq.schemes.registry import read_dialect
from moeq.transcode.survey import (
    TranscodeRequest,
    _check_regroup,
    _contents,
    _plain_modules,
    _stays_float,
    _whole_groups,
)
from moeq.transcode.target_formats import TARGETS
from moeq.transcode.transcode import open_transcode
from moeq.transcode.transcode_plan import _as_read, make_transcode_plan

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
    [
        (256, 128, 128, 128),
        (192, 128, -1, -1),
        (64, 64, 128, 64),
        (192, 128, 128, "1.5"),
        (40, 16, 16, "2.5"),
        (96, 64, 64, "1.5"),
        (48, 32, 32, "1.5"),
    ],
)
def test_readers_of_compressed_tensors_take_whole_groups(k: int, group: int, declared: int, expected: Any) -> None:
    """A projection narrower than a group is one group of its own size."""
    if not isinstance(expected, str):
        assert _whole_groups(spec(k, group), declared, "down") == expected
        return
    with pytest.raises(MoeqError, match=f"down: K={k} is {expected} groups of {group}, and readers") as caught:
        _whole_groups(spec(k, group), declared, "down")
    assert caught.value.hint == {192: "regroup=64", 40: "regroup=8", 96: "regroup=32", 48: "regroup=16"}[k]


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


def test_experts_that_are_quantised_in_part(tmp_path: Path) -> None:
    """Opening a checkpoint refuses them, except in layers that predict further tokens."""
    table = {**ct_config()["quantization_config"], "ignore": [r"re:.*layers\.1\..*experts\.1\..*"]}
    further = "model.layers.1.mlp.experts"
    mixed = {name: one for name, one in experts(further, make=ct(4)).items() if f"{further}.0." in name}
    mixed |= {name: one for name, one in experts(further, make=plain).items() if f"{further}.1." in name}
    document = config(quantization_config=table)
    made = write(tmp_path, {**router(), **experts(make=ct(4)), **mixed}, document)
    code, message, hint = refusal(made, "compressed-tensors")
    assert (code, hint) == ("usage.mixed-experts", "re-quantise the layer with one scheme for all its experts")
    assert message == f"{further}: expert 1 is not quantised, others are"


def large(folder: Path) -> Path:
    sizes = {"hidden": 512, "intermediate": 1024}
    document = config(hidden_size=512, moe_intermediate_size=1024)
    return write(folder, {**router(), **experts(**sizes)}, document)  # type: ignore[arg-type]


@pytest.mark.parametrize("numa", [0, 9])
def test_nodes_that_experts_are_not_cut_for(tmp_path: Path, numa: int) -> None:
    made = large(tmp_path)
    code, message, hint = refusal(made, "kt-amx-int4", numa=numa)
    assert (code, message, hint) == ("usage.target", f"numa={numa}: experts are cut for 1 to 8 NUMA nodes", None)


@pytest.mark.parametrize("numa", [1, 8])
def test_nodes_that_experts_are_cut_for(tmp_path: Path, numa: int) -> None:
    made = large(tmp_path)
    plan = make_transcode_plan(open_checkpoint(made), TranscodeRequest(str(made), "kt-amx-int4", numa=numa))
    assert {projected.spelling for projected, _ in plan.described} == {f"kt-amx-int4/{numa}"}


@pytest.mark.parametrize(("target", "told"), [("kt-amx-int4", True), ("expert-pack", False)])
def test_a_bias_that_a_target_has_no_place_for(tmp_path: Path, target: str, told: bool) -> None:
    make = gptq if told else None

    def biased(n: int, k: int) -> Tensors:
        weight: Tensors = gptq(n, k) if make else mxfp4(n, k)
        return {**weight, "bias": Stored("F16" if make else "BF16", (n,))}

    def mxfp4(n: int, k: int) -> Tensors:
        return {"weight_packed": Stored("U8", (n, k // 2)), "weight_scale": Stored("U8", (n, k // 32))}

    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    table = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**weights, "scale_dtype": "torch.uint8"}}},
    }
    document = config() if told else config(quantization_config=table, model_type="deepseek_v4")
    code, message, _ = refusal(write(tmp_path, {**router(), **experts(make=biased)}, document), target)
    assert code == "usage.target"
    reason = ": ktransformers' kernels take weights, scales and zero points alone" if told else ""
    assert message == f'{WHERE} expert 0 gate has a bias, and to="{target}" has no place for it{reason}'


def test_models_that_a_target_is_not_for(tmp_path: Path) -> None:
    code, message, hint = refusal(write(tmp_path), "deepseek-v4")
    assert (code, hint) == ("usage.target", 'to="compressed-tensors"')
    assert message == f'to="deepseek-v4" is read by deepseek_v4, deepseek_ref only; {tmp_path} is qwen3_moe'


def stored(name: str, *shape: int) -> TensorEntry:
    return TensorEntry(name, "BF16", shape, "f", 0, 0)


def test_linear_modules_that_are_not_quantised() -> None:
    """Modules with a matrix that multiplies; embeddings, norms and convolutions are none."""
    names = ("embed_tokens", "wte", "tok_embeddings", "q_norm", "conv1d", "rotary_emb", "q_proj", "lm_head")
    entries = [stored(f"model.{name}.weight", 2, 2) for name in names]
    entries += [stored("model.gate.bias", 2, 2), stored("model.up.weight", 2), stored("model.down.weight", 2, 2, 2)]
    entries += [stored("embed.proj.weight", 2, 2)]
    assert list(_plain_modules(tuple(entries))) == ["model.q_proj", "model.lm_head", "embed.proj"]


@pytest.mark.parametrize(
    ("name", "stored_as", "target", "stays"),
    [
        ("model.q_proj", "gguf", "compressed-tensors", False),
        ("model.q_proj", "gguf", "nvfp4", True),
        ("model.embed_tokens", "gguf", "compressed-tensors", True),
        ("lm_head", "gguf", "compressed-tensors", True),
        ("lm_head.inner", "hqq", "compressed-tensors", False),
        ("lm_head", "hqq", "compressed-tensors", True),
        ("lm_head", "bitsandbytes-4bit", "compressed-tensors", True),
        ("lm_head", "gptq", "compressed-tensors", False),
        ("model.q_proj", "gptq", "nvfp4", False),
    ],
)
def test_modules_that_become_floats(name: str, stored_as: str, target: str, stays: bool) -> None:
    key = QuantKey("int4", "", ScaleKey("f16", "group", (1, 32)))
    module = QuantizedModule(name, {}, Described(Scheme(stored_as, key), spec(64, 32)))
    assert _stays_float(module, TARGETS[target]) is stays


def test_a_projection_goes_to_another_process(checkpoints: Path) -> None:
    """Its hash is not sent: strings have another one there."""
    plan = make_transcode_plan(
        open_checkpoint(checkpoints / "modelopt-nvfp4-qwen3moe"), TranscodeRequest("src", "modelopt")
    )
    one = next(projected for projected, _ in plan.described if projected.activation)
    assert hash(one) == hash(replace(one))
    assert one.activation is not None
    assert hash(one) != hash(replace(one, activation=None))
    state = one.__getstate__()
    assert set(state) >= {"source", "spelling", "spec", "weights", "activation"}
    assert "_hash" not in state
    again = pickle.loads(pickle.dumps(one))
    assert again == one
    assert vars(again).keys() == state.keys()
    assert one.activation.target in one.signatures
    assert one.activation.target not in replace(one, activation=None).signatures


def test_the_most_used_way_comes_first(checkpoints: Path) -> None:
    """A module that is named twice, as shapes of stacks are, counts once; those that become floats do not."""
    plan = make_transcode_plan(
        open_checkpoint(checkpoints / "gptq-int4-g128-mixtral"), TranscodeRequest("src", "compressed-tensors")
    )
    contents = plan.survey.contents
    counts = [len(names) for names in contents.quantised.values()]
    assert counts == sorted(counts, reverse=True)
    assert len(counts) == 2
    every = [name for names in contents.quantised.values() for name in names]
    assert len(every) == len(set(every))
    modules = [module.written for module in plan.survey.modules]
    assert set(modules) <= set(every)
    fewer = _contents(plan.survey.layers, plan.survey.modules[:1], ("lm_head",))
    assert [len(names) for names in fewer.quantised.values()][-1] == 1 or len(fewer.quantised) == 1
    assert fewer.plain == ("lm_head",)
    floats = [replace(one, projected=replace(one.projected, spelling="plain")) for one in plan.survey.modules]
    assert not _contents((), floats, ()).quantised

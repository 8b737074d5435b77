"""What `inspect` says about the example checkpoints, which well-known tools wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoint.builder import Stored, config, experts, gptq, quantization, router, write

import moeq
from moeq.model.quantized_modules import quantized_linears, quantized_modules
from moeq.model.scan import scan

CHECKPOINTS = Path(__file__).parents[1] / "data" / "checkpoints"

QWEN, MIXTRAL = "Qwen3-MoE", "Mixtral"

# name: family, title of the scheme, writer, zero points, parts of the model with quantised modules, warnings
EXPECTED = {
    "awq-int4-g32-qwen3moe": (QWEN, "awq int4 g32 asym", "auto-round", "stored", {"experts", "attention"}, set()),
    "ct-int4-asym-g32-mixtral": (
        MIXTRAL,
        "ct-pack int4 g32 asym",
        "compressed-tensors 0.19.0",
        "stored",
        {"experts"},
        set(),
    ),
    "ct-int4-g128-qwen3moe": (QWEN, "ct-pack int4 g128 sym", "compressed-tensors 0.19.0", "none", {"experts"}, set()),
    "ct-mxfp4-qwen3moe": (QWEN, "ct-mxfp4 e2m1 g32 sym", "compressed-tensors 0.19.0", "none", {"experts"}, set()),
    "ct-w8a8-qwen3moe": (
        QWEN,
        "ct-int8 int8 channel sym act-int8",
        "compressed-tensors 0.19.0",
        "none",
        {"experts"},
        set(),
    ),
    "gptq-int4-g128-mixtral": (
        MIXTRAL,
        "gptq int4 g128 sym",
        "gptqmodel:7.2.0",
        "stored-minus-one",
        {"experts", "attention"},
        set(),
    ),
    "gptq-int4-g32-actorder-qwen3moe": (
        QWEN,
        "gptq int4 g32 sym act-order",
        "gptqmodel:7.2.0",
        "stored-minus-one",
        {"experts", "attention"},
        {"scheme.act-order"},
    ),
    "gptq-int4-g32-qwen3moe": (
        QWEN,
        "gptq int4 g32 sym",
        "gptqmodel:7.2.0",
        "stored-minus-one",
        {"experts", "attention"},
        set(),
    ),
    "gptq-int8-g64-qwen3moe": (
        QWEN,
        "gptq int8 g64 sym",
        "gptqmodel:7.2.0",
        "stored-minus-one",
        {"experts", "attention"},
        set(),
    ),
    "mxfp4-gptoss": ("gpt-oss", "mxfp4 e2m1 g32 sym", None, "none", {"experts"}, {"scheme.bias"}),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_info(name: str) -> None:
    family, title, writer, zeros, quantized, warnings = EXPECTED[name]
    info = moeq.open(CHECKPOINTS / name).info
    [use] = info.schemes
    assert (info.family, use.title, use.scheme.writer, use.scheme.zero_point) == (family, title, writer, zeros)
    assert (info.num_layers, info.moe_layers, info.num_experts, info.top_k) == (2, (0, 1), 4, 2)
    assert (info.hidden_size, info.intermediate_size, info.gated) == (256, 128, True)
    assert {part.part for part in info.modules if part.quantized} == quantized
    assert {warning.code for warning in info.warnings} == warnings
    assert info.convertible
    assert (use.experts, use.layers) == (8, (0, 1))
    folder_size = sum(file.stat().st_size for file in (CHECKPOINTS / name).glob("*.safetensors"))
    assert 0 < folder_size - info.expert_bytes - info.other_bytes < 30_000, "the rest is headers"


@pytest.mark.parametrize("name", EXPECTED)
def test_json_form_is_plain_data(name: str) -> None:
    document = moeq.open(CHECKPOINTS / name).info.to_json()
    assert json.loads(json.dumps(document, allow_nan=False))["schemes"][0]["scheme"]["weight"]["dtype"]
    assert document["convertible"] is True


@pytest.mark.parametrize("name", EXPECTED)
def test_scan_finds_nothing_but_the_act_order(name: str) -> None:
    seen: list[tuple[int, int]] = []
    warnings = scan(moeq.open(CHECKPOINTS / name), lambda done, total: seen.append((done, total)))
    assert {warning.code for warning in warnings} == ({"data.act-order"} if "actorder" in name else set())
    assert seen == [(0, 2), (1, 2), (2, 2)]


def test_expert_names_are_exactly_the_expert_tensors() -> None:
    source = moeq.open(CHECKPOINTS / "mxfp4-gptoss").source
    assert source.expert_names == {name for name in source.tensors if ".experts." in name}
    assert source.side_files() == ("config.json",)


def test_identity_changes_with_the_files(tmp_path: Path) -> None:
    original = CHECKPOINTS / "gptq-int4-g32-qwen3moe"
    for file in original.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert moeq.open(tmp_path).source.identity() == moeq.open(original).source.identity()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": 1}))
    assert moeq.open(tmp_path).source.identity() != moeq.open(original).source.identity()


def test_reads_are_exact(tmp_path: Path) -> None:
    import torch

    safetensors = pytest.importorskip("safetensors")
    path = CHECKPOINTS / "mxfp4-gptoss" / "model-00001-of-00002.safetensors"
    source = moeq.open(path.parent).source
    with safetensors.safe_open(path, framework="pt") as reader:
        for name in reader.keys():  # noqa: SIM118 - not a mapping
            expected = reader.get_tensor(name)
            assert torch.equal(source.read(name), expected)
            assert torch.equal(source.read_row(source.entry(name), 0), expected[0])
    with pytest.raises(moeq.MoeqError, match="no tensor"):
        source.read("ghost")


def test_asking_for_what_is_not_there() -> None:
    checkpoint = moeq.open(CHECKPOINTS / "gptq-int4-g32-qwen3moe")
    with pytest.raises(moeq.MoeqError) as caught:
        checkpoint.spec(9, "w13")
    assert caught.value.code == "usage.no-such-layer"
    with pytest.raises(moeq.MoeqError) as caught:
        checkpoint.matrix(0, 4, "w13")
    assert caught.value.code == "usage.no-such-expert"


def test_quantization_config_is_found_wherever_it_is() -> None:
    checkpoint = moeq.open(CHECKPOINTS / "ct-w8a8-qwen3moe")
    assert checkpoint.quantization_config == checkpoint.source.config["quantization_config"]


def test_quantised_modules_without_a_declaration(tmp_path: Path) -> None:
    """Headers alone say that a module is quantised; nothing is declared about it."""
    attention = {f"model.layers.0.self_attn.q_proj.{part}": row for part, row in gptq(64, 64).items()}
    source = moeq.open(write(tmp_path / "a", {**router(), **attention, **experts()})).source
    (module,) = quantized_modules([source.tensors[name] for name in attention], None)
    assert (module.name, module.described.scheme.format) == ("model.layers.0.self_attn.q_proj", "gptq")
    assert (module.described.spec.n, module.described.spec.k) == (64, 64)


def test_linear_layers_that_cannot_be_decoded_or_have_another_size_are_refused(tmp_path: Path) -> None:
    def found(parts: dict[str, Stored], linears: dict[str, tuple[int, int]]) -> list[str]:
        source = moeq.open(write(tmp_path, {**router(), **parts, **experts()})).source
        return [one.name for one in quantized_linears([source.tensors[name] for name in parts], declared, linears)]

    declared = moeq.open(write(tmp_path, {**router(), **experts()})).declaration
    name = "model.layers.0.self_attn.q_proj"
    packed = {f"{name}.{part}": row for part, row in gptq(64, 32).items()}
    assert found(packed, {name: (64, 32)}) == [name]
    assert found(packed, {}) == []
    assert found({f"{name}.weight": Stored("BF16", (32, 64))}, {name: (32, 64)}) == []
    assert found({f"{name}.bias": Stored("BF16", (32,))}, {name: (32, 64)}) == []
    with pytest.raises(moeq.MoeqError, match=r"is stored as \[64, 32\], and the model has \[64, 64\]") as caught:
        found(packed, {name: (64, 64)})
    assert caught.value.code == "source.inconsistent"
    with pytest.raises(moeq.MoeqError, match=r"cannot decode: weight I8\[32, 64\]") as caught:
        found({f"{name}.weight": Stored("I8", (32, 64))}, {name: (32, 64)})
    assert caught.value.code == "source.unsupported-format"


def test_bytes_of_a_part_are_those_of_its_tensors() -> None:
    checkpoint = moeq.open(CHECKPOINTS / "gptq-int4-g32-qwen3moe")
    sizes = {use.part: use.bytes for use in checkpoint.info.modules}
    tensors = checkpoint.source.tensors
    assert sizes["lm_head"] == tensors["lm_head.weight"].nbytes
    assert sizes["router"] == sum(tensors[f"model.layers.{layer}.mlp.gate.weight"].nbytes for layer in (0, 1))


def test_layers_are_counted_where_the_config_does_not_say(tmp_path: Path) -> None:
    tensors = {
        **router(0),
        **router(2),
        **experts("model.layers.0.mlp.experts"),
        **experts("model.layers.2.mlp.experts"),
    }
    info = moeq.open(write(tmp_path / "a", tensors, config(num_hidden_layers=None))).info
    assert (info.num_layers, info.moe_layers, info.dense_layers) == (3, (0, 2), (1,))


@pytest.mark.parametrize(("down", "mixed"), [(32, False), (16, True)])
def test_two_schemes_in_a_layer_are_a_warning(down: int, mixed: bool, tmp_path: Path) -> None:
    tensors = {**router(), **experts()}
    for name in [name for name in tensors if "down_proj" in name]:
        del tensors[name]
    tensors |= experts(names=("", "", "down_proj"), group=down)
    rules = {r"+:.*down_proj.*": {"group_size": down}}
    document = config(quantization_config=quantization(group_size=32, dynamic=rules))
    tensors |= {name: row for name, row in experts(names=("gate_proj", "up_proj", ""), group=32).items()}
    info = moeq.open(write(tmp_path / "a", tensors, document)).info
    assert len(info.schemes) == (2 if mixed else 1)
    assert ("scheme.mixed-layer" in {warning.code for warning in info.warnings}) == mixed

"""Single conditions under which vLLM loads linear modules that are no experts; whole checkpoints: `test_router.py`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import stored
from pipeline.test_router import CT, FP8, ROUTER, attention, refusal

import moeq
from moeq.checkpoint.header import TensorEntry
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.oracle.engines.vllm.case import Method
from moeq.oracle.engines.vllm.linears import LinearModule
from moeq.pipeline.plan.layer_verdict import judge_checkpoint
from moeq.pipeline.plan.linear_modules import _features, _load_faults, _Loading, _no_kernel, _Shard

GPTQ = Method("GPTQMarlinLinearMethod", "gptq", "gptq", "int4", bits=4, group_size=128, act_order=True)


def shard(meant: Any = True, stored: bool = True, name: str = "x", **parts: tuple[str, tuple[int, ...]]) -> _Shard:
    entries = [TensorEntry(f"{name}.{part}", dtype, shape, "f", 0, 0) for part, (dtype, shape) in parts.items()]
    return _Shard(name, entries, stored, meant)


@pytest.mark.parametrize(
    ("parts", "features"),
    [
        ({"scales": ("F16", (4, 96)), "qweight": ("I32", (64, 96))}, 96),
        ({"scales": ("F16", ())}, 1),
        ({"weight": ("F8_E4M3", (96, 64))}, 96),
        ({"weight": ("F8_E4M3", ())}, 1),
        ({"weight_packed": ("I32", (96, 8)), "weight_shape": ("I64", (2,))}, 96),
        ({"weight": ("I32", (64, 12)), "weight_scale": ("F16", (2, 96))}, None),
        ({"qweight": ("I32", (64, 96))}, None),
    ],
)
def test_output_features(parts: dict[str, tuple[str, tuple[int, ...]]], features: int | None) -> None:
    """Quark's int4 lies transposed, and words do not tell how many features they hold."""
    assert _features(shard(**parts)) == features


def kernel_problem(n: int, k: int, gpu: str = "A100", tp: int = 1, split: str = "row", **change: Any) -> str | None:
    part = {"scales": ("F16", (1, n)), "qweight": ("I32", (k // 8, n))}
    if change.pop("packed", False):
        part = {"weight_packed": ("I32", (n, k // 8))}
    method = Method(**{**vars(GPTQ), **change})
    linear = LinearModule("self_attn.o_proj", ("self_attn.o_proj",), True, split)
    found = list(_no_kernel(Deployment(parse_gpu(gpu), tp=tp), linear, "l.", [shard(method, **part)]))
    assert len(found) < 2
    return found[0][0].partition(" with ")[2] if found else None


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"n": 64, "k": 128}, None),
        ({"n": 96, "k": 128}, "[96, 128] on a rank of tp 1"),
        ({"n": 64, "k": 192}, "[64, 192] on a rank of tp 1"),
        ({"n": 64, "k": 192, "packed": True}, "[64, 192] on a rank of tp 1"),
        ({"n": 64, "k": 96, "bits": 8}, "[64, 48] on a rank of tp 1"),
        ({"n": 64, "k": 192, "act_order": False}, None),
        ({"n": 64, "k": 192, "bits": None}, None),
        ({"n": 64, "k": 192, "gpu": "MI300X"}, None),
        ({"n": 64, "k": 256, "tp": 2}, None),
        ({"n": 64, "k": 128, "tp": 2}, "[64, 64] on a rank of tp 2"),
        ({"n": 128, "k": 128, "tp": 2, "split": "column"}, None),
        ({"n": 64, "k": 128, "tp": 2, "split": "column"}, "[32, 128] on a rank of tp 2"),
        ({"n": 64, "k": 128, "tp": 2, "split": "whole"}, None),
        # Hopper's other kernel has larger tiles of output features, and smaller ones of input features.
        ({"n": 128, "k": 192, "gpu": "H100"}, None),
        ({"n": 128, "k": 192, "gpu": "H100", "group_size": 64}, None),
        ({"n": 128, "k": 192, "gpu": "H100", "group_size": -1}, None),
        ({"n": 128, "k": 192, "gpu": "H100", "group_size": 32}, "[128, 192] on a rank of tp 1"),
        ({"n": 64, "k": 192, "gpu": "H100"}, "[64, 192] on a rank of tp 1"),
        ({"n": 192, "k": 192, "gpu": "H100"}, "[192, 192] on a rank of tp 1"),
        ({"n": 128, "k": 160, "gpu": "H100"}, "[128, 160] on a rank of tp 1"),
        ({"n": 128, "k": 192, "gpu": "B200"}, "[128, 192] on a rank of tp 1"),
        ({"n": 128, "k": 384, "gpu": "H100", "tp": 2}, "[128, 192] on a rank of tp 2"),
        ({"n": 128, "k": 192, "gpu": "H100", "tp": 2, "split": "whole"}, None),
        ({"n": 256, "k": 192, "gpu": "H100", "tp": 2, "split": "column"}, None),
    ],
)
def test_sizes_that_no_kernel_of_act_order_takes(asked: dict[str, Any], problem: str | None) -> None:
    assert kernel_problem(**asked) == problem


QUARK = Method("QuarkW8A8Fp8MoEMethod", "fp8", "quark", "fp8")
WEIGHT = {"weight": ("F8_E4M3", (8, 8))}


@pytest.mark.parametrize(
    ("given", "gpu", "said"),
    [
        (shard("its sizes are odd", **WEIGHT), "H100", "x: its sizes are odd"),
        (shard(True, stored=False, **WEIGHT), "H100", "the config quantises x (other), and the file holds F8_E4M3"),
        (shard(False, **WEIGHT), "H100", "x is quantised (weight), and the engine creates it as float numbers"),
        (shard(False, stored=False, **WEIGHT), "H100", None),
        (shard(True, **WEIGHT), "H100", None),
        (
            shard(QUARK, **WEIGHT),
            "A100",
            "x: Quark's FP8 outside experts needs compute capability 8.9, which A100 lacks",
        ),
        (shard(QUARK, **WEIGHT), "L4", None),
        (shard(QUARK, **WEIGHT), "MI300X", None),
    ],
)
def test_modules_that_are_stored_otherwise_than_meant(given: _Shard, gpu: str, said: str | None) -> None:
    found = [text for text, _ in _load_faults("0.33.0", given, parse_gpu(gpu)) if "cannot be loaded" not in text]
    assert found == ([] if said is None else [said])


def test_classes_that_nothing_is_known_of_are_not_judged(tmp_path: Path) -> None:
    """A quantised router is refused of classes that make it of floats, and of no others."""
    tensors = stored.experts("model.layers.0.mlp.experts", lambda e, p, n, k: stored.fp8_block(n, k))
    for part, (dtype, shape) in stored.fp8_block(stored.EXPERTS, stored.HIDDEN).items():
        tensors[f"{ROUTER}.{part}"] = torch.zeros(shape, dtype=torch.float32).to(dtype)
    for architecture, judged in (("OlmoeForCausalLM", True), ("UnheardOfForCausalLM", False)):
        kind = {"architectures": [architecture], "model_type": "olmoe", "num_hidden_layers": 1}
        document = {**stored.QWEN, **kind, "intermediate_size": stored.INTER, "quantization_config": FP8}
        folder = stored.write(tmp_path / architecture, document, [tensors])
        verdict = judge_checkpoint(moeq.open(folder), Deployment(parse_gpu("H100")), 0, explain=False)
        assert ("creates it as float numbers" in str(verdict.refusal)) is judged


@pytest.mark.parametrize(
    ("rows", "tp", "said"),
    [
        ({"q": 192}, 1, "q_proj has 192 features on a rank of tp 1"),
        ({"k": 192}, 1, "k_proj has 192 features on a rank of tp 1"),
        ({"v": 192}, 1, None),  # the last of the module's parts may end within a block
        ({"v": 192}, 2, "v_proj has 96 features on a rank of tp 2"),
        ({}, 2, None),
        ({"o": 192}, 1, None),
        ({"o": 192}, 2, None),
    ],
)
def test_parts_of_a_module_begin_with_a_block(rows: dict[str, int], tp: int, said: str | None, tmp_path: Path) -> None:
    parts = {name: stored.fp8_block(rows.get(name, 256), 256) for name in "qkvo"}
    config = {**FP8, "ignored_layers": [ROUTER]}
    found = refusal(tmp_path / "made", config, {}, more=attention(**parts), tp=tp, ep=tp)
    assert (said in found) if said else ("FP8 blocks" not in found), found


def test_a_scale_without_columns_is_no_group(tmp_path: Path) -> None:
    """One scale for a whole matrix serves every rank, whatever its dimensions."""
    for number, shape in enumerate([(), (1,), (256,)]):
        scale = {"weight": (torch.float8_e4m3fn, (256, 256)), "weight_scale": (torch.float32, shape)}
        made = refusal(tmp_path / str(number), CT, {}, more=attention(o=scale), tp=2, ep=2)
        assert "groups of input features" not in made


def loading(tp: int, config: dict[str, Any] | None = None, **shapes: tuple[int, ...]) -> _Loading:
    """An engine that loads tensors of these shapes, `q_proj__weight` for `l.q_proj.weight`."""
    entries = {
        name: TensorEntry(name, "F8_E4M3", shape, "f", 0, 0)
        for name, shape in ((f"l.{key.replace('__', '.')}", shape) for key, shape in shapes.items())
    }
    checkpoint: Any = SimpleNamespace(source=SimpleNamespace(config=config or {}, tensors=entries))
    return _Loading(checkpoint, None, Deployment(parse_gpu("H100"), tp=tp), None)  # type: ignore[arg-type]


QKV = LinearModule("qkv_proj", ("q_proj", "k_proj", "v_proj"), True, "column")
OUT = LinearModule("o_proj", ("o_proj",), True, "row")
WHOLE = LinearModule("gate", ("gate",), True, "whole")


@pytest.mark.parametrize(
    ("linear", "tp", "shapes", "said"),
    [
        (QKV, 1, {"q_proj__weight": (256, 64), "k_proj__weight": (128, 64), "v_proj__weight": (100, 64)}, []),
        (QKV, 1, {"q_proj__weight": (200, 64), "k_proj__weight": (130, 64), "v_proj__weight": (100, 64)},
         ["q_proj has 200", "k_proj has 130"]),
        (QKV, 2, {"q_proj__weight": (256, 64), "k_proj__weight": (128, 64), "v_proj__weight": (100, 64)},
         ["k_proj has 64", "v_proj has 50"]),
        (QKV, 1, {"k_proj__weight": (130, 64)}, ["k_proj has 130"]),
        (QKV, 1, {"q_proj__weight": (200,), "k_proj__weight": (130, 64)}, ["k_proj has 130"]),
        (OUT, 1, {"o_proj__weight": (64, 100)}, []),
        (OUT, 2, {"o_proj__weight": (64, 256)}, []),
        (OUT, 2, {"o_proj__weight": (64, 192)}, ["o_proj has 96"]),
        (WHOLE, 2, {"gate__weight": (100, 64)}, []),
    ],
)  # fmt: skip
def test_blocks_that_ranks_would_cut(
    linear: LinearModule, tp: int, shapes: dict[str, tuple[int, ...]], said: list[str]
) -> None:
    found = list(loading(tp, **shapes)._cut_blocks(linear, "l.", (128, 128)))
    assert found == [
        (f"l.{text} features on a rank of tp {tp}, and FP8 blocks have 128", "a tp that gives every rank whole blocks")
        for text in said
    ]


@pytest.mark.parametrize(("heads", "said"), [(1, False), (2, True), (None, True)])
def test_heads_that_ranks_share_are_not_cut(heads: int | None, said: bool) -> None:
    linear = LinearModule("a.qkv_proj", ("a.k_proj",), True, "column")
    config = {"num_key_value_heads": heads} if heads else {}
    found = list(loading(2, config, a__k_proj__weight=(128, 64))._cut_blocks(linear, "l.", (128, 128)))
    assert bool(found) is said


@pytest.mark.parametrize(
    ("tp", "grouped", "shapes", "said"),
    [
        (2, True, {"o_proj__scales": (4, 64)}, None),
        (2, True, {"o_proj__scales": (3, 64)}, 3),
        (2, False, {"o_proj__scales": (3, 64)}, 3),
        (2, False, {"o_proj__scales": (1, 64)}, None),
        (2, True, {"o_proj__scales": (1, 64)}, 1),
        (1, True, {"o_proj__scales": (3, 64)}, None),
        (2, True, {"o_proj__weight_scale": (64, 4)}, None),
        (2, True, {"o_proj__weight_scale": (64, 3)}, 3),
        (2, False, {"o_proj__weight_scale": (64, 1)}, None),
        (2, False, {"o_proj__weight_scale": (64,)}, None),
        (2, True, {}, None),
    ],
)
def test_groups_that_ranks_would_cut(
    tp: int, grouped: bool, shapes: dict[str, tuple[int, ...]], said: int | None
) -> None:
    found = list(loading(tp, **shapes)._cut_groups(OUT, "l.", grouped=grouped))
    text = f"l.o_proj has {said} groups of input features, which tp {tp} would cut"
    assert found == ([] if said is None else [(text, "a tp that divides the groups")])


def test_one_module_is_not_made_of_two_kinds(tmp_path: Path) -> None:
    """The config may say of each part what is stored, and the engine makes one module of them all the same."""
    path = f"{ROUTER.partition('.mlp')[0]}.self_attn.k_proj"
    fp8, half = stored.fp8_block(256, 256), {"weight": (torch.bfloat16, (256, 256))}
    table = {**FP8, "ignored_layers": [ROUTER, path]}
    found = refusal(tmp_path / "one", table, {}, more=attention(q=fp8, k=half, v=fp8, o=fp8))
    assert "of q_proj, k_proj, v_proj some are quantised, and the engine makes one module of them" in found
    assert "the config lists some" not in found
    alike = refusal(
        tmp_path / "two", {**FP8, "ignored_layers": [ROUTER]}, {}, more=attention(**dict.fromkeys("qkvo", fp8))
    )
    assert "one module of them" not in alike


def engine_of(architecture: str, intermediate: int = 32, **config: Any) -> _Loading:
    info = SimpleNamespace(architecture=architecture, intermediate_size=intermediate)
    checkpoint: Any = SimpleNamespace(info=info, source=SimpleNamespace(config=config, tensors={}))
    return _Loading(checkpoint, None, Deployment(parse_gpu("H100")), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("architecture", "config", "width"),
    [
        ("Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": 96}, 96),
        ("Qwen3NextForCausalLM", {"shared_expert_intermediate_size": 96}, 96),
        ("Qwen2MoeForCausalLM", {"n_shared_experts": 2}, 0),
        ("DeepseekV3ForCausalLM", {"n_shared_experts": 2}, 64),
        ("Glm4MoeForCausalLM", {"n_shared_experts": 1}, 32),
        ("ExaoneMoEForCausalLM", {"num_shared_experts": 3}, 96),
        ("Ernie4_5_MoeForCausalLM", {"moe_num_shared_experts": 2}, 64),
        ("DeepseekV3ForCausalLM", {}, 0),
        ("OlmoeForCausalLM", {"n_shared_experts": 2, "shared_expert_intermediate_size": 96}, 0),
    ],
)
def test_widths_of_shared_experts(architecture: str, config: dict[str, Any], width: int) -> None:
    assert engine_of(architecture, **config)._shared_width == width


SIZES = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 256}


@pytest.mark.parametrize(
    ("architecture", "config", "widths"),
    [
        ("MixtralForCausalLM", {**SIZES, "head_dim": 64}, (512, 128)),
        ("MixtralForCausalLM", SIZES, None),
        ("OlmoeForCausalLM", SIZES, (256, 64)),
        ("OlmoeForCausalLM", {**SIZES, "head_dim": 64}, (256, 64)),
        ("OlmoeForCausalLM", {"num_attention_heads": 8, "num_key_value_heads": 2}, None),
        ("UnheardOfForCausalLM", {**SIZES, "head_dim": 64}, None),
    ],
)
def test_widths_of_heads(architecture: str, config: dict[str, Any], widths: tuple[int, int] | None) -> None:
    expected = {} if widths is None else {"q_proj": widths[0], "k_proj": widths[1], "v_proj": widths[1]}
    assert engine_of(architecture, **config)._head_widths == expected


def test_heads_without_a_number_are_not_judged() -> None:
    assert engine_of("MixtralForCausalLM", num_attention_heads=8, head_dim=4)._head_widths == {"q_proj": 32}


def resized(linear: LinearModule, architecture: str, config: dict[str, Any], *shards: _Shard) -> list[str]:
    return [text for text, _ in engine_of(architecture, **config)._resized(linear, shards)]


def test_modules_of_another_width() -> None:
    """Shared experts and attention alone, and only where the width is known on both sides."""
    heads = {**SIZES, "head_dim": 64}
    qkv = LinearModule("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj"), True, "column")
    q, k = (
        shard(name=f"l.self_attn.{name}", weight=("BF16", (n, 8))) for name, n in (("q_proj", 512), ("k_proj", 100))
    )
    text = "l.self_attn.k_proj has 100 features, and the engine creates 128 by the config"
    assert resized(qkv, "MixtralForCausalLM", heads, q, k) == [text]
    assert resized(qkv, "UnheardOf", heads, q, k) == []
    assert resized(LinearModule("other.qkv_proj", qkv.shards, True, "column"), "MixtralForCausalLM", heads, q, k) == []
    unknown = shard(name="l.self_attn.k_proj", qweight=("I32", (8, 100)))
    assert resized(qkv, "MixtralForCausalLM", heads, unknown) == []
    both = LinearModule("mlp.shared_expert.gate_up_proj", ("gate_proj", "up_proj"), True, "column")
    up = shard(name="l.mlp.shared_expert.up_proj", weight=("BF16", (64, 8)))
    wide = {"shared_expert_intermediate_size": 96}
    text = "l.mlp.shared_expert.up_proj has 64 features, and the engine creates 96 by the config"
    assert resized(both, "Qwen2MoeForCausalLM", wide, up) == [text]
    assert resized(both, "Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": 64}, up) == []
    single = LinearModule("mlp.shared_expert.down_proj", ("down_proj",), True, "row")
    assert resized(single, "Qwen2MoeForCausalLM", wide, up) == []

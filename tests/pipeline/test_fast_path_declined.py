"""What fast paths leave to the reference path: values, headers and sizes that they are not made for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pipeline.fast_path_cases import OnFastPath, Sizes, fast_paths, on_reference_path, write_checkpoint
from torch import Tensor

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.layouts import words

pytest.importorskip("numba")

pytestmark = pytest.mark.usefixtures("fast_paths_for_small_matrices")

ROOT = Path(__file__).parents[2]


def _set(suffix: str, value: object, place: tuple[int, ...] = (0,)):  # type: ignore[no-untyped-def]
    """Edit one element of the down projection of expert 0."""

    def edit(tensors: dict[str, Tensor]) -> None:
        name = next(name for name in tensors if name.endswith(suffix) and "down" in name and ".1." not in name)
        tensors[name][place] = value

    return edit


#: Values that the reference path refuses or keeps: kind, edit, code of the error (None: it packs, and keeps a tensor).
DECLINED = [
    ("gptq-int4", _set("scales", float("nan"), (1, 5)), "source.bad-data"),
    ("w8a8-int8", _set("weight_scale", float("inf"), (3, 0)), "source.bad-data"),
    ("mxfp4", _set("scales", 255, (0, 3, 1)), "source.bad-data"),
    ("gptq-int4", _set("qzeros", 0x77777767, (1, 2)), "source.zero-points"),
    ("awq-int4", _set("scales", float("inf"), (0, 1)), "source.bad-data"),
    ("gptq-int4-asym", _set("qzeros", -(1 << 20), (0, 1)), "source.zero-points"),
    ("gptq-int4", _set("g_idx", torch.tensor([1, 0]), (slice(31, 33),)), "usage.layout-does-not-fit"),
    ("gptq-int4", _set("g_idx", 1, (5,)), "source.bad-data"),
    ("gptq-int4", _set("g_idx", 9, (5,)), "source.bad-data"),
    ("nvfp4", _set("weight_scale", float("nan"), (3, 1)), "source.bad-data"),
    ("nvfp4", _set("weight_scale", -1.0, (3, 1)), "answer.lossy"),
    ("nvfp4", _set("weight_scale", torch.tensor([448.0, 2.0**-9, 1.0, 1.0]), (3,)), "answer.lossy"),
    ("nvfp4", _set("weight_scale_2", float("inf"), ()), "source.bad-data"),
    ("fp8-block", _set("weight_scale_inv", float("inf"), (0, 0)), "source.bad-data"),
    ("fp8-block", _set("weight_scale_inv", 0.1, (0, 0)), "answer.lossy"),
    ("fp8-block", _set("weight_scale_inv", 2.0**20, (0, 0)), "usage.scale-range"),
    ("fp8-channel", _set("weight_scale", float("nan"), (7, 0)), "source.bad-data"),
    ("fp8-channel", _set("weight_scale", 0.3, (7, 0)), "answer.lossy"),
    ("mxfp8", _set("weight_scale", 255, (7, 0)), "source.bad-data"),
]
LAYOUT_OF = {
    "w8a8-int8": "int8-w8a8/1",
    "mxfp4": "marlin-mxfp4/1",
    "nvfp4": "marlin-nvfp4/1",
    "fp8-block": "marlin-fp8/1",
    "fp8-channel": "marlin-fp8/1",
    "mxfp8": "marlin-mxfp8/1",
}


@pytest.mark.parametrize(("kind", "edit", "code"), DECLINED)
def test_odd_values_are_left_to_the_reference_path(kind, edit, code, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, kind, Sizes(128, 64), edit)
    plan, on = fast_paths(checkpoint, LAYOUT_OF.get(kind, "marlin-wna16/1"))
    odd = OnFastPath(checkpoint, plan, "w2", 0, on["w2"])
    assert odd.pack() is False
    assert odd.prove() is None
    assert OnFastPath(checkpoint, plan, "w2", 1, on["w2"]).packed() is not None, "the other expert is as it should be"
    with pytest.raises(MoeqError) as caught:
        on_reference_path(checkpoint, plan, "w2", 0)
    assert caught.value.code == code


def test_gate_and_up_with_global_scales_of_their_own_are_left_to_the_reference_path(tmp_path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.experts.0.up_proj.weight_scale_2"] *= 2

    checkpoint = write_checkpoint(tmp_path, "nvfp4", Sizes(128, 64), edit)
    plan, on = fast_paths(checkpoint, "marlin-nvfp4/1")
    assert OnFastPath(checkpoint, plan, "w13", 0, on["w13"]).packed() is None
    assert OnFastPath(checkpoint, plan, "w13", 1, on["w13"]).packed() is not None
    with pytest.raises(MoeqError, match="up gets the gate's"):
        on_reference_path(checkpoint, plan, "w13", 0)


def test_scales_that_fp16_cannot_hold_are_left_to_the_reference_path(checkpoints: Path) -> None:
    checkpoint = moeq.open(checkpoints / "ct-mxfp4-qwen3moe")
    plan, on = fast_paths(checkpoint, "marlin-mxfp4-fp16/1")
    for exponent, held in ((0, True), (1, False), (102, False), (103, True), (142, True), (143, False)):
        case = OnFastPath(checkpoint, plan, "w13", 0, on["w13"])
        case.inputs["up", "weight_scale"][5] = exponent
        assert case.pack() is held


def test_a_group_index_that_means_nothing_is_left_to_the_reference_path(tmp_path: Path) -> None:
    """With one group per row, `g_idx` changes no value, but the source cannot be rebuilt without it."""

    def one_group(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.experts.0.down_proj.g_idx"][3] = 7

    checkpoint = write_checkpoint(tmp_path, "gptq-int4", Sizes(64, 32), one_group)
    plan, on = fast_paths(checkpoint, "triton-wna16/1")
    assert not OnFastPath(checkpoint, plan, "w2", 0, on["w2"]).pack()
    assert on_reference_path(checkpoint, plan, "w2", 0).kept == {"model.layers.0.mlp.experts.0.down_proj.g_idx"}


def test_a_declined_expert_is_written_among_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes go where those of the fast path go: the folder is the one that the reference path writes."""

    def one_group(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.experts.0.down_proj.g_idx"][3] = 7

    write_checkpoint(tmp_path / "source", "gptq-int4", Sizes(64, 32), one_group)
    written = []
    for name, least in (("mixed", 0), ("reference", 1 << 40)):
        monkeypatch.setattr(words, "COMPILED_FROM", least)
        where, layout = Deployment(gpu=parse_gpu("A100")), "triton-wna16/1"
        moeq.convert(tmp_path / "source", tmp_path / name, where, layout=layout, force_layout=True)
        written.append({path.name: path.read_bytes() for path in (tmp_path / name).glob("*.safetensors")})
    assert written[0] == written[1]


def test_what_headers_do_not_promise_has_no_fast_path(tmp_path: Path) -> None:
    def no_fast_path(name, kind, edit, layout="triton-wna16/1", sizes=None) -> None:  # type: ignore[no-untyped-def]
        checkpoint = write_checkpoint(tmp_path / name, kind, sizes or Sizes(64, 32), edit)
        _, on = fast_paths(checkpoint, layout)
        assert "w2" not in on

    def wide_index(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if name.endswith("g_idx"):
                tensors[name] = tensors[name].long()

    def scale_per_tensor(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if name.endswith("weight_scale"):
                tensors[name] = tensors[name][:1]

    def more(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            if name.endswith("weight_scale"):
                tensors[name.replace("weight_scale", "input_scale")] = torch.ones(1)

    no_fast_path("index", "gptq-int4", wide_index)
    no_fast_path("tensor", "w8a8-int8", scale_per_tensor, "int8-w8a8/1")
    no_fast_path("more", "w8a8-int8", more, "int8-w8a8/1")
    no_fast_path("odd", "w8a8-int8", lambda tensors: None, "int8-w8a8/1", Sizes(30, 18))
    no_fast_path("order", "gptq-int4-actorder", lambda tensors: None, "marlin-act-order/1", Sizes(128, 64))


def test_small_matrices_are_not_worth_it(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = moeq.open(checkpoints / "gptq-int4-g32-qwen3moe")
    assert len(fast_paths(checkpoint, "marlin-wna16/1")[1]) == 2
    monkeypatch.setattr(words, "COMPILED_FROM", 1 << 18)
    assert fast_paths(checkpoint, "marlin-wna16/1")[1] == {}


@pytest.mark.slow
def test_there_are_none_without_numba_and_looking_for_them_loads_no_torch() -> None:
    program = """
import sys
if sys.argv[1] == "without":
    sys.modules["numba"] = None
import moeq
from moeq.layouts import words
words.COMPILED_FROM = 0
from moeq.pipeline.plan.layer_plan import plan_layer
from moeq.pipeline.pack.fast import find_fast_path
checkpoint = moeq.open("tests/data/checkpoints/gptq-int4-g32-qwen3moe")
plan = plan_layer(checkpoint, 0, "marlin-wna16/1")
path = find_fast_path(checkpoint.experts(0), "w2", plan.layout, plan.shards, plan.entry.matrices["w2"].spec)
print(path is None, "torch" in sys.modules)
"""
    for case, answer in (("with", "False False"), ("without", "True False")):
        command = [sys.executable, "-c", program, case]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.stdout.strip() == answer, done.stderr

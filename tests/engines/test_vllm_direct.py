"""`vllm serve SRC --quantization moeq`: the plug-in packs a source's experts while vLLM's own classes load it."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_scripts import make_checkpoint
from engines.vllm_engine import BACKENDS, experts_layer, get_quantization_config, loaded_layer, vllm
from vllm.config import LoadConfig, ModelConfig
from vllm.model_executor.model_loader.weight_utils import get_quant_config

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.engines.experts_source import PackingExpertsSource
from moeq.engines.vllm import config as plugin_config
from moeq.engines.vllm import own_experts
from moeq.engines.vllm.engine_experts import RELEASE
from moeq.errors import MoeqError
from moeq.pipeline.convert import convert  # its errors have the hints of the command line

#: Sources of different formats, and whether two ranks can share an expert of theirs.
SOURCES = {
    "gptq-int4-g32-qwen3moe": True,
    "awq-int4-g32-qwen3moe": True,
    "ct-int4-asym-g32-mixtral": True,
    "ct-w8a8-qwen3moe": True,
    "ct-mxfp4-qwen3moe": True,
    "mxfp4-gptoss": True,
    "ct-fp8-block-qwen3moe": False,
    "modelopt-nvfp4-qwen3moe": True,
}
WHERE: dict[str, dict[str, tuple[int, int]]] = {"whole": {}, "tp": {"tp": (1, 2)}, "ep": {"ep": (1, 2)}}


@pytest.fixture(autouse=True)
def a100(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine sees no GPU here; layouts are chosen for this one."""
    monkeypatch.setattr(plugin_config, "current_gpu", lambda: parse_gpu("A100"))


def converted(source: Path, out: Path, where: dict[str, tuple[int, int]]) -> Path:
    """What `moeq convert` makes of it for the same deployment."""
    tp, ep = where.get("tp", (0, 1))[1], where.get("ep", (0, 1))[1]
    ranks = {"tp": max(tp, ep), "ep": ep}
    convert(source, out, Deployment(gpu=parse_gpu("A100"), engine=f"vllm@{RELEASE}", **ranks))
    return out


@pytest.mark.cover("name", "where")
@pytest.mark.parametrize("where", list(WHERE))
@pytest.mark.parametrize("name", list(SOURCES))
def test_tensors_are_those_of_the_converted_folder(name, where, checkpoints, tmp_path) -> None:
    if where == "tp" and not SOURCES[name]:
        pytest.skip("128 intermediate features are one block")
    ranks = WHERE[where]
    folder = converted(checkpoints / name, tmp_path / "out", ranks)
    wanted = dict(loaded_layer(folder, **ranks).named_parameters())
    found = dict(loaded_layer(checkpoints / name, prove="all", **ranks).named_parameters())
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype
        bits = [one.data.contiguous().view(-1).view(torch.uint8) for one in (found[key], tensor)]
        assert torch.equal(*bits), key


def test_kernels_are_compiled_from_before_the_first_layer_is_filled(checkpoints, monkeypatch) -> None:
    """Unless preparing them looks at values, as folding the scales of MXFP4 does."""
    seen, fill = [], PackingExpertsSource.fill

    def filled(*given: Any) -> None:
        seen.append("fill")
        fill(*given)

    monkeypatch.setattr(PackingExpertsSource, "fill", filled)
    monkeypatch.setattr(own_experts, "make_ready", lambda *given, wait: seen.append(wait))
    method = loaded_layer(checkpoints / "ct-mxfp4-qwen3moe", kernels="moeq").quant_method
    assert method.choice.own
    assert seen == [False, "fill", True]
    assert method.prepares_unfilled
    method.activations = "fp8"
    assert not method.prepares_unfilled


def test_ranks_that_convert_refuses_are_refused_with_its_words(checkpoints, tmp_path) -> None:
    source = checkpoints / "ct-fp8-block-qwen3moe"
    with pytest.raises(MoeqError) as refused:
        converted(source, tmp_path / "out", WHERE["tp"])
    with pytest.raises(MoeqError) as caught:
        experts_layer(source, **WHERE["tp"])
    found, wanted = caught.value, refused.value
    assert (found.code, found.message, found.hint) == (wanted.code, wanted.message, wanted.hint)


def test_the_engine_takes_the_option(checkpoints) -> None:
    """The engine's own way from `--quantization moeq` to a config, and to other processes."""
    source = checkpoints / "gptq-int4-g32-qwen3moe"
    model = ModelConfig(model=str(source), skip_tokenizer_init=True, dtype="bfloat16", quantization="moeq")
    assert model.quantization == "moeq"
    config = get_quant_config(model, LoadConfig())
    config.maybe_update_config(model.model, hf_config=model.hf_config, revision=model.revision)
    assert type(config.inner).__module__.startswith("vllm.")
    assert pickle.loads(pickle.dumps(config)).checkpoint.kind == "source"
    plain = ModelConfig(model=str(source), skip_tokenizer_init=True, dtype="bfloat16")
    assert plain.quantization != "moeq"


@pytest.mark.skipif("marlin-act-order/1" in BACKENDS, reason="this version reads act-order")
def test_what_convert_refuses_is_refused_with_its_words(checkpoints, tmp_path) -> None:
    """As the layer is about to be made, so before memory is taken."""
    source = checkpoints / "gptq-int4-g32-actorder-qwen3moe"
    with pytest.raises(MoeqError) as refused:
        converted(source, tmp_path / "out", {})
    with pytest.raises(MoeqError) as caught:
        experts_layer(source)
    found, wanted = caught.value, refused.value
    assert (found.code, found.message, found.hint) == (wanted.code, wanted.message, wanted.hint)


def test_a_folder_without_its_manifest_is_not_packed_again(folders, tmp_path) -> None:
    folder = tmp_path / "lost"
    shutil.copytree(folders["gptq-int4-g32-qwen3moe"], folder)
    (folder / "moeq.json").unlink()
    document = json.loads((folder / "config.json").read_text())["quantization_config"]
    with pytest.raises(MoeqError):
        plugin_config.MoeqConfig.from_config(document).maybe_update_config(str(folder))


def test_the_log_says_once_what_converting_saves(checkpoints, caplog) -> None:
    caplog.set_level(logging.INFO)
    logging.getLogger("vllm").addHandler(caplog.handler)
    loaded_layer(checkpoints / "gptq-int4-g32-qwen3moe")
    said = [record.getMessage() for record in caplog.records if "packing the experts" in record.getMessage()]
    assert len(set(said)) == 1
    assert "moeq convert" in said[0]
    assert "--gpu A100" in said[0]


def test_a_wrong_option_is_refused(checkpoints) -> None:
    with pytest.raises(MoeqError, match=r"prove is 'most'; it must be sample or all"):
        experts_layer(checkpoints / "gptq-int4-g32-qwen3moe", prove="most")


def test_nothing_is_left_behind(checkpoints, tmp_path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoints / "gptq-int4-g32-qwen3moe", source)
    layer: Any = experts_layer(source)
    for path in source.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-50_000])
    names = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(MoeqError, match=r"ended before byte|changed while it was being read"):
        layer.quant_method.process_weights_after_loading(layer)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == names


assert vllm  # the module is skipped without the engine


def test_fp8_layers_that_only_the_model_reads_are_refused(tmp_path) -> None:
    """DeepSeek-V4's published checkpoints: plain FP8 would read their scales wrongly."""
    make_checkpoint.write_checkpoint(tmp_path / "source", make_checkpoint.MODELS["tiny"], "fp8-block")
    config = tmp_path / "source" / "config.json"
    document = json.loads(config.read_text())
    made = get_quantization_config("moeq").from_config(document["quantization_config"])
    made.maybe_update_config(str(tmp_path / "source"))
    config.write_text(json.dumps(document | {"model_type": "deepseek_v4"}))
    with pytest.raises(MoeqError, match="FP8 layers of deepseek_v4 outside the experts") as caught:
        made.maybe_update_config(str(tmp_path / "source"))
    assert caught.value.code == "usage.unsupported-model"

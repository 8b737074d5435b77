"""SGLang's own model classes, built and filled from converted folders by the engine's own loader, on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.sglang_engine import Finder, StandIn, publish, runtime_context
from load.deployments import convert
from safetensors.torch import load_file
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
from sglang.srt.model_loader.loader import DefaultModelLoader

from moeq.engines.sglang.config import MoeqConfig, MoeqMoEMethod

GROUPS = ("tp", "attn_tp", "moe_tp", "moe_ep", "pp", "attn_dp", "attn_cp", "moe_dp", "attn_dcp")
#: Parameters that the classes join, and the tensors that they are made of.
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It reads MXFP4 where there is a GPU. On a CPU its rotary embedding imports vLLM, of which nothing is called."""
    monkeypatch.setitem(QUANTIZATION_METHODS, "mxfp4", Mxfp4Config)
    monkeypatch.setattr(Finder, "missing", (*Finder.missing, "vllm"))
    yield
    destroy_model_parallel()  # tests of single layers pretend to be one rank of several
    destroy_distributed_environment()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "vllm" and isinstance(module, StandIn):
            del sys.modules[name]


def model_of(folder: Path, store: Path, **options: Any) -> torch.nn.Module:
    publish(folder, **options)
    if not torch.distributed.is_initialized():
        place = f"file://{store}"
        init_distributed_environment(backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=place)
        initialize_model_parallel()
    config = ModelConfig.from_server_args(runtime_context.get_server_args())
    config.dtype = torch.bfloat16
    with runtime_context.get_parallel().override(**{f"{name}_rank": 0 for name in GROUPS}):
        loader = DefaultModelLoader(LoadConfig())
        return loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))


def sources_of(name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The source's tensor of a parameter."""
    joined = next((part for part in JOINED if f".{part}." in name), None)
    if joined is None:
        return tensors[name]
    return torch.cat([tensors[name.replace(joined, part)] for part in JOINED[joined]])


def parameters_beside_experts(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, one.data) for name, one in model.named_parameters() if ".experts." not in name)


@pytest.mark.parametrize(
    ("name", "layout"), [("ct-w8a8-qwen3moe", "int8-w8a8/1"), ("mxfp4-gptoss", "marlin-mxfp4-interleaved/1")]
)
def test_every_parameter_is_the_sources(name: str, layout: str, checkpoints: Path, tmp_path: Path) -> None:
    """compressed-tensors ignores q, k and v by their names, and the classes make one layer of them."""
    tensors = {}
    for path in (checkpoints / name).glob("*.safetensors"):
        tensors |= load_file(path)
    model = model_of(convert(checkpoints / name, tmp_path / "out", layout), tmp_path / "store")
    assert isinstance(model.quant_config, MoeqConfig)
    assert sum(isinstance(getattr(one, "quant_method", None), MoeqMoEMethod) for one in model.modules()) == 2
    for parameter, found in parameters_beside_experts(model):
        assert torch.equal(found.to(torch.bfloat16), sources_of(parameter, tensors).to(torch.bfloat16)), parameter

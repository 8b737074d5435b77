"""SGLang's own decision about an experts layer, on a CUDA device that is not there: `python engine.py SITE OUT`.

The unpacked wheel in SITE is imported with stand-ins for packages that are compiled or absent, and with torch answering
for the device; the methods' names, config readers, schemes, weight creation (on meta tensors) and runners are the
engine's. Questions come from `cases.py`. For a Python with torch and transformers; nothing here runs on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import logging
import sys
import tempfile
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from oracle.differential_sglang import cases, samples

Row = dict[str, Any]
_device = [9, 0]
_MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 1000,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip
# What must not be found: its absence is part of the answer, or a stand-in for it misleads torch.
_ABSENT = {
    "aiter", "amdsmi", "apex", "ck4inductor", "cutlass_library", "deepspeed", "intel_extension_for_pytorch", "mlx",
    "mori", "numba", "sgl_kernel_npu", "tabulate", "torch_npu", "torch_xla", "vllm", "xgrammar",
}  # fmt: skip


class _Named(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Named(name, (), {})
        setattr(cls, name, made)
        return made


class _StandIn(types.ModuleType):
    __path__ = ()
    __version__ = "99.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Named(name, (), {"__init__": lambda self, *given, **named: None})
        setattr(self, name, made)
        return made


class _Finder:
    """Stand-ins for what is not installed; the last in the row."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        top = name.partition(".")[0]
        here = top in _ABSENT or top in sys.stdlib_module_names or top in ("sglang", "torch", "moeq")
        return None if here else ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> Any:
        return _StandIn(spec.name)

    def exec_module(self, module: Any) -> None:
        """Nothing to run."""


def install(site: str) -> None:
    """Make the wheel in `site` importable on a CUDA device. Once a process."""
    import torch
    import torch._dynamo
    from transformers import (  # noqa: F401  (they look for optional packages, which must not be stand-ins)
        AutoImageProcessor,
        AutoModel,
        AutoModelForCausalLM,
        AutoProcessor,
        AutoTokenizer,
        BatchFeature,
        GenerationConfig,
        PreTrainedTokenizerFast,
        ProcessorMixin,
    )

    sys.meta_path.append(_Finder())  # type: ignore[arg-type]
    sys.path.insert(0, site)
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_name = lambda device=None: "device"
    cuda.get_device_capability = lambda device=None: tuple(_device)
    cuda.get_device_properties = lambda device=None: types.SimpleNamespace(
        major=_device[0], minor=_device[1], name="device", total_memory=80 << 30, multi_processor_count=132
    )
    cuda.mem_get_info = lambda device=None: (80 << 30, 80 << 30)
    version: Any = torch.version
    version.cuda = "12.9"
    logging.disable(logging.CRITICAL)
    importlib.import_module("sglang.srt.layers.moe.fused_moe_triton.layer")
    _publish()


def _publish() -> None:
    """The engine's configuration of a process, for a model of the usual kind."""
    from sglang.srt import runtime_context
    from sglang.srt.server_args import ServerArgs

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL), encoding="utf-8")
        arguments = ServerArgs(model_path=folder, device="cuda", disable_cuda_graph=True, skip_tokenizer_init=True)
        runtime_context.publish(arguments, role="scheduler")


def become(capability: list[int]) -> None:
    """Another device: forget what was worked out about the one before."""
    _device[:] = capability
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang.srt.utils"):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def _name(case: Row) -> tuple[str, Row]:
    """The method in force, by the engine's own check of the checkpoint's config, and the config as that rewrites it."""
    from sglang.srt.configs.model_config import ModelConfig

    model: Any = types.SimpleNamespace(
        quantization=case["quantization"], is_draft_model=False, _find_quant_modelslim_config=lambda: None,
        hf_config=types.SimpleNamespace(quantization_config=dict(case["config"])),
    )  # fmt: skip
    model._parse_modelopt_quant_config = lambda found: ModelConfig._parse_modelopt_quant_config(model, found)
    model._parse_quant_hf_config = lambda: ModelConfig._parse_quant_hf_config(model)
    ModelConfig._verify_quantization(model)
    return model.quantization, model.hf_config.quantization_config


def _layer(case: Row, config: Any) -> Any:
    import torch
    from sglang.srt import runtime_context
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.moe.utils import resolve_moe_runner_backend

    runtime_context.get_flags().moe.runner_backend = resolve_moe_runner_backend(case["runner"])
    tp, ep = (1, case["tp"]) if case["ep"] else (case["tp"], 1)
    ranks = {"moe_tp_rank": 0, "moe_tp_size": tp, "moe_ep_rank": 0, "moe_ep_size": ep, "tp_rank": 0,
             "tp_size": case["tp"], "attn_tp_rank": 0, "attn_tp_size": case["tp"]}  # fmt: skip
    with runtime_context.get_parallel().override(**ranks), torch.device("meta"):
        return FusedMoE(
            num_experts=case["experts"], hidden_size=case["hidden"], intermediate_size=case["inter"], layer_id=1,
            top_k=case["topk"], params_dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[case["dtype"]],
            quant_config=config, prefix="model.layers.1.mlp.experts", activation=case["act"],
        )  # fmt: skip


def decide(case: Row) -> Row:
    """Stages of one case: `name`, `config`, `layer`; `method`, `scheme` and `runner` where it gets that far."""
    from sglang.srt.layers.quantization import get_quantization_config

    out: Row = {}
    stage = "name"
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            out["name"], declared = _name(case)
            stage = "config"
            config = get_quantization_config(out["name"]).from_config(declared)
            config.packed_modules_mapping = {}
            out["capability"] = 10 * _device[0] + _device[1] >= config.get_min_capability()
            stage = "layer"
            layer = _layer(case, config)
    except Exception as error:  # noqa: BLE001  (whatever the engine raises is the answer)
        return {**out, "stage": stage, "error": type(error).__name__, "text": str(error)[:200]}
    method, scheme = layer.quant_method, getattr(layer, "scheme", None)
    return {
        **out, "method": type(method).__name__, "scheme": type(scheme).__name__ if scheme else None,
        "runner": _runner(layer, method, scheme),
    }  # fmt: skip


def _runner(layer: Any, method: Any, scheme: Any) -> str | None:
    for holder in (method, scheme, getattr(scheme, "kernel", None)):
        runner = getattr(holder, "runner", None)
        if runner is not None:
            return str(runner.runner_backend.value)
    return None


def main() -> None:
    """Answer the questions of a seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", required=True)
    parser.add_argument("--count", type=int, default=cases.COUNT)
    parser.add_argument("--floats", action="store_true", help="FP8, MXFP4, NVFP4 and W4AFP8 instead of integers")
    options = parser.parse_args()
    install(options.site)
    rows = []
    for case in cases.cases(options.seed, options.count, floats=options.floats):
        if case["capability"] != _device:
            become(case["capability"])
        rows.append(decide(case))
    samples.save(options.out, options.seed, rows, floats=options.floats)


if __name__ == "__main__":
    main()

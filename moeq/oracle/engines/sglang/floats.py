"""Decisions of SGLang 0.5.23 for FP8, MXFP4 and W4AFP8 experts on CUDA.

Source: SGLang 0.5.23, `layers/quantization/fp8.py`, `mxfp4.py`, `w4afp8.py`, `w8a8_fp8.py`, and the FP8 scheme of
`compressed_tensors`. `tests/oracle/differential_sglang` compares the decisions with the package's own answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from moeq.oracle.engines.sglang.layer import Config, SglangChoice, SglangLayer, SglangRefusal, unquantised, value
from moeq.spelling import option

#: Runners for which the FP8 method builds a runner object.
_FP8_RUNNERS = ("triton", "deep_gemm", "flashinfer_trtllm", "flashinfer_trtllm_routed")
#: Runners for which the FP8 method runs Triton instead.
_FP8_BY_TRITON = ("auto", "flashinfer_cutlass", "flashinfer_cutedsl")
#: Runners that unquantised experts keep under FP8 configs, and under ModelOpt configs.
_FP8_UNQUANTISED = ("triton_kernel", "flashinfer_trtllm", "flashinfer_trtllm_routed", "flashinfer_cutlass")
_MODELOPT_UNQUANTISED = (*_FP8_UNQUANTISED, "deep_gemm")
_MXFP4_RUNNERS = ("triton", "triton_kernel", "marlin", "deep_gemm")
#: Remedy for a runner without a kernel.
_AUTO_RUNNER = "--moe-runner-backend auto"


def fp8(config: Config, layer: SglangLayer, name: str) -> SglangChoice:
    """Return the choice for FP8 with scales per tensor or block, and for MXFP8, which is FP8 in blocks of 1 x 32."""
    scheme = value(config, "activation_scheme")
    block = [1, 32] if name == "mxfp8" else config.get("weight_block_size")
    if scheme not in ("dynamic", "static"):
        raise SglangRefusal("config", "ValueError", f"activation_scheme {scheme} is not one of static, dynamic")
    if block is not None and len(block) != 2:
        raise SglangRefusal("config", "ValueError", f"weight_block_size {block} is not two sizes")
    if block is not None and scheme != "dynamic":
        raise SglangRefusal("config", "ValueError", f"blocks need dynamic activations, activation_scheme is {scheme}")
    if _skipped(config.get("ignored_layers", config.get("modules_to_not_convert")), layer.prefix):
        return unquantised(name, layer, _FP8_UNQUANTISED)
    if layer.runner == "cutlass":
        _check_cutlass(layer, block is not None)
    _check_blocks(layer, block)
    _check_activation(layer)
    runner = "triton" if layer.runner in _FP8_BY_TRITON else layer.runner
    runs = runner in (*_FP8_RUNNERS, "cutlass")
    return SglangChoice(name, "Fp8MoEMethod", runner if runner in _FP8_RUNNERS else None, runs=runs)


def _skipped(entries: Any, prefix: str) -> bool:
    """Tell whether a list of module names skips the experts, by whole parts of their path or by their module."""
    bare = [entry.removeprefix("model.") for entry in entries or ()]
    names = [*bare, *(f"model.{name}" for name in bare)]
    whole = any(f".{name.rstrip('.')}." in f".{prefix}." for name in names)
    return whole or any("experts" in name and prefix in name for name in names)


def _check_cutlass(layer: SglangLayer, blocks: bool) -> None:
    device = ".".join(map(str, layer.capability))
    if layer.capability < (8, 9):
        raise SglangRefusal("layer", "AssertionError", f"the cutlass runner has no FP8 on {device}", _AUTO_RUNNER)
    if not blocks:
        raise SglangRefusal(
            "layer", "AssertionError", "the cutlass runner takes FP8 with scales per block", _AUTO_RUNNER
        )
    if layer.capability[0] not in (9, 10, 12):
        raise SglangRefusal("layer", "AssertionError", f"the cutlass runner does not run on {device}", _AUTO_RUNNER)


def _check_blocks(layer: SglangLayer, block: Any) -> None:
    """Check that a rank's allocated shard divides into blocks."""
    if block is None:
        return
    shard = layer.allocated_shard
    for size in block if layer.tp > 1 and not layer.ep else block[:1]:
        if shard % size:
            text = f"the shard of {shard} does not divide into blocks of {block[0]} x {block[1]}"
            raise SglangRefusal("layer", "ValueError", text, "another tp, or expert parallelism")


def _check_activation(layer: SglangLayer) -> None:
    if layer.runner == "deep_gemm" and layer.act != "silu":
        raise SglangRefusal(
            "layer", "AssertionError", f"the deep_gemm runner has no activation {layer.act}", _AUTO_RUNNER
        )


def w8a8_fp8(config: Config, layer: SglangLayer, name: str) -> SglangChoice:
    """Return the choice for compressed-tensors FP8 with `--quantization w8a8_fp8`, which always runs Triton."""
    return SglangChoice(name, "W8A8FP8MoEMethod", "triton")


def compressed_fp8(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, layer: SglangLayer) -> SglangChoice:
    """Return the choice for compressed-tensors FP8 with scales per tensor, per channel and token, or per block."""
    strategy = weights["strategy"]
    if inputs is None or not weights.get("symmetric", True) or strategy not in ("tensor", "channel", "block"):
        raise SglangRefusal(
            "layer", "RuntimeError", f"FP8 per {strategy} with these activations has no scheme for experts"
        )
    scales = inputs.get("strategy")
    static = not inputs.get("dynamic")
    if (strategy, scales) not in (("tensor", "tensor"), ("channel", "token")) and strategy != "block":
        text = f"FP8 weights per {strategy} with activations per {scales} trip an assertion"
        remedy = option("quantization", "w8a8_fp8") if strategy == "channel" else None
        raise SglangRefusal("layer", "AssertionError", text, remedy)
    if static and (strategy, scales) == ("channel", "token"):
        raise SglangRefusal("layer", "ValueError", "static activations with scales per token")
    if strategy == "block":
        _check_blocks(layer, weights.get("block_structure"))
    runner = "triton" if layer.runner == "auto" else layer.runner
    has_kernel = runner in ("triton", "flashinfer_trtllm", "flashinfer_trtllm_routed")
    return SglangChoice(
        "compressed-tensors", "CompressedTensorsW8A8Fp8MoE", runner if has_kernel else None, runs=has_kernel
    )


def compressed_nvfp4(inputs: Mapping[str, Any] | None, layer: SglangLayer) -> SglangChoice:
    """Return the choice for compressed-tensors NVFP4: FlashInfer on Blackwell, Marlin (weight-only) elsewhere."""
    if inputs is None or layer.capability < (10, 0):
        return SglangChoice("compressed-tensors", "CompressedTensorsW4A16Nvfp4MoE", "marlin")
    runner = "flashinfer_trtllm" if layer.runner == "flashinfer_trtllm" else "flashinfer_cutlass"
    return SglangChoice("compressed-tensors", "CompressedTensorsW4A4Nvfp4MoE", runner)


def mxfp4(config: Config, layer: SglangLayer, name: str) -> SglangChoice:
    """Return the choice for MXFP4. FlashInfer's runner has kernels on SM90, SM10x and SM12x only."""
    runner = "triton" if layer.runner == "auto" else layer.runner
    flashinfer = runner == "flashinfer_mxfp4" and layer.capability[0] in (9, 10, 12)
    if runner not in _MXFP4_RUNNERS and not flashinfer:
        raise SglangRefusal("layer", "NotImplementedError", f"MXFP4 has no runner {runner} on this GPU", _AUTO_RUNNER)
    _check_activation(layer)
    return SglangChoice(name, "Mxfp4MoEMethod", runner, runs=runner != "marlin" or layer.capability >= (9, 0))


def w4afp8(config: Config, layer: SglangLayer, name: str) -> SglangChoice:
    """Return the choice for int4 weights with FP8 activations: a CUTLASS kernel, whatever runner is named."""
    return SglangChoice(name, "W4AFp8MoEMethod", None)


def parsed(config: Config) -> Config:
    """Return a config as the engine rewrites it: ModelOpt's algorithm becomes a method, MXFP8 an FP8 config."""
    if config.get("quant_method", "modelopt") != "modelopt":
        return config
    nested = config.get("quantization")
    source = nested if isinstance(nested, Mapping) else config
    algorithm = str(source.get("quant_algo") or "")
    if "FP4" in algorithm:
        return {**config, "quant_method": "modelopt_fp4", "quant_algo": algorithm}
    if algorithm == "FP8":
        return {**config, "quant_method": "modelopt_fp8", "quant_algo": algorithm}
    if algorithm != "MXFP8":
        return config
    entries = source.get("exclude_modules", source.get("ignore"))
    skipped = {} if entries is None else {"modules_to_not_convert": entries}
    return {**config, **skipped, "quant_method": "mxfp8", "quant_algo": algorithm, "activation_scheme": "dynamic"}


#: ModelOpt's algorithm -> method that `--quantization modelopt` means for it.
MODELOPT = {"FP8": "modelopt_fp8", "MXFP8": "mxfp8"} | dict.fromkeys(
    ("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4"), "modelopt_fp4"
)


def _modelopt(config: Config, *names: str) -> tuple[str, Any]:
    """Return the algorithm and the list of excluded modules, flat or under `quantization`."""
    algorithm = config.get("quant_algo")
    if algorithm is not None:
        return str(algorithm), next((config[name] for name in names if name in config), [])
    nested = value(config, "quantization")
    if not isinstance(nested, Mapping) or nested.get("quant_algo") is None:
        raise SglangRefusal("config", "ValueError", "the config has no quant_algo")
    return str(nested["quant_algo"]), nested.get("exclude_modules", [])


def _excluded(entries: Any, prefix: str) -> bool:
    """Tell whether wildcards name the experts' path or one of its parts."""
    return any(fnmatchcase(part, entry) for entry in entries or () for part in (prefix, *prefix.split(".")))


def modelopt_fp8(config: Config, layer: SglangLayer, name: str) -> SglangChoice:
    """Return the choice for ModelOpt's FP8 per tensor: Triton, unless FlashInfer's CUTLASS is named."""
    algorithm, entries = _modelopt(config, "ignore")
    if algorithm != "FP8":
        text = f"{name} reads FP8, this is {algorithm}"
        raise SglangRefusal("config", "ValueError", text, f"no {option('quantization')}")
    if _excluded(entries, layer.prefix):
        return unquantised(name, layer, _MODELOPT_UNQUANTISED)
    runner = "flashinfer_cutlass" if layer.runner == "flashinfer_cutlass" else "triton"
    return SglangChoice(name, "ModelOptFp8MoEMethod", runner)


def modelopt_fp4(config: Config, layer: SglangLayer, name: str) -> SglangChoice:
    """Return the choice for ModelOpt's NVFP4: FlashInfer on Blackwell, Marlin (weight-only) on Ampere to Hopper."""
    algorithm, entries = _modelopt(config, "ignore", "modules_to_not_convert", "exclude_modules")
    if algorithm not in ("FP8", "NVFP4", "NVFP4_AWQ", "W4A16_NVFP4"):
        raise SglangRefusal("config", "ValueError", f"modelopt_fp4 does not read {algorithm}")
    if entries is None:
        raise SglangRefusal("config", "ValueError", "modelopt_fp4 needs a list of excluded modules")
    if _excluded(entries, layer.prefix):
        return unquantised(name, layer, _MODELOPT_UNQUANTISED)
    older = (8, 0) <= layer.capability < (10, 0)
    marlin = older if layer.runner == "auto" else layer.runner == "marlin"
    if layer.capability < (10, 0) and not marlin:
        text = f"NVFP4 does not run with the runner {layer.runner} before Blackwell"
        raise SglangRefusal("layer", "ValueError", text, "--moe-runner-backend marlin" if older else None)
    if layer.runner == "cutlass":
        raise SglangRefusal("layer", "NotImplementedError", "NVFP4 has no runner cutlass", _AUTO_RUNNER)
    _check_activation(layer)
    default = "marlin" if older else "flashinfer_trtllm"
    runner = default if layer.runner == "auto" else layer.runner
    return SglangChoice(name, "ModelOptNvFp4FusedMoEMethod", runner)

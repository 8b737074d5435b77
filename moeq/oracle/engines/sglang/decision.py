"""Decisions of SGLang 0.5.23 on CUDA: the method in force, its class, and the runner; `floats.py` decides for floats.

Source: SGLang 0.5.23, `configs/model_config.py` (which method is in force), `layers/quantization` (readers, schemes,
weight creation) and `layers/moe/moe_runner`.
`tests/oracle/differential_sglang` compares the decisions with the package's own answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from moeq.oracle.engines.sglang import floats
from moeq.oracle.engines.sglang.layer import Config, SglangChoice, SglangLayer, SglangRefusal, unquantised, value
from moeq.spelling import option

#: Version whose code these decisions follow.
VERSION = "0.5.23"
#: Values of `--moe-runner-backend` that some checkpoint of integers accepts, and those that some of floats accepts.
RUNNERS = ("auto", "triton", "marlin", "cutlass", "deep_gemm", "flashinfer_trtllm", "triton_kernel")
FLOAT_RUNNERS = (
    *("auto", "triton", "triton_kernel", "marlin", "cutlass", "deep_gemm", "flashinfer_trtllm"),
    *("flashinfer_trtllm_routed", "flashinfer_cutlass", "flashinfer_cutedsl", "flashinfer_mxfp4"),
)
_MARLIN_GROUPS = (-1, 32, 64, 128)
#: Method that a user may name -> declared methods that it may stand in for.
_COMPATIBLE = {
    "w8a8_int8": ("compressed-tensors",),
    "w8a8_fp8": ("compressed-tensors",),
    "modelopt_fp8": ("modelopt",),
    "modelopt_fp4": ("modelopt",),
}


def _gptq_marlin(config: Config, layer: SglangLayer) -> bool:
    declared = [config.get(key) for key in ("bits", "group_size", "sym", "desc_act")]
    fits = config.get("bits") in (4, 8) and config.get("sym") is True and config.get("group_size") in _MARLIN_GROUPS
    return config.get("quant_method") == "gptq" and None not in declared and fits and layer.has_marlin


def _awq_marlin(config: Config, layer: SglangLayer) -> bool:
    fits = config.get("bits") == 4 and config.get("zero_point") is True and config.get("group_size") in _MARLIN_GROUPS
    return config.get("quant_method") == "awq" and fits and layer.has_marlin


def _moe_wna16(config: Config, layer: SglangLayer) -> bool:
    if config.get("quant_method") == "gptq":
        return not config.get("desc_act") and config.get("bits") in (4, 8)
    return config.get("quant_method") == "awq" and config.get("bits") == 4 and layer.capability >= (7, 5)


#: Method that may replace the declared one -> accepted values of `--quantization`, and a test of the checkpoint.
_TAKES_OVER: dict[str, tuple[tuple[str | None, ...], Callable[[Config, SglangLayer], bool]]] = {
    "awq_marlin": ((None, "marlin", "awq_marlin"), _awq_marlin),
    "gptq_marlin": ((None, "marlin", "gptq_marlin"), _gptq_marlin),
    "moe_wna16": (("moe_wna16",), _moe_wna16),
}


def method_in_force(config: Config, layer: SglangLayer) -> str:
    """Return the name of the method that reads a parsed config. Raise SglangRefusal if there is none."""
    declared, asked = str(config.get("quant_method", "modelopt")).lower(), layer.quantization
    if asked == "modelopt" and str(config.get("quant_algo", "")).upper() in floats.MODELOPT:
        return floats.MODELOPT[str(config["quant_algo"]).upper()]
    if declared in ("modelopt_fp8", "modelopt_fp4"):  # the user's method does not replace these
        return declared
    for name, (words, can) in _TAKES_OVER.items():
        if asked in words and can(config, layer):
            return name
    name = asked or declared
    if name != declared and declared not in _COMPATIBLE.get(name, ()):
        text = f"{option('quantization', name)} is not for this {declared} checkpoint here"
        raise SglangRefusal("name", "ValueError", text, f"no {option('quantization')}")
    if name not in _READERS:
        text = f"{name} is no method on CUDA, and this checkpoint is not one that gptq_marlin takes"
        raise SglangRefusal("name", "ValueError", text, _gptq_remedy(config, layer))
    return name


def _gptq_remedy(config: Config, layer: SglangLayer) -> str | None:
    can = config.get("quant_method") == "gptq" and _moe_wna16(config, layer) and "sym" in config
    return option("quantization", "moe_wna16") if can and layer.quantization is None else None


def _skipped(config: Config, layer: SglangLayer) -> bool:
    return any(str(name) in layer.prefix for name in config.get("modules_to_not_convert") or ())


def _positive_groups(group: int) -> None:
    if group < 0:
        raise SglangRefusal("layer", "RuntimeError", f"group size {group} becomes a negative number of groups")


def _wna16(config: Config, layer: SglangLayer, name: str) -> SglangChoice:
    """Return MoeWNA16's choice, which halves groups until they divide both sizes."""
    value(config, "quant_method")
    value(config, "bits")
    group = value(config, "group_size")
    value(config, "sym" if config["quant_method"] == "gptq" else "zero_point")
    if config["quant_method"] == "awq" and _skipped(config, layer):
        return unquantised(name, layer)
    if group == 0:
        raise SglangRefusal("layer", "ZeroDivisionError", "groups of 0 weights")
    while layer.allocated_shard % group or layer.hidden % group:
        group //= 2
        if group < 32:
            text = f"no group size from 32 divides {layer.allocated_shard} per rank and hidden size {layer.hidden}"
            raise SglangRefusal("layer", "AssertionError", text, "another tp, or expert parallelism")
    _positive_groups(group)
    return SglangChoice(name, "MoeWNA16Method", "triton", "triton-wna16/1")


def _only_auto(layer: SglangLayer) -> None:
    if layer.runner != "auto":
        text = f"--moe-runner-backend {layer.runner} trips an assertion: this method has its one runner"
        raise SglangRefusal("layer", "AssertionError", text, "--moe-runner-backend auto")


def _gptq(config: Config, layer: SglangLayer, name: str) -> SglangChoice:
    _only_auto(layer)
    layout = "marlin-act-order/1" if config["desc_act"] and config["group_size"] != -1 else "marlin-wna16/1"
    return SglangChoice(name, "GPTQMarlinMoEScheme", "marlin", layout)


def _awq(config: Config, layer: SglangLayer, name: str) -> SglangChoice:
    """Return the choice for AWQ: Marlin, or MoeWNA16 if Marlin refuses the layer."""
    if _skipped(config, layer):
        return unquantised(name, layer)
    group = config["group_size"]
    fits = layer.hidden % 128 == 0 and layer.shard % max(64, group) == 0 and layer.act in ("silu", "situ")
    if not fits:
        return _wna16(config, layer, name)
    _positive_groups(group)
    _only_auto(layer)
    return SglangChoice(name, "AWQMoEScheme", "marlin", "marlin-wna16/1")


def _plain_awq(config: Config, layer: SglangLayer, name: str) -> SglangChoice:
    """Return the choice for AWQ without Marlin: unquantised experts, in which the packed weights have no place."""
    bits = value(config, "w_bit", "bits")
    value(config, "q_group_size", "group_size")
    value(config, "zero_point")
    if bits != 4:
        raise SglangRefusal("config", "ValueError", f"AWQ of {bits} bits, only 4 is read")
    return unquantised(name, layer)


def _w8a8(config: Config, layer: SglangLayer, name: str) -> SglangChoice:
    if _ignored(config, layer.prefix):
        raise SglangRefusal("layer", "TypeError", "experts that are to be ignored get the method of a linear layer")
    return SglangChoice(name, "W8A8Int8MoEMethod", "triton", "int8-w8a8/1")


def _ignored(config: Config, prefix: str) -> bool:
    names = [f"{prefix}.0.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    entries = [str(entry) for entry in config.get("ignore") or ()]
    patterns = [entry[3:] for entry in entries if entry.startswith("re:")]
    return any(name in entries or any(re.match(pattern, name) for pattern in patterns) for name in names)


def _weights(group: Config) -> Config:
    """Return the weights of a config group with the defaults of compressed-tensors."""
    weights = dict(group.get("weights") or {})
    size = weights.get("group_size")
    usual = "tensor" if size is None else "channel" if size == -1 else "group"
    weights["strategy"] = weights.get("strategy") or usual
    if weights["strategy"] == "group" and not (isinstance(size, int) and size > 0):
        raise SglangRefusal("config", "ValidationError", f"group_size {size} with strategy group")
    return weights


def _triton_reads(weights: Config) -> bool:
    plain = weights["num_bits"] == 4 and weights["strategy"] == "group" and weights["group_size"] in (32, 128)
    return plain and weights.get("symmetric", True) and not weights.get("actorder")


def _ct(config: Config, layer: SglangLayer, name: str) -> SglangChoice:
    """Return the choice for compressed-tensors; integers with 8-bit activations have no experts on CUDA."""
    if _ignored(config, layer.prefix):
        return unquantised(name, layer)
    (group,) = config["config_groups"].values()
    if "preset" in group:
        raise SglangRefusal(
            "config", "AttributeError", f"a config group names the preset {group['preset']}, not an object"
        )
    weights, inputs = _weights(group), group.get("input_activations")
    if weights.get("type") == "float" and weights.get("num_bits") == 8:
        return floats.compressed_fp8(weights, inputs, layer)
    if config.get("format") == "nvfp4-pack-quantized":
        return floats.compressed_nvfp4(inputs, layer)
    if inputs is not None:
        bits = weights["num_bits"], inputs.get("num_bits")
        text = f"{bits[0]}-bit weights with {bits[1]}-bit activations have experts on NPUs only"
        remedy = option("quantization", "w8a8_int8") if bits == (8, 8) else None
        raise SglangRefusal("layer", "NotImplementedError", text, remedy)
    if weights["strategy"] not in ("group", "channel"):
        text = f"weights per {weights['strategy']} without activations trip over the activations that are not there"
        raise SglangRefusal("layer", "AttributeError", text)
    symmetric, triton = weights.get("symmetric", True), _triton_reads(weights)
    mxint4 = weights["num_bits"] == 4 and weights.get("group_size") == 32 and symmetric
    if mxint4 and layer.runner == "flashinfer_trtllm":
        return _mxint4(weights, layer)
    if layer.runner == "triton" and not triton:
        text = "the Triton runner takes symmetric int4 in groups of 32 or 128 without act-order"
        raise SglangRefusal("layer", "ValueError", text, "--moe-runner-backend auto")
    if config.get("format") != "pack-quantized" or weights["num_bits"] not in (4, 8):
        text = f"{weights['num_bits']} bits as {config.get('format')}: only 4 and 8 bits as pack-quantized are read"
        raise SglangRefusal("layer", "ValueError", text)
    if layer.runner == "triton" or (layer.runner == "auto" and layer.capability[0] == 10 and triton):
        return SglangChoice(name, "CompressedTensorsWNA16TritonMoE", "triton", "triton-wna16/1")
    layout = "marlin-act-order/1" if weights.get("actorder") == "group" else "marlin-wna16/1"
    return SglangChoice(name, "CompressedTensorsWNA16MoE", "marlin", layout)


def _mxint4(weights: Config, layer: SglangLayer) -> SglangChoice:
    if weights.get("actorder"):
        raise SglangRefusal(
            "layer", "AssertionError", "flashinfer_trtllm knows no act-order", "--moe-runner-backend auto"
        )
    if layer.dtype != "bf16":
        raise SglangRefusal("layer", "AssertionError", f"flashinfer_trtllm takes bf16, not {layer.dtype}", "dtype bf16")
    return SglangChoice("compressed-tensors", "CompressedTensorsMxInt4MoE", None, "trtllm-mxint4/1")


#: Method on CUDA that is followed -> its reader.
_READERS: dict[str, Callable[[Config, SglangLayer, str], SglangChoice]] = {
    "gptq_marlin": _gptq,
    "awq_marlin": _awq,
    "awq": _plain_awq,
    "moe_wna16": _wna16,
    "compressed-tensors": _ct,
    "w8a8_int8": _w8a8,
    "fp8": floats.fp8,
    "mxfp8": floats.fp8,
    "mxfp4": floats.mxfp4,
    "w4afp8": floats.w4afp8,
    "w8a8_fp8": floats.w8a8_fp8,
    "modelopt": floats.modelopt_fp8,
    "modelopt_fp8": floats.modelopt_fp8,
    "modelopt_fp4": floats.modelopt_fp4,
}


def decide_sglang(config: Config, layer: SglangLayer) -> SglangChoice:
    """Return the method and runner that SGLang chooses for a checkpoint's `quantization_config`.

    Raises SglangRefusal if the engine stops, with the stage and the type of its error.
    """
    config = floats.parsed(config)
    name = method_in_force(config, layer)
    if layer.ep and layer.experts % layer.tp:
        text = f"{layer.experts} experts do not divide by {layer.tp} ranks"
        raise SglangRefusal("layer", "AssertionError", text, "another tp")
    if not layer.ep and layer.inter % layer.tp:
        text = f"intermediate size {layer.inter} does not divide by tp {layer.tp}"
        raise SglangRefusal("layer", "AssertionError", text, "another tp")
    return _READERS[name](config, layer, name)

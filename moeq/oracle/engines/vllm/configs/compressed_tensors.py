"""Reader of compressed-tensors configs: validation, the config group of a projection, and the list of schemes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moeq.oracle.engines.vllm.case import Method
from moeq.oracle.engines.vllm.configs.question import (
    Config,
    ConfigQuestion,
    check_marlin_input,
    marlin_fails,
    refuse,
    unquantized,
    weight_only_key,
)
from moeq.oracle.engines.vllm.policy import EnginePolicy
from moeq.spelling import option

#: Model class -> names of gate, up and down, where these are not `gate_proj`, `up_proj`, `down_proj`: the `ckpt_names`
#: of `FusedMoE` (vLLM 0.33.0). Where experts have no gate, the engine asks for a projection called None.
_PROJECTIONS = {
    **dict.fromkeys(
        ("DeepseekV4ForCausalLM", "Lfm2MoeForCausalLM", "MiniMaxM2ForCausalLM", "MixtralForCausalLM",
         "PhiMoEForCausalLM"),
        ("w1", "w3", "w2"),
    ),
    "NemotronHForCausalLM": ("up_proj", "None", "down_proj"),
}  # fmt: skip
#: Formats of quantised activations. In their groups, integer weights need `input_activations`.
_ACTIVATION_FORMATS = ("naive-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized")


@dataclass(frozen=True)
class Arguments:
    """One `weights` or `input_activations` block with its defaults; `group` is None without a group size."""

    bits: int
    type: str
    strategy: str
    symmetric: bool
    dynamic: bool
    local: bool
    group: int | None
    actorder: str | None
    scale_dtype: str | None
    block: tuple[int, ...] | None

    def matches(self, bits: int, type_: str, *strategies: str) -> bool:
        """Tell whether element type and strategy match; without strategies, any matches."""
        return (self.bits, self.type) == (bits, type_) and (not strategies or self.strategy in strategies)


def _arguments(block: Mapping[str, Any] | None) -> Arguments | None:
    """Read a block as compressed-tensors does; None for an empty block.

    Raises ConfigRefusal if the validators of compressed-tensors refuse the block.
    """
    if not block:
        return None
    group, strategy, order = block.get("group_size"), block.get("strategy"), block.get("actorder")
    dynamic = block.get("dynamic", False)
    if strategy is None:
        strategy = "tensor" if group is None else "group" if group > 0 else "channel"
    order = ("group" if order else None) if isinstance(order, bool) else order
    arguments = Arguments(
        bits=block.get("num_bits", 8),
        type=str(block.get("type", "int")),
        strategy=str(strategy).lower(),
        symmetric=bool(block.get("symmetric", True)),
        dynamic=bool(dynamic),
        local=dynamic == "local",
        group=group,
        actorder=order,
        scale_dtype=str(block["scale_dtype"]).removeprefix("torch.") if block.get("scale_dtype") else None,
        block=_block(block.get("block_structure")),
    )
    _validate(arguments)
    return arguments


def _block(shape: Any) -> tuple[int, ...] | None:
    """Read the sizes of a block: a list of two, or text such as `128x128`."""
    try:
        sizes = [int(size) for size in shape.split("x")] if isinstance(shape, str) else shape
    except ValueError:
        sizes = ()
    if sizes is not None and not (isinstance(sizes, list) and [type(size) for size in sizes] == [int, int]):
        text = f"compressed-tensors refuses the config: block_structure {shape!r} is not two sizes"
        refuse(text, error="ValidationError")
    return None if sizes is None else tuple(sizes)


def _validate(row: Arguments) -> None:
    grouped = row.strategy in ("group", "tensor_group")
    checks = (
        (row.strategy == "token" and not row.dynamic, "static token quantisation does not exist"),
        (grouped and not (row.group and row.group > 0), f"strategy {row.strategy} needs a positive group_size"),
        (not grouped and bool(row.group and row.group > 0), f"group_size {row.group} with strategy {row.strategy}"),
        (row.strategy == "block" and row.block is None, "strategy block needs a block_structure"),
        (row.strategy != "block" and row.block is not None, f"a block_structure with strategy {row.strategy}"),
        (row.actorder == "group" and not grouped, f"group act-order with strategy {row.strategy}"),
        (row.dynamic and row.strategy in ("channel", "block"), f"dynamic quantisation per {row.strategy}"),
        (row.local and row.strategy != "tensor_group", f"local quantisation per {row.strategy}"),
    )
    for wrong, text in checks:
        if wrong:
            refuse(f"compressed-tensors refuses the config: {text}", error="ValidationError")


def _entry_matches(entry: str, name: str, engine_name: str) -> bool:
    return re.match(entry[3:], engine_name) is not None if entry.startswith("re:") else entry == name


#: Name and content of a config group.
Group = tuple[str, Mapping[str, Any]]

#: Class of the experts' module in the engine. Target `Linear` includes it unless another target names it.
_EXPERTS_CLASS = "RoutedExperts"


def _groups(config: Config, policy: EnginePolicy) -> dict[str, Group]:
    """Return target -> (name, group) in order. Every group is validated; groups for attention alone are left out."""
    targets: dict[str, Group] = {}
    for key, group in (config.get("config_groups") or {}).items():
        listed = list(group.get("targets") or ())
        if "preset" in group:
            text = f"config_groups[{key!r}] names a preset for {listed}; the engine takes groups as objects only"
            hint = "moeq transcode SRC DST --to compressed-tensors writes the preset's arguments out"
            refuse(text, hint, error="TypeError")
        if len(listed) == 1 and listed[0].endswith("Attention"):
            continue
        weights = _arguments(group.get("weights"))
        if weights is not None and weights.actorder in ("group", "dynamic") and policy.since("0.30.0"):
            own = option("engine", "moeq")
            hint = f"requantise with actorder 'weight', or convert for moeq's built-in kernels ({own})"
            refuse(f"act-order: actorder is '{weights.actorder}'; 'static' and 'weight' are accepted", hint)
        format_ = group.get("format") or config.get("format")
        inputs = group.get("input_activations")
        if format_ in _ACTIVATION_FORMATS and not inputs and weights is not None and weights.type != "float":
            text = f"format {format_} without input activations trips an assertion"
            refuse(text, "store the weights as pack-quantized", error="AssertionError", kind="BARE_ASSERTION")
        _arguments(inputs)
        targets.update({target: (key, group) for target in listed})
    return targets


def _group_of(targets: Mapping[str, Group], question: ConfigQuestion, name: str) -> Group | None:
    """Return the config group of a projection; None if the projection is ignored or no group matches."""
    names = name, question.engine_path(name)
    fused = question.fused or name
    spelled = (names, (fused, question.engine_path(fused)))
    if any(_entry_matches(entry, *one) for entry in question.config.get("ignore") or () for one in spelled):
        return None
    named = next((group for target, group in targets.items() if _entry_matches(target, *names)), None)
    if question.fused is not None:
        return named or (None if question.is_head else targets.get("Linear"))
    return named or next((group for target, group in targets.items() if _names_experts(target)), targets.get("Linear"))


def _names_experts(target: str) -> bool:
    """Tell whether a target is the class of the experts' module, or a part of its name."""
    if target.startswith("re:"):
        return re.match(target[3:], _EXPERTS_CLASS) is not None
    return target.lower() in _EXPERTS_CLASS.lower()


def _scheme(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return weights, activations and format of a group; groups in which these are equal are one scheme."""
    return _arguments(group.get("weights")), _arguments(group.get("input_activations")), group.get("format")


def _check_sparsity(config: Config) -> None:
    """Refuse sparse weights. Source: `CompressedTensorsConfig._parse_sparsity_config`, vLLM 0.26.0 to 0.33.0."""
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("targets"):
        text = "the config has a sparsity_config with targets, which compressed-tensors no longer supports"
        refuse(text, "a checkpoint without sparsity", error="DeprecationWarning")


def read_compressed_tensors(question: ConfigQuestion) -> Method:
    """Return the method of the first scheme that matches a config's groups for the projections of expert 0."""
    config = question.config
    _check_sparsity(config)
    targets = _groups(config, question.policy)
    projections = ("gate_proj", "up_proj", "down_proj")
    if question.policy.since("0.32.0"):
        gate, up, down = _PROJECTIONS.get(question.probe.shape.architecture, projections)
        projections = (gate, up if question.probe.gated else "None", down)
    modules = [f"{question.prefix}.0.{name}" for name in projections]
    if question.fused is not None:
        modules = [question.prefix]
    found = [_group_of(targets, question, module) for module in modules]
    if len({_scheme(row[1]) if row else None for row in found}) > 1:
        rows = zip(projections, found, strict=True)
        named = ", ".join(f"{projection}: {row[0] if row else 'ignored'}" for projection, row in rows)
        refuse(f"the projections of an expert resolve to different schemes ({named})")
    if found[-1] is None:
        return unquantized()
    group = found[-1][1]
    weights, inputs = _arguments(group.get("weights")), _arguments(group.get("input_activations"))
    format_ = str(group.get("format") or config.get("format") or "")
    if weights is not None:
        for scheme in _SCHEMES:
            method = scheme(question, weights, inputs, format_)
            if method is not None:
                return method
    text = f"no MoE scheme matches weights {_words(weights)} with input activations {_words(inputs)}"
    refuse(text, "supported: see `moeq backends`", error="RuntimeError")


def _words(arguments: Arguments | None) -> str:
    if arguments is None:
        return "none"
    scope = f"{arguments.strategy} {arguments.group}" if (arguments.group or 0) > 0 else arguments.strategy
    kind = "dynamic" if arguments.dynamic else "static"
    return f"{arguments.type}{arguments.bits} per {scope}, {kind}, {'sym' if arguments.symmetric else 'asym'}"


#: Returns the method if (question, weights, input activations, format) are of this scheme, else None.
Scheme = Callable[[ConfigQuestion, Arguments, Arguments | None, str], Method | None]


def _is_mxfp4(row: Arguments) -> bool:
    return row.matches(4, "float", "group") and row.group == 32 and row.symmetric


def _mxfp4_fp8(question: ConfigQuestion, weights: Arguments, inputs: Arguments | None, format_: str) -> Method | None:
    if not question.policy.since("0.32.0") or not _is_mxfp4(weights) or inputs is None or weights.dynamic:
        return None
    if not inputs.matches(8, "float", "token", "group") or not inputs.dynamic or not inputs.symmetric:
        return None
    # The engine builds the key with float32 scales whatever the checkpoint says: groups of 32 do not get the MXFP8 key.
    key = "kFp8DynamicTokenSym" if inputs.strategy == "token" else f"kFp8Dynamic{inputs.group}Sym"
    return Method("CompressedTensorsW4A8Mxfp4MoEMethod", "mxfp4-generic", "ct", "kMxfp4Static", key, 4, 32)


def _mxfp4(question: ConfigQuestion, weights: Arguments, inputs: Arguments | None, format_: str) -> Method | None:
    if not _is_mxfp4(weights):
        return None
    return Method("CompressedTensorsW4A4Mxfp4MoEMethod", "mxfp4-ct", "ct", "kMxfp4Static", None, 4, 32)


def _mxfp8(question: ConfigQuestion, weights: Arguments, inputs: Arguments | None, format_: str) -> Method | None:
    if not (weights.matches(8, "float", "group") and weights.group == 32 and weights.symmetric):
        return None
    if weights.scale_dtype != "uint8":
        return None
    return Method("CompressedTensorsW8A8Mxfp8MoEMethod", "mxfp8", "ct", "kMxfp8Static", "kMxfp8Dynamic", 8, 32)


def _wna16(question: ConfigQuestion, weights: Arguments, inputs: Arguments | None, format_: str) -> Method | None:
    if inputs is not None or weights.dynamic or weights.strategy not in ("group", "channel"):
        return None
    if format_ != "pack-quantized" or not 2 <= weights.bits <= 8:
        text = f"weight-only experts need format pack-quantized and 2 to 8 bits, this is {format_}, {weights.bits} bits"
        refuse(text, "name the format in the config group")
    policy = question.policy
    if not policy.since("0.27.0"):
        built_in = _wna16_built_in(question, weights)
        if built_in is not None:
            return built_in
        check_marlin_input(question.probe)
    if not weights.symmetric and weights.bits not in (4, 8) and not policy.since("0.31.0"):
        text = f"weight-only experts of {weights.bits} bits with zero points are not in this version's table of types"
        refuse(text, "a symmetric checkpoint, or vLLM 0.31 and newer", error="KeyError")
    if weights.bits not in (4, 8) and not policy.since("0.29.0"):
        refuse(f"weight-only experts have 4 or 8 bits, these have {weights.bits}", "vLLM 0.29 and newer")
    group = -1 if weights.group is None else weights.group
    ordered = weights.strategy == "group" and weights.actorder in ("group", "dynamic")
    if policy.since("0.27.0") and not policy.since("0.30.0"):
        if weights.bits == 8 and weights.group != -1 and not policy.since("0.29.0"):
            text = "8-bit weights trip an assertion of this version unless their group_size says -1"
            refuse(text, "vLLM 0.29 and newer", error="AssertionError", kind="BARE_ASSERTION")
        group = 0 if weights.group is None else weights.group  # these versions read a missing group size as 0, not -1
    return Method(
        "CompressedTensorsWNA16MoEMethod" if policy.since("0.27.0") else "CompressedTensorsWNA16MarlinMoEMethod",
        "wna16",
        "ct",
        weight_only_key(weights.bits, weights.symmetric, group),
        None,
        weights.bits,
        group,
        group_missing=weights.group is None,
        zero_points=not weights.symmetric,
        raw_zero_points=not weights.symmetric,
        tile_padding=not ordered or not policy.since("0.27.0"),
        act_order=ordered,
        marlin_assertion=(weights.strategy == "channel" or weights.actorder == "group") and policy.since("0.27.0"),
        symmetric_assertion=policy.since("0.27.0") and not policy.since("0.29.0"),
    )


def _wna16_built_in(question: ConfigQuestion, weights: Arguments) -> Method | None:
    """Return the method with its own kernel: before 0.27.0, on ROCm or for shapes that Marlin refuses; else None."""
    rocm = question.platform == "rocm"
    group = -1 if weights.group is None else weights.group
    ordered = weights.strategy == "group" and weights.actorder in ("group", "dynamic")
    if not rocm and not marlin_fails(question, group, tile_padding=not ordered):
        return None
    if ordered:
        refuse("act-order (actorder group) needs Marlin's shapes", "requantise with actorder 'weight'")
    arch, backend, lora = question.probe.gpu.arch, question.probe.deployment.backend, question.probe.deployment.lora
    if rocm and backend == "emulation" and not (arch == "gfx1100" and weights.bits == 4):
        return None
    flydsl = arch == "gfx950" and backend == "flydsl" and (weights.bits, group) == (4, 32) and not lora
    for wrong, text in (
        (weights.strategy != "group", "the kernel built into this version's method takes group scales only"),
        (not weights.symmetric, "the kernel built into this version's method takes symmetric weights only"),
    ):
        if wrong and not flydsl:
            refuse(text, "--moe-backend emulation on ROCm", error="AssertionError")
    if flydsl:
        name, kernel = "CompressedTensorsW4A16FlydslMoEMethod", ("FLYDSL", "FlydslExperts")
    elif rocm and arch == "gfx1100" and weights.bits == 4:
        name, kernel = "CompressedTensorsWNA16RDNA3MoEMethod", ("RDNA3", "Rdna3WNA16Experts")
    else:
        name, kernel = "CompressedTensorsWNA16MoEMethod", ("TRITON", "TritonWNA16Experts")
    return Method(name, "wna16", "ct", f"kInt{weights.bits}Static", None, weights.bits, group, built_in=kernel)


def _nvfp4_format(row: Arguments | None) -> bool:
    return row is not None and row.matches(4, "float", "tensor_group") and row.group == 16 and row.symmetric


def _nvfp4(question: ConfigQuestion, weights: Arguments, inputs: Arguments | None, format_: str) -> Method | None:
    if not _nvfp4_format(weights):
        return None
    if inputs is not None and not _nvfp4_format(inputs):
        refuse(f"NVFP4 weights need NVFP4 activations or none, these are {_words(inputs)}")
    activation = "kNvfp4Dynamic" if inputs else None
    return Method("CompressedTensorsW4A4Nvfp4MoEMethod", "nvfp4", "ct", "kNvfp4Static", activation, 4, 16)


_FP8_SCOPES = {"tensor": "kFp8StaticTensorSym", "channel": "kFp8StaticChannelSym", "block": "kFp8Static128BlockSym"}


def _fp8(question: ConfigQuestion, weights: Arguments, inputs: Arguments | None, format_: str) -> Method | None:
    if inputs is None or weights.type != "float" or inputs.type != "float" or weights.dynamic or not weights.symmetric:
        return None
    if weights.strategy not in _FP8_SCOPES or not (
        inputs.dynamic or (inputs.symmetric and inputs.strategy == "tensor")
    ):
        return None
    scopes = weights.strategy, inputs.strategy
    if scopes not in (("tensor", "tensor"), ("channel", "token")) and weights.strategy != "block":
        text = f"fp8 weights per {scopes[0]} with activations per {scopes[1]} trip an assertion"
        refuse(text, "channel with token, or tensor with tensor", error="AssertionError", kind="BARE_ASSERTION")
    weight = _FP8_SCOPES[weights.strategy]
    if weights.strategy == "block":
        activation = "kFp8Dynamic128Sym"
    elif inputs.strategy == "token":
        activation = "kFp8DynamicTokenSym"
    else:  # activations per tensor; the engine's key for dynamic ones is the key of blocks
        activation = "kFp8Dynamic128Sym" if inputs.dynamic else "kFp8StaticTensorSym"
    block = (weights.block[0], weights.block[1]) if weights.block else None
    return Method("CompressedTensorsW8A8Fp8MoEMethod", "fp8", "ct", weight, activation, 8, -1, block=block)


def _int8(question: ConfigQuestion, weights: Arguments, inputs: Arguments | None, format_: str) -> Method | None:
    if inputs is None:  # the engine reads `.num_bits` of None
        refuse(f"weights {_words(weights)} need input activations", error="AttributeError")
    if weights.bits != 8 or inputs.bits != 8 or not weights.symmetric or weights.dynamic:
        return None
    if weights.strategy not in ("tensor", "channel") or inputs.strategy != "token" or not inputs.dynamic:
        return None
    if weights.strategy != "channel":
        refuse(f"int8 experts need per-channel weights with per-token activations, these are per {weights.strategy}")
    return Method(
        "CompressedTensorsW8A8Int8MoEMethod", "int8", "ct", "kInt8StaticChannelSym", "kInt8DynamicTokenSym", 8, -1
    )


def _w4a8(weights: Arguments, inputs: Arguments | None, type_: str) -> bool:
    return (
        weights.matches(4, "int", "group", "channel") and weights.symmetric and not weights.dynamic
        and inputs is not None and inputs.matches(8, type_, "token") and inputs.dynamic
    )  # fmt: skip


def _w4a8_fp8(question: ConfigQuestion, weights: Arguments, inputs: Arguments | None, format_: str) -> Method | None:
    newer = question.policy.since("0.31.0")
    if not newer and not _reads_as_hopper(question):
        return None
    # Older versions do not look at the type of the activations.
    if not any(_w4a8(weights, inputs, kind) for kind in (("float",) if newer else ("float", "int"))):
        return None
    if weights.strategy != "group" or not (inputs and inputs.symmetric):
        return None
    if weights.group != 128:
        text = f"int4 weights with fp8 activations need group size 128, this is {weights.group}"
        refuse(text, "requantise with group size 128", error="AssertionError")
    return Method("CompressedTensorsW4A8Fp8MoEMethod", "w4a8-fp8", "ct", "kInt4Static", "kFp8DynamicTokenSym", 4, 128)


def _reads_as_hopper(question: ConfigQuestion) -> bool:
    """Tell whether the engine reads capability 9.0 from the device, as it does from Hopper and gfx90a."""
    gpu = question.probe.gpu
    return (gpu.platform == "cuda" and gpu.capability == (9, 0)) or gpu.arch == "gfx90a"


def _w4a8_int8(question: ConfigQuestion, weights: Arguments, inputs: Arguments | None, format_: str) -> Method | None:
    kinds = ("int",) if question.policy.since("0.31.0") else ("int", "float")
    if not any(_w4a8(weights, inputs, kind) for kind in kinds):
        return None
    group = -1 if weights.group is None else weights.group
    hidden, inner = question.probe.shape.hidden_size, question.probe.intermediate
    if group != -1 and (hidden % group or inner % group):
        refuse(f"group size {group} does not divide hidden size {hidden} and intermediate size per rank {inner}")
    scope = "Channel" if group == -1 else f"Group{group}"
    return Method("CompressedTensorsW4A8Int8MoEMethod", "w4a8-int8", "ct", f"kInt4W4A8Static{scope}Sym", None, 4, group)


#: Schemes in the engine's order; the first match wins.
_SCHEMES: tuple[Scheme, ...] = (
    _mxfp4_fp8, _mxfp4, _mxfp8, _wna16, _nvfp4, _fp8, _int8, _w4a8_fp8, _w4a8_int8,
)  # fmt: skip

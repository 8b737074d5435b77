"""Gate G13: the tensors of a layer's experts, compared with the parameters that the engine's method creates for it.

`tools/extract.py parameters` creates the parameters of every method, loads tensors of every shape into them, and writes
`parameters.json`. A method that is not in the file is not checked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from moeq.oracle.engines.vllm.case import Case, Method
from moeq.oracle.engines.vllm.entry_points import is_gpt_oss
from moeq.oracle.engines.vllm.expert_names import names_of_class
from moeq.oracle.engines.vllm.facts import read_facts, row_of
from moeq.oracle.engines.vllm.outcome import Outcome
from moeq.oracle.records import Gate, StoredTensor

#: Families whose key does not tell bits and scales apart.
_INTEGERS = ("wna16", "w4a8-fp8", "w4a8-int8", "humming")
#: Parts that no method needs.
_OPTIONAL = ("bias", "g_idx", "qzeros", "weight_shape", "weight_zero_point", "weight_g_idx")
#: Parts that loaders pass over where the method has no parameter for them.
_PASSED_OVER = ("bias", "g_idx", "weight_g_idx", "weight_shape")
#: Parts that hold integer codes, and parts that hold scales or zero points of their groups.
_PACKED, _GROUPED = ("qweight", "weight_packed"), ("scales", "qzeros", "weight_scale", "weight_zero_point")
#: Parts that hold static scales of activations.
_ACTIVATION_SCALES = ("input_scale", "input_global_scale")
#: Other spellings of a parameter's name in checkpoints, which some model classes translate (DeepSeek-V4, Mistral 3).
_SPELLINGS = {"scale": ("weight_scale_inv", "weight_scale"), "weight_scale": ("weight_scale_inv",),
              "weight_scale_inv": ("weight_scale",)}  # fmt: skip
#: Parts of gpt-oss, whose class loads them into parameters of its own method only.
_GPT_OSS = {"blocks": "weight", "scales": "weight_scale"}
_FLOATS = ("F16", "BF16", "F32", "F64")
#: Parameter dtype -> stored dtypes whose values survive the copy into it.
_LOADS: dict[str, tuple[str, ...]] = {
    "int32": ("I32",),
    "int8": ("I8", "U8"),
    "uint8": ("U8", "I8", "F8_E8M0"),
    "float8_e4m3fn": ("F8_E4M3",),
    "float8_e8m0fnu": ("F8_E8M0", "U8"),
    **dict.fromkeys(("float16", "bfloat16", "float32"), (*_FLOATS, "F8_E4M3", "F8_E8M0")),
}

#: Parameter name -> torch dtype, and shape in words such as `K/8`; None where the method's own loader converts values.
Parameters = Mapping[str, tuple[str, Sequence[str] | None]]

#: Parameters of methods that quantise float weights while they load.
_ONLINE_PARAMETERS: Parameters = {"w13_weight": ("bfloat16", ("N", "K")), "w2_weight": ("bfloat16", ("N", "K"))}


def key_of(method: Method) -> str:
    """Return the key of the parameters that a method creates: its class and the kind of its weights."""
    group = method.group_size or 0
    scales = "block" if method.block else "group" if group > 0 else "channel" if group < 0 else ""
    zeros = "zeros" if method.zero_points else ""
    inputs = "static" if (method.activation_key or "").startswith("kFp8Static") else ""
    weights = f"int{method.bits}" if method.family in _INTEGERS else method.weight_key
    return "|".join((method.name, method.config, weights, scales, zeros, inputs))


def parameters_of(version: str, method: Method) -> Parameters | None:
    """Look up the parameters that a method creates: name -> dtype and stored shape; None if they are not known."""
    row = row_of(version, read_facts("parameters.json").get(key_of(method), ()))
    if row:
        known: Parameters = row["parameters"]
        return known
    usual = "kFp8Static128BlockSym"
    if method.block and method.weight_key != usual:  # other blocks, or blocks that the engine refines for a shard
        found = parameters_of(version, replace(method, weight_key=usual)) or {}
        return {name: (dtype, None if "scale" in name else shape) for name, (dtype, shape) in found.items()} or None
    return None


def unfit_part(version: str, method: Method, stored: Mapping[str, tuple[str, tuple[int, ...]]]) -> str | None:
    """Return which part of a linear module a method cannot load, or None.

    A config's methods create the same parameters for linear modules as for experts. The packed weights tell `N` and
    `K`, from which the expected shapes of scales and zero points of integers follow.
    """
    created = parameters_of(version, method) or {}
    needed = {name.removeprefix("w2_"): row for name, row in created.items() if name.startswith("w2_")}
    sizes = {"G": max(method.group_size or 1, 1)}
    for part, (dtype, shape) in sorted(needed.items(), key=lambda row: row[0] not in _PACKED):
        if "input" in part or (part in _OPTIONAL and part not in stored):
            continue
        if part not in stored:
            return f"no {part}"
        held, lengths = stored[part]
        if shape is None:
            continue
        if held not in _LOADS.get(dtype, (held,)):
            return f"{part} as {held}"
        if part in _PACKED:
            rows = zip((word.partition("/") for word in shape), lengths, strict=False)
            sizes |= {size: length * int(codes or 1) for (size, _, codes), length in rows}
        elif method.family in _INTEGERS and {"N", "K"} <= sizes.keys() and part in _GROUPED:
            wanted = [_value(word, sizes) for word in shape]
            if list(lengths) != wanted:
                return f"{part} {list(lengths)}, where the config means {wanted}"
    return None


def with_tensors(outcome: Outcome, tensors: Sequence[StoredTensor]) -> Outcome:
    """Return the outcome for a file with these tensors: with gate G13 if it fails, and with uncalibrated experts."""
    outcome = replace(outcome, uncalibrated=uncalibrated(outcome.case, tensors))
    gate = check_tensors(outcome, tensors)
    return replace(outcome, gates=(*outcome.gates, gate)) if gate else outcome


def check_tensors(outcome: Outcome, tensors: Sequence[StoredTensor]) -> Gate | None:
    """Return the failed gate if the engine cannot load a layer's tensors, or loads them as other numbers."""
    case = outcome.case
    if outcome.refused:
        return None
    online = case.method.config in ("online", "experts_int8")
    created = _ONLINE_PARAMETERS if online else parameters_of(case.policy.version, case.method)
    placeholder = case.method.name == "MoeWNA16Method" and not case.method.zero_points
    packing = f"{outcome.config.get('quant_method')} {outcome.config.get('packing_format')}"
    if created and placeholder and "awq" in packing:  # only for GPTQ's files the method creates placeholder zeros
        created = {name: row for name, row in created.items() if not name.endswith("qzeros")}
    problem = None if created is None else next(_problems(case, created, tensors), None)
    problem = problem or _other_packing(case, packing, tensors)
    cut = _cut_blocks(outcome, tensors) or _cut_groups(case, tensors)
    if problem is None and cut is not None:  # other ranks may divide the sizes, and moeq's kernels run them
        return Gate("G5", "sizes per rank", False, cut, "RuntimeError", "LOADING")
    if problem is None:
        return None
    text = f"{case.method.name} cannot load the experts: {problem}"
    return Gate("G13", "tensors of experts", False, text, "RuntimeError", "LOADING", _remedy(outcome, tensors))


def _cut_blocks(outcome: Outcome, tensors: Sequence[StoredTensor]) -> str | None:
    """Return why scales of blocks cannot be repeated for the smaller blocks of a rank's shard; None if they can.

    The loader repeats every scale, also that of a cut last block, and then has more scales than the parameter takes.
    Source: vLLM 0.29.0 to 0.33.0, `RoutedExperts.weight_loader`, `weight_scale_refine`.
    """
    stored, case = outcome.config.get("weight_block_size") or [128, 128], outcome.case
    if case.method.block is None or list(case.method.block) == stored or not case.policy.since("0.29.0"):
        return None
    for tensor in tensors:
        cut = [size for size, block in zip(_sizes(case, tensor), stored, strict=True) if size % block]
        if cut and tensor.part in ("weight_scale_inv", "weight_scale", "scale"):
            new = " x ".join(map(str, case.method.block))
            held = f"{tensor.projection}.{tensor.part} holds scales of {stored[0]} x {stored[1]} blocks"
            return f"{held}, which do not divide {cut[0]} features, and the engine repeats them for blocks of {new}"
    return None


def _cut_groups(case: Case, tensors: Sequence[StoredTensor]) -> str | None:
    """Return why ranks cannot split the groups of a four-bit float format; None if they can.

    Every rank loads whole groups, and its last group stays unfilled (vLLM 0.26.0 to 0.33.0, `RoutedExperts._load_w2`).
    """
    key, inner, ranks = case.method.weight_key or "", case.shape.intermediate_size, case.moe_tp
    group = 32 if key.startswith("kMxfp4") else 16
    stored = any(tensor.projection == "down" and "scale" in tensor.part and not tensor.stacked for tensor in tensors)
    if not (key.startswith(("kMxfp4", "kNvfp4")) and stored) or inner % (group * ranks) == 0:
        return None
    return f"{inner} features on {ranks} ranks are {inner // ranks} for each, and groups of {group} do not divide them"


def _other_packing(case: Case, packing: str, tensors: Sequence[StoredTensor]) -> str | None:
    """Return why MoeWNA16's loader gets GPTQ's words where the config says AWQ, or the reverse; None if it does not."""
    bits = case.method.bits or 0
    for tensor in tensors if case.method.name == "MoeWNA16Method" and bits else ():
        n, k = _sizes(case, tensor)
        gptq, awq = [k * bits // 32, n], [k, n * bits // 32]
        wanted, other = (awq, gptq) if "awq" in packing else (gptq, awq)
        if tensor.part == "qweight" and list(tensor.shape) == other != wanted:
            return f"{tensor.projection}.qweight is packed as {list(tensor.shape)}, and the loader takes {wanted}"
    return None


def uncalibrated(case: Case, tensors: Sequence[StoredTensor]) -> tuple[int, ...]:
    """List the experts that lack a static activation scale in the file, if the method's parameters have one."""
    created = parameters_of(case.policy.version, case.method) or {}
    missing: set[int] = set()
    for name in created:
        head, _, part = name.partition("_")
        if part not in _ACTIVATION_SCALES:
            continue
        projections = {row.projection for row in tensors if (row.projection == "down") == (head == "w2")}
        for projection in projections:
            rows = [row for row in tensors if (row.projection, row.part) == (projection, part)]
            every = set(range(case.shape.num_experts))
            missing |= every - set().union(*(row.experts or every for row in rows))
    return tuple(sorted(missing))


def _zero_points(case: Case) -> Iterator[str]:
    """Yield the reasons why MoeWNA16's loader does not store the zero points."""
    if case.method.name != "MoeWNA16Method" or not case.method.zero_points:
        return
    if case.deployment.ep > 1:
        yield "its loader stores zero points by global expert numbers, which a rank of expert parallelism does not have"
    if case.method.bits == 8 and not case.policy.since("0.32.0"):
        yield "this version's loader cuts zero points of 8 bits as if they had 4"


def _problems(case: Case, created: Parameters, tensors: Sequence[StoredTensor]) -> Iterator[str]:
    yield from _zero_points(case)
    loaded: set[str] = set()
    for tensor in sorted(tensors, key=lambda row: "scale" in row.part):  # weights first: their problem says most
        head = "w2" if tensor.projection == "down" else "w13"
        name = _parameter(case, created, head, _part(case, tensor))
        where = f"{tensor.projection}.{tensor.part} ({tensor.dtype} {list(tensor.shape)}{tensor.which})"
        if name is None and tensor.part == "bias" and not is_gpt_oss(case.shape):
            yield f"the file has {where}, and the method creates no bias: the engine leaves it out"
        if name is None and tensor.part in _PASSED_OVER:
            continue
        if name is None:
            names = (part.removeprefix(f"{head}_") for part in created if part.startswith(f"{head}_"))
            yield f"the file has {where}, and the method creates {', '.join(sorted(names))} only"
            continue
        loaded.add(name)
        dtype, shape = created[name]
        if shape is None and not tensor.stacked:  # the method's own loader converts the values
            expected = _converted(case, tensor)
            if expected is not None:
                yield f"the file has {where}, and the method's loader takes {expected}"
            continue
        if tensor.dtype not in _LOADS.get(dtype, (tensor.dtype,)) and tensor.part not in _OPTIONAL:
            yield f"the file has {where}, and the method's parameter is {dtype}"
        elif shape is not None and not tensor.stacked and not _fits(case, tensor, shape):
            yield f"the file has {where}, and the method's parameter takes {_expected(case, tensor, shape)}"
    stored_heads = {"w2" if tensor.projection == "down" else "w13" for tensor in tensors}
    for name in created:
        part = name.partition("_")[2]
        needed = "input" not in part and part not in _OPTIONAL
        if needed and name not in loaded and name.partition("_")[0] in stored_heads:
            yield f"the method needs {part}, which the file does not have"


def _part(case: Case, tensor: StoredTensor) -> str:
    """Return a part's name in the spelling of parameters."""
    own = tensor.stacked and case.method.name == "GptOssMxfp4MoEMethod"
    return _GPT_OSS.get(tensor.part, tensor.part) if own else tensor.part


def _parameter(case: Case, created: Parameters, head: str, part: str) -> str | None:
    exact = names_of_class(case.policy.version, case.shape.architecture) is not None
    for spelling in (part, *(() if exact else _SPELLINGS.get(part, ()))):
        if f"{head}_{spelling}" in created:
            return f"{head}_{spelling}"
    return None


def _converted(case: Case, tensor: StoredTensor) -> str | None:
    """Return what a converting loader takes where it cannot take this tensor; None where the numbers are as many."""
    if tensor.part in _ACTIVATION_SCALES:
        return None if math.prod(tensor.shape) == 1 else "one number"
    if tensor.part in _PASSED_OVER:
        return None
    bits, group, (n, k) = case.method.bits, case.method.group_size, _sizes(case, tensor)
    if not bits or not group or (tensor.dtype != "I32" and tensor.part != "scales"):
        return None
    if tensor.part == "scales" and k % group:
        return f"groups that divide {k} columns, not groups of {group}"
    zeros = k // group * -(-n * bits // 32)
    wanted = {"scales": k // group * n, "qzeros": zeros, "weight_zero_point": zeros}.get(
        tensor.part, n * -(-k * bits // 32)
    )
    if (tensor.part == "qzeros" and not case.method.zero_points) or math.prod(tensor.shape) == wanted:
        return None
    return f"{wanted} numbers for [{n}, {k}] with groups of {group}"


def _sizes(case: Case, tensor: StoredTensor) -> tuple[int, int]:
    """Return N and K of a stored matrix."""
    hidden, inner = case.shape.hidden_size, case.shape.intermediate_size
    if tensor.projection == "down":
        return hidden, inner
    return inner * (2 if tensor.projection == "gate_up" else 1), hidden


def _fits(case: Case, tensor: StoredTensor, shape: Sequence[str]) -> bool:
    wanted = _expected(case, tensor, shape)
    scalar = wanted in ([], [1]) and list(tensor.shape) in ([], [1])
    return scalar or list(tensor.shape) == wanted


def _expected(case: Case, tensor: StoredTensor, shape: Sequence[str]) -> list[int]:
    """Return the shape of one expert's tensor that the parameter takes."""
    n, k = _sizes(case, tensor)
    block = case.method.block or (1, 1)
    group = block[1] if case.method.block else max(case.method.group_size or 1, 1)
    values = {"N": n, "K": k, "G": group, "GN": block[0]}
    return [_value(word, values) for word in shape]


def _value(word: str, values: Mapping[str, int]) -> int:
    """Evaluate `N`, `K/8`, `K*3/32` or `N/GN`, rounding up."""
    match = re.fullmatch(r"(\w+?)(?:\*(\d+))?(?:/(\w+))?", word)
    assert match is not None  # the extractor writes no other form
    top = values.get(match[1]) or int(match[1])
    divisor = values.get(match[3] or "") or int(match[3] or 1)
    return -(-top * int(match[2] or 1) // divisor)


def _remedy(outcome: Outcome, tensors: Sequence[StoredTensor]) -> str | None:
    """Return the change of one config.json field that makes the config describe the file; None if no field does."""
    if outcome.entry == "deepseek_v4_fp8":
        fp8 = any(tensor.part == "weight" and tensor.dtype == "F8_E4M3" for tensor in tensors)
        return f'"expert_dtype": "{"fp8" if fp8 else "fp4"}" in config.json'
    stored = any("scale" in tensor.part or tensor.part == "qweight" for tensor in tensors)
    if outcome.config and stored and outcome.case.method.family == "unquantized":
        return "a quantization_config without the entry that leaves these experts out"
    return None

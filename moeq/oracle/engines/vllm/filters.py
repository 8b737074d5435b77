"""Filters: checks of vLLM on a whole backend, before its classes are asked.

Source: `_backend_incompatibility_reason` of the int4 and int8 family, vLLM 0.27.0 to 0.33.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moeq.oracle.engines.vllm.case import Case
from moeq.oracle.engines.vllm.policy import Backend
from moeq.oracle.engines.vllm.rules import Failure, nearest_tp
from moeq.oracle.records import Reason

Check = Callable[[Case], Iterator[Failure]]


@dataclass(frozen=True)
class Filter:
    """Check of the engine on a whole backend, before its classes are asked."""

    code: str
    title: str
    check: Check


#: Name of a filter in backends.toml -> the filter; `_filter` fills this table.
FILTERS: dict[str, Filter] = {}


def _filter(name: str, code: str, title: str) -> Callable[[Check], Check]:
    """Return a decorator that adds a check to `FILTERS` under this name."""

    def add(check: Check) -> Check:
        FILTERS[name] = Filter(code, title, check)
        return check

    return add


@_filter("zero-point", "F01_ZERO_POINT", "no zero points")
def _zero_point(case: Case) -> Iterator[Failure]:
    if case.method.zero_points:
        yield "the checkpoint's method has zero points", "a symmetric checkpoint"


@_filter("bias", "F02_BIAS", "no expert bias")
def _bias(case: Case) -> Iterator[Failure]:
    if case.method.bias_possible:
        real = "has" if case.shape.has_bias else "has none, but"
        yield f"expert bias: this checkpoint {real} {case.method.name} assumes it may have one", None


@_filter("ct-only", "F03_CONFIG", "compressed-tensors only")
def _ct_only(case: Case) -> Iterator[Failure]:
    if case.method.config != "ct":
        yield f"config is {case.method.config}, only compressed-tensors is taken", None


@_filter("marlin-config", "F03_CONFIG", "AWQ, GPTQ or compressed-tensors")
def _marlin_config(case: Case) -> Iterator[Failure]:
    if case.method.config not in ("awq", "gptq", "ct", "moe_wna16"):
        yield f"config is {case.method.config}, only AWQ, GPTQ and compressed-tensors are converted", None


@_filter("not-awq", "F04_LAYOUT", "not the AWQ layout")
def _not_awq(case: Case) -> Iterator[Failure]:
    if case.method.config == "awq":
        yield "the AWQ word order is not read", None


@_filter("not-moe-wna16", "F04_LAYOUT", "not the MoeWNA16 layout")
def _not_moe_wna16(case: Case) -> Iterator[Failure]:
    if case.method.config == "moe_wna16":
        yield "weights were loaded in the MoeWNA16 byte layout", None


@_filter("act-order", "F05_ACT_ORDER", "no act-order")
def _act_order(case: Case) -> Iterator[Failure]:
    if case.method.act_order:
        yield "columns are reordered by activation order", "a checkpoint without act-order"


@_filter("group-only", "F06_STRATEGY", "group scales only")
def _group_only(case: Case) -> Iterator[Failure]:
    if (case.method.group_size or -1) <= 0:
        yield "scales are per channel, only groups are taken", None


@_filter("marlin-shape", "F07_MARLIN_SHAPE", "hidden % 128, groups 32/64/128/channel that divide the shard")
def _marlin_shape(case: Case) -> Iterator[Failure]:
    yield from marlin_shape(case, case.method.group_size, tile_padding=case.method.tile_padding)


@_filter("zen-w4a8", "F08_SWITCH", "VLLM_CPU_INT4_W4A8 not 0")
def _zen_w4a8(case: Case) -> Iterator[Failure]:
    if case.env("VLLM_CPU_INT4_W4A8") == "0":
        yield "VLLM_CPU_INT4_W4A8=0", "unset VLLM_CPU_INT4_W4A8"


@_filter("deep-gemm-megakernel", "F13_MEGAKERNEL", "DeepSeek-V4 routing, no load balancing")
def _megakernel(case: Case) -> Iterator[Failure]:
    if case.shape.routing != "DeepseekV4":
        yield f"routing {case.shape.routing}: this megakernel knows DeepseekV4's only", None
    if case.deployment.eplb:
        yield "expert load balancing", "no expert load balancing"


@_filter("zen-group", "F09_GROUP", "group size multiple of 4")
def _zen_group(case: Case) -> Iterator[Failure]:
    # vLLM reads the attribute `group_size`, which its Quark config does not have.
    group = None if case.method.config == "quark" else case.method.group_size
    if group is None or group <= 0 or group % 4:
        yield f"group size {group or -1} is not a positive multiple of 4", None


#: Group sizes of Marlin; -1 is one group per channel.
MARLIN_GROUPS = (-1, 32, 64, 128)


def marlin_shape(case: Case, group: int | None, *, tile_padding: bool) -> Iterator[Failure]:
    """Run Marlin's shape test and yield each cause (vLLM has one text for all of them).

    Source: `check_moe_marlin_supports_config` of vLLM 0.33.0; sizes are unpadded and per rank.
    """
    group = group if group is not None else -1
    hidden, inner = case.shape.hidden_size, case.intermediate
    if case.gpu.platform == "rocm":
        yield "Marlin has no ROCm build", "a CUDA device"
    if hidden % 128:
        yield f"hidden size {hidden} is not a multiple of 128 (remainder {hidden % 128})", None
    if group not in MARLIN_GROUPS:
        yield f"group size {group or 'unset'} is not one of {', '.join(map(str, MARLIN_GROUPS))}", None
    if case.shape.router_weight_on_input and not case.policy.since("0.27.0"):
        yield "router weights multiply the input", "vLLM 0.27 and newer"
    multiple = (group if group > 0 else 1) if tile_padding else max(64, group)
    if inner % multiple:
        text = f"intermediate size per rank {inner} is not a multiple of {multiple} (remainder {inner % multiple})"
        yield text, nearest_tp(case, lambda size: size % multiple == 0)


def filter_reasons(case: Case, backend: Backend) -> tuple[Reason, ...]:
    """List every failed filter of a backend."""
    found: list[Reason] = []
    for name in backend.filters:
        row = FILTERS[name]
        found.extend(Reason(row.code, text, remedy) for text, remedy in row.check(case))
        if found and case.brief:
            break
    return tuple(found)

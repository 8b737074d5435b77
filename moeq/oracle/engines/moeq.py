"""Verdicts on moeq's own kernels, with one row of rules per kernel format.

vLLM chooses kernels by quantisation keys. These rules read the scheme itself: its group size, zero points, act-order,
biases and activation type. The formats are those of `moeq_kernels.formats`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from moeq.deploy.deployment import Deployment
from moeq.layouts.layout import Layout
from moeq.layouts.readers import MOEQ
from moeq.layouts.registry import LAYOUTS, layout_class
from moeq.oracle.devices import DeviceTerm, device_term
from moeq.oracle.engines.vllm.sizes import round_up
from moeq.oracle.records import CandidateReport, ConvertTarget, EngineError, Gate, MoeShape, Reason, Sizes, Verdict
from moeq.oracle.versions import BUILTIN
from moeq.schemes.base import Scheme
from moeq.spelling import option
from moeq_kernels.activations import BY_ENGINE_NAME
from moeq_kernels.capabilities import CAPABILITIES
from moeq_kernels.formats import FORMATS, Format

#: The backend that is preferred to all others, which follow in the order of the kernels' own table.
_PREFERRED = "MOEQ"
#: Names that schemes use for the torch dtypes of scales.
_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "uint8": "e8m0"}


@dataclass(frozen=True)
class KernelRow:
    """One format that the kernels read, in the oracle's terms."""

    backend: str  #: backend name, or the layout's id where no backend is named
    format: Format  #: how the kernels read it
    scales: tuple[str, ...]  #: accepted scale dtypes
    dtypes: tuple[str, ...]  #: accepted dtypes of x
    keeps_16_bit: bool  #: whether the kernel runs 16-bit activations whatever the checkpoint declares

    @property
    def activation(self) -> str:
        """Type that rows of x are quantised to, or `none`."""
        return "int8" if self.format.int8_activations else "none"


def _kernel_rows(layout: str) -> Iterator[KernelRow]:
    """Yield a row for each element type that the kernels read in a layout; none where no kernel reads it."""
    kind = layout_class(layout)
    reader = kind.own_reader()
    if reader is None:
        return
    for row in FORMATS.values():
        if row.layout == layout:
            dtypes = tuple("fp16" if name == "float16" else _DTYPES[name] for name in row.dtypes)
            scales = _scales(kind, reader, row)
            yield KernelRow(reader.backend or layout, row, scales, dtypes, reader.keeps_16_bit)


def _scales(kind: type[Layout], reader: MOEQ, row: Format) -> tuple[str, ...]:
    """Return the scale dtypes that a checkpoint may have: those that the kernel reads, or that its layout recodes.

    Messages list them in this order: f16 before bf16.
    """
    if reader.keeps_16_bit:
        return kind.scale_dtypes
    return tuple(sorted((_DTYPES[name] for name in row.scale_dtypes), key=lambda name: name != "f16"))


@dataclass(frozen=True)
class BuiltinPolicy:
    """Capabilities of the kernel package in the oracle's terms."""

    devices: tuple[DeviceTerm, ...]
    activations: tuple[str, ...]
    kernels: tuple[KernelRow, ...]


@cache
def builtin_policy() -> BuiltinPolicy:
    """Build the policy of moeq's own kernels."""
    layouts = [layout for layout in dict.fromkeys(entry.layout for entry in FORMATS.values()) if layout in LAYOUTS]
    rows = [row for layout in layouts for row in _kernel_rows(layout) if row.backend != layout]
    rows.sort(key=lambda row: row.backend != _PREFERRED)
    portable = CAPABILITIES[0]
    major, minor = portable.minimum_cuda
    devices = [f"cuda {major}.{minor}+", *(f"rocm {arch}" for arch in portable.rocm)]
    devices += ["cpu"] if portable.interpreter else []
    return BuiltinPolicy(tuple(map(device_term, devices)), tuple(BY_ENGINE_NAME), tuple(rows))


@dataclass(frozen=True)
class Request:
    """Question to the rules: one scheme and one layer's shape on one deployment."""

    scheme: Scheme
    shape: MoeShape
    deployment: Deployment

    @property
    def tp(self) -> int:
        """Number of ranks that share one expert."""
        return 1 if self.deployment.ep > 1 else self.deployment.tp

    @property
    def intermediate(self) -> int:
        """Expert width per rank."""
        return self.shape.intermediate_size // self.tp

    @property
    def group(self) -> int:
        """Group size, -1 for one scale per channel."""
        return self.scheme.group_size if self.scheme.group_size > 0 else -1

    @property
    def activation(self) -> str:
        """Type that the checkpoint declares for activations, or `none`."""
        return self.scheme.activation.dtype if self.scheme.activation else "none"


#: Rule that yields the reasons why a kernel does not run a request.
Check = Callable[[Request, KernelRow], Iterator[Reason]]


def _device(request: Request, row: KernelRow) -> Iterator[Reason]:
    gpu, terms = request.deployment.gpu, builtin_policy().devices
    if not any(term.admits(gpu) for term in terms):
        wanted = " or ".join(term.text for term in terms)
        yield Reason(
            "K01_DEVICE", f"{gpu.name} ({gpu.platform} {gpu.arch}) is not {wanted}", f"a device of kind {wanted}"
        )


def _element(request: Request, row: KernelRow) -> Iterator[Reason]:
    held, read = request.scheme.weight.dtype, row.format.element
    if held != read:
        yield Reason("K02_ELEMENT", f"weights are {held}, this kernel reads {read}")


def _scale(request: Request, row: KernelRow) -> Iterator[Reason]:
    scale = request.scheme.weight.scale
    if scale.dtype not in row.scales:
        yield Reason("K03_SCALE", f"scales are {scale.dtype}, this kernel reads {', '.join(row.scales)}")
    if request.scheme.weight.scale2 is not None and not row.keeps_16_bit:
        yield Reason("K03_SCALE", "a second level of scales, which this kernel has no input for")
    if scale.granularity in ("tensor", "block") and not row.keeps_16_bit:
        yield Reason("K03_SCALE", f"scales are per {scale.granularity}, this kernel reads groups along K")


def _group(request: Request, row: KernelRow) -> Iterator[Reason]:
    if request.group not in row.format.group_sizes:
        known = ", ".join("channel" if size == -1 else str(size) for size in row.format.group_sizes)
        yield Reason("K04_GROUP", f"group size {request.group} is not one of {known}")


def _group_cut(request: Request, row: KernelRow) -> Iterator[Reason]:
    group, inner, hidden = request.group, request.intermediate, request.shape.hidden_size
    # A w2 with a single group has one scale per channel, which fits every rank.
    if group > 0 and inner % group and request.tp > 1 and request.shape.intermediate_size > group:
        text = f"tp {request.tp} cuts groups of {group}: {inner} per rank leaves {inner % group}"
        yield Reason("K05_GROUP_CUT", text, _nearest_tp(request, group))
    if group > 0 and hidden % group:
        yield Reason("K05_GROUP_CUT", f"hidden size {hidden} is not a multiple of group size {group}")


def _nearest_tp(request: Request, group: int) -> str | None:
    total, tp = request.shape.intermediate_size, request.tp
    fits = [size for size in (1, 2, 4, 8, 16) if total % size == 0 and total // size % group == 0]
    best = min(fits, key=lambda size: abs(size - tp), default=None)
    return f"tp {best} ({total // best} per rank) or ep {tp}" if best else None


def _zero_points(request: Request, row: KernelRow) -> Iterator[Reason]:
    if not request.scheme.weight.symmetric and not row.format.zero_points:
        yield Reason("K06_ZERO_POINT", "the checkpoint has zero points, this kernel reads none")


def _act_order(request: Request, row: KernelRow) -> Iterator[Reason]:
    if request.scheme.act_order and not row.format.act_order:
        yield Reason("K07_ACT_ORDER", "columns are reordered by activation order, this kernel does not permute x")
    if row.format.act_order and not request.scheme.act_order:
        yield Reason("K07_ACT_ORDER", "only for checkpoints with act-order")
    if request.scheme.act_order and request.tp > 1:
        yield Reason("K07_ACT_ORDER", f"act-order with tp {request.tp}: any row may use any group", f"ep {request.tp}")


def _activation_type(request: Request, row: KernelRow) -> Iterator[Reason]:
    if request.activation != row.activation and not row.keeps_16_bit:
        wanted = {"none": "16-bit"}
        asked, runs = wanted.get(request.activation, request.activation), wanted.get(row.activation, row.activation)
        yield Reason("K08_ACTIVATION_TYPE", f"the checkpoint asks for {asked} activations, this kernel runs {runs}")


def _activation(request: Request, row: KernelRow) -> Iterator[Reason]:
    known = builtin_policy().activations
    if request.shape.activation not in known:
        yield Reason("K09_ACTIVATION", f"activation {request.shape.activation} is not one of {', '.join(known)}")


def _dtype(request: Request, row: KernelRow) -> Iterator[Reason]:
    dtype = request.deployment.dtype
    if dtype not in row.dtypes:
        yield Reason("K10_DTYPE", f"dtype {dtype}, this kernel takes {', '.join(row.dtypes)}", f"dtype {row.dtypes[0]}")


def _division(request: Request, row: KernelRow) -> Iterator[Reason]:
    total = request.shape.intermediate_size
    if total % request.tp:
        yield Reason("K12_DIVISION", f"intermediate size {total} does not divide by tp {request.tp}", "another tp")
    if request.deployment.ep > request.shape.num_experts:
        text = f"ep {request.deployment.ep} is more than {request.shape.num_experts} experts"
        yield Reason("K12_DIVISION", text, "a smaller ep")
    yield from _balancing(request)


def _balancing(request: Request) -> Iterator[Reason]:
    """Check what load balancing needs of an engine (vLLM's `ParallelConfig`), whatever kernels run the experts."""
    ep, replicas, balanced = request.deployment.ep, request.deployment.redundant_experts, request.deployment.eplb
    count = request.shape.num_experts + replicas
    if replicas and not balanced:
        text = f"{replicas} redundant experts need expert load balancing, which is off"
        yield Reason("K12_DIVISION", text, f"{option('eplb', True)}, or no redundant experts")
    if balanced and ep == 1:
        text = "expert load balancing needs expert parallelism over more than one rank"
        yield Reason("K12_DIVISION", text, "ep above 1, or no expert load balancing")
    if balanced and count % ep:
        text = f"load balancing spreads experts evenly: {count} do not divide by ep {ep}"
        yield Reason("K12_DIVISION", text, f"{replicas + -count % ep} redundant experts")


#: Code -> check, and its sentence for `moeq explain`.
BUILTIN_RULES: dict[str, tuple[Check, str]] = {
    "K01_DEVICE": (
        _device,
        "moeq's kernels run from sm_80 and on gfx942 and gfx950; on a CPU, in Triton's interpreter.",
    ),
    "K02_ELEMENT": (_element, "Element type of the weight codes."),
    "K03_SCALE": (_scale, "Type and granularity of the scales."),
    "K04_GROUP": (_group, "Number of weights that share a scale."),
    "K05_GROUP_CUT": (_group_cut, "A shard must not cut a group of weights that share a scale."),
    "K06_ZERO_POINT": (_zero_points, "Stored zero points are never dropped."),
    "K07_ACT_ORDER": (_act_order, "Act-order needs a kernel that permutes the columns of x."),
    "K08_ACTIVATION_TYPE": (_activation_type, "Activations run as the checkpoint declares, or in 16 bits."),
    "K09_ACTIVATION": (_activation, "The activation function between the two products."),
    "K10_DTYPE": (_dtype, "e8m0 scales span the range of bfloat16, not that of float16."),
    "K12_DIVISION": (_division, "Ranks divide the intermediate size, and the experts with their replicas."),
}


def builtin_sizes(request: Request, row: KernelRow) -> Sizes:
    """Return the sizes per rank that the layout stores: w13 has K = hidden, w2 has K = intermediate."""
    hidden, inner = request.shape.hidden_size, request.intermediate
    k_multiple = math.lcm(row.format.k_multiple, max(request.group, 1))
    local_experts = -(-request.shape.num_experts // request.deployment.ep)
    padded_hidden = round_up(hidden, math.lcm(row.format.n_multiple, row.format.k_multiple))
    padded_inner = round_up(inner, math.lcm(row.format.n_multiple, k_multiple))
    return Sizes(hidden, inner, padded_hidden, padded_inner, local_experts)


def judge_builtin(scheme: Scheme, shape: MoeShape, deployment: Deployment) -> Verdict:
    """Judge a scheme for moeq's own kernels. A requested backend restricts the choice (see `moeq.oracle.judge`)."""
    request = Request(scheme, shape, deployment)
    judged = _closest([(row, _report(request, row)) for row in builtin_policy().kernels])
    asked, reports = deployment.backend, tuple(report for _, report in judged)
    supported = ((row, report) for row, report in judged if report.supported)
    fits = ((row, report) for row, report in supported if asked in ("auto", row.backend.lower()))
    row, selected = next(fits, (None, None))
    sizes = builtin_sizes(request, row) if row else None
    target = None
    if row and selected and sizes:
        target = ConvertTarget(selected.backend, selected.experts, row.format.layout, None, sizes)
    interpreted = "on a CPU the kernels run in Triton's interpreter: for checks, not for serving"
    return Verdict(
        engine=BUILTIN,
        scheme=scheme.title,
        deployment=deployment,
        shape=shape,
        asked=asked,
        method=None,
        family=BUILTIN,
        weight_key=scheme.title,
        activation_key=None if request.activation == "none" else request.activation,
        selected=selected,
        error=None if selected else _error(asked, reports),
        gates=(Gate("G5", "sizes per rank", True, sizes.text),) if sizes else (),
        candidates=reports,
        convert=target,
        runs_as=f"W{scheme.bits}A{8 if row.activation == 'int8' else 16}" if row else None,
        sizes=sizes,
        transient_bytes=0 if row else None,
        notes=(interpreted,) if deployment.gpu.platform == "cpu" else (),
    )


def _closest(judged: list[tuple[KernelRow, CandidateReport]]) -> list[tuple[KernelRow, CandidateReport]]:
    """Keep one row per backend: of a kernel with several element types, the one with the fewest failed rules."""
    best: dict[str, tuple[KernelRow, CandidateReport]] = {}
    for row, report in judged:
        if row.backend not in best or len(report.reasons) < len(best[row.backend][1].reasons):
            best[row.backend] = (row, report)
    return list(best.values())


def _report(request: Request, row: KernelRow) -> CandidateReport:
    reasons = tuple(reason for check, _ in BUILTIN_RULES.values() for reason in check(request, row))
    remedies = [reason.remedy for reason in reasons]
    unlock = " and ".join(dict.fromkeys(map(str, remedies))) if reasons and all(remedies) else None
    return CandidateReport(
        backend=row.backend,
        experts=f"moeq_kernels {row.format.layout} {row.format.element}",
        layout=row.format.layout,
        no_layout=None,
        supported=not reasons,
        reasons=reasons,
        unlock=unlock,
        flag=row.backend.lower(),
    )


def _error(asked: str, reports: tuple[CandidateReport, ...]) -> EngineError:
    names = {report.backend.lower() for report in reports}
    works = ", ".join(report.backend.lower() for report in reports if report.supported)
    hint = f"works here: {works}" if works else None
    if asked != "auto" and asked not in names:
        text = f"'{asked}' names no kernel of moeq; known: {', '.join(sorted(names))}"
        return EngineError("MoeqError", "OVERRIDE_UNKNOWN", text, hint)
    rows = [report for report in reports if asked in ("auto", report.backend.lower())]
    # The kernels with the fewest failed rules say most about the checkpoint.
    fewest = min(len(report.reasons) for report in rows)
    closest = [row for row in rows if len(row.reasons) == fewest]
    reasons = "; ".join(f"{row.backend}: {', '.join(reason.text for reason in row.reasons)}" for row in closest)
    kind = "NO_BACKEND" if asked == "auto" else "OVERRIDE_UNSUPPORTED"
    return EngineError("MoeqError", kind, f"no kernel of moeq runs this: {reasons}", hint)


def is_fastest(scheme: Scheme, deployment: Deployment, layout: str) -> bool:
    """Return whether moeq has a kernel for this GPU and layout that was measured to be faster than all other engines'.

    On Hopper it has for weights of 4 and 8 bits with 16-bit activations (`kernels/bench/results`).
    """
    row = FORMATS.get((layout, scheme.weight.dtype))
    if scheme.weight.dtype in ("int2", "int3"):  # their kernels were not measured beside others
        return False
    hopper = deployment.gpu.platform == "cuda" and deployment.gpu.capability == (9, 0)
    return hopper and scheme.activation is None and row is not None and bool(row.hopper_scales)


def report_of_layout(scheme: Scheme, shape: MoeShape, deployment: Deployment, layout: str) -> CandidateReport | None:
    """Return the report of the kernel that is closest to reading a layout; None if no kernel reads it.

    A few layouts that the kernels read have no backend name: their bytes are for an engine's kernels as well.
    """
    request = Request(scheme, shape, deployment)
    reports = [_report(request, row) for row in _kernel_rows(layout)]
    return min(reports, key=lambda report: len(report.reasons), default=None)

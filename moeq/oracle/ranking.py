"""Ranking of eligible backends by measured times of whole MoE layers. Needs neither torch nor numpy.

`measured_times.json` holds medians of `kernels/bench/peers` on the GPUs that were measured; `tools/measured_times.py`
writes it from result files. For a layer that was not measured, the ratio of measured time to the least time that memory
and arithmetic allow is taken from similar calls. GPUs, formats and backends without times are named, never ranked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from moeq.oracle.records import MoeShape, Verdict
from moeq.oracle.versions import BUILTIN
from moeq.schemes.base import Scheme

#: Token counts of a call that stand for decoding and for prefill.
DECODE, PREFILL = (1, 8, 32, 128), (512, 4096)
#: Least number of layers that a backend is measured on before it is ranked.
MIN_LAYERS = 8
#: Largest factor between a layer's sizes and those of the nearest measured layer.
MAX_FACTOR = 1.5
#: Weights in the distance between two calls of the logarithms of tokens per expert, weight bytes, intermediate size and
#: hidden size. These weights have the least leave-one-layer-out error over all tables.
_WEIGHTS = (2.6, 2.4, 1.0, 1.2)


@dataclass(frozen=True)
class Layer:
    """Share of a MoE layer on one rank."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int  #: expert width on the rank

    def hit(self, tokens: int) -> float:
        """Return how many experts a uniform routing chooses at least once."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** tokens)


@dataclass(frozen=True)
class Rates:
    """Bounds on the time of a call."""

    read: float  #: bytes a second from device memory
    bits: float  #: stored bits per weight, scales included
    operations: float  #: multiplications and additions a second
    middle: int  #: bytes written and read per activation between the products


@dataclass(frozen=True)
class Times:
    """Measured times of one backend on one GPU in one format."""

    backend: str  #: backend's name in the verdict; `MOEQ` for moeq's kernels
    layout: str | None  #: prefix of the id of the layout that the kernel read, if the backend has several
    versions: str  #: versions that were measured; empty if they were not recorded
    median: float  #: median leave-one-layer-out error, as a fraction
    p90: float  #: 90th percentile of this error
    cells: Mapping[str, Mapping[int, float]]  #: layer name to tokens to microseconds


@dataclass(frozen=True)
class Table:
    """All backends that were measured on one GPU in one format."""

    rates: Rates  #: bounds of this GPU and format
    backends: tuple[Times, ...]
    compared: int = 0  #: left-out calls for which at least two backends were measured
    right: int = 0  #: number of these calls whose fastest backend the model names
    regret: float = 0.0  #: mean loss of time if the model's choice runs all these calls, as a fraction


@dataclass(frozen=True)
class RankedBackend:
    """Estimate for one backend."""

    backend: str  #: backend's name in the verdict; `MOEQ` for moeq's kernels
    layout: str | None  #: prefix of the id of the layout that the kernel reads, if the backend has several
    microseconds: dict[int, float]  #: tokens of a call to the estimated time of a layer
    decode: float  #: geometric mean over `DECODE`, relative to the fastest backend
    prefill: float  #: geometric mean over `PREFILL`, relative to the fastest backend
    median: float  #: median leave-one-layer-out error, as a fraction
    p90: float  #: 90th percentile of this error
    layers: int  #: measured layers
    cells: int  #: measured calls
    versions: str  #: versions that were measured; empty if they were not recorded


@dataclass(frozen=True)
class Ranking:
    """Ranking of the eligible backends of one layer on one deployment."""

    gpu: str
    format: str | None  #: measured format; None if the scheme has no times
    ranks: tuple[RankedBackend, ...] = ()  #: measured backends, fastest for decoding first
    unmeasured: tuple[str, ...] = ()  #: eligible backends without times here
    reason: str = ""  #: why nothing is ranked; empty otherwise
    notes: tuple[str, ...] = ()  #: differences between what was measured and what was asked
    compared: int = 0  #: left-out calls that the choice was validated on
    right: int = 0  #: number of these calls whose fastest backend the model names
    regret: float = 0.0  #: mean loss of time by the model's choice, as a fraction

    def fastest(self, phase: str) -> list[RankedBackend]:
        """Return the backends by time for `decode` or `prefill`."""
        return sorted(self.ranks, key=lambda rank: float(getattr(rank, phase)))

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON document."""
        order = {phase: [rank.backend for rank in self.fastest(phase)] for phase in ("decode", "prefill")}
        return {**asdict(self), "order": order, "tokens": {"decode": list(DECODE), "prefill": list(PREFILL)}}


def rank(verdict: Verdict, scheme: Scheme, own_layout: str | None) -> Ranking:
    """Rank the supported backends of a verdict; `own_layout` is the layout id for moeq's kernels, if they run."""
    gpu, name = verdict.deployment.gpu.name, measured_format(scheme)
    shape, tp = verdict.shape, verdict.deployment.tp
    layer = Layer(shape.num_experts, shape.top_k, shape.hidden_size, shape.intermediate_size // tp)
    supported = [row.backend for row in verdict.candidates if row.supported]
    eligible = tuple(dict.fromkeys([*(["MOEQ"] if own_layout else []), *supported]))
    reason = _reason(verdict, scheme, name) or _outside(layer)
    if reason:
        return Ranking(gpu, name, (), eligible, reason)
    table = tables()[gpu, str(name)]
    found = [row for row in table.backends if row.backend in eligible and str(own_layout).startswith(row.layout or "")]
    unmeasured = tuple(backend for backend in eligible if backend not in {row.backend for row in found})
    times = [{tokens: estimate(row, table.rates, layer, tokens) for tokens in (*DECODE, *PREFILL)} for row in found]
    if not found:
        return Ranking(gpu, name, (), unmeasured, f"none of the eligible backends was measured on {gpu} in {name}")
    decode, prefill = _relative(times, DECODE), _relative(times, PREFILL)
    ranks = [
        RankedBackend(
            *(row.backend, row.layout, {tokens: round(us, 1) for tokens, us in own.items()}),
            *(decode[i], prefill[i], row.median, row.p90),
            *(len(row.cells), sum(map(len, row.cells.values())), row.versions),
        )
        for i, (row, own) in enumerate(zip(found, times, strict=True))
    ]
    ranks.sort(key=lambda row: row.decode)
    validated = (table.compared, table.right, table.regret)
    return Ranking(gpu, name, tuple(ranks), unmeasured, "", _notes(scheme, shape, str(name)), *validated)


def _relative(times: Sequence[Mapping[int, float]], phase: Sequence[int]) -> list[float]:
    """Return each backend's geometric mean of times over some token counts, relative to the fastest backend's."""
    means = [math.fsum(math.log(own[tokens]) for tokens in phase) / len(phase) for own in times]
    return [round(math.exp(mean - min(means)), 3) for mean in means]


def measured_format(scheme: Scheme) -> str | None:
    """Return the measured format that a scheme computes like; None if no table holds it."""
    weight, activation = scheme.weight, scheme.activation and scheme.activation.dtype
    if scheme.act_order:
        return None
    if weight.dtype == "int4" and scheme.group_size == 128 and activation is None:
        return "int4"
    if weight.dtype == "e2m1" and weight.scale.dtype == "e8m0" and activation is None:
        return "mxfp4"
    return "w8a8" if weight.dtype == "int8" and activation == "int8" and weight.scale.granularity == "channel" else None


def _reason(verdict: Verdict, scheme: Scheme, name: str | None) -> str:
    """Return why nothing can be ranked; empty if it can be."""
    deployment, gpus = verdict.deployment, sorted({gpu for gpu, _ in tables()})
    if not verdict.engine.startswith(("vllm@", BUILTIN)):
        return f"only vLLM's backends and moeq's kernels were measured, not those of {verdict.engine}"
    if deployment.gpu.name not in gpus:
        return f"no backend was measured on {deployment.gpu.name}; measured: {', '.join(gpus)}"
    if name is None:
        return f"no times of {scheme.title}; measured: int4 in groups of 128, MXFP4, W8A8 (int8 rows and channels)"
    if (deployment.gpu.name, name) not in tables():
        return f"fewer than {MIN_LAYERS} layers were measured in {name} on {deployment.gpu.name}"
    switches = [word for word in ("batched", "lora", "eplb") if getattr(deployment, word)]
    switches += ["expert parallelism"] if deployment.ep > 1 else []
    switches += ["an all-to-all"] if deployment.all2all else []
    switches += [deployment.dtype] if deployment.dtype != "bf16" else []
    if switches:
        return f"nothing was measured with {' and '.join(switches)}"
    return "" if verdict.shape.gated else "only layers with gate and up were measured"


def _outside(layer: Layer) -> str:
    """Return which size of a layer is far from every measured layer's, in words; empty if none is."""
    for size in ("experts", "hidden", "intermediate"):
        known = sorted(int(getattr(one, size)) for one in measured_layers().values())
        own = int(getattr(layer, size))
        if own * MAX_FACTOR < known[0] or own > known[-1] * MAX_FACTOR:
            return f"{size} {own} per rank is far from the measured layers ({known[0]} to {known[-1]})"
    return ""


def _notes(scheme: Scheme, shape: MoeShape, name: str) -> tuple[str, ...]:
    notes = [] if scheme.weight.symmetric else ["measured without zero points"]
    measured = "swigluoai" if name == "mxfp4" else "silu"
    if shape.activation != measured:
        notes.append(f"measured with the activation {measured}, not {shape.activation}")
    return tuple(notes)


# --------------------------------------------------------------------------------------------------- the model


@cache
def least_microseconds(rates: Rates, layer: Layer, tokens: int) -> float:
    """Return the least microseconds of a call: the longer of moving every byte once and of its arithmetic."""
    chosen = tokens * layer.top_k
    moved = _weight_bytes(rates, layer, tokens) + 4 * tokens * layer.hidden + rates.middle * chosen * layer.intermediate
    arithmetic = 6 * layer.hidden * layer.intermediate * chosen / rates.operations
    return max(moved / rates.read, arithmetic) * 1e6


def _weight_bytes(rates: Rates, layer: Layer, tokens: int) -> float:
    return layer.hit(tokens) * 3 * layer.hidden * layer.intermediate * rates.bits / 8


@cache
def _place(rates: Rates, layer: Layer, tokens: int) -> tuple[float, ...]:
    """Return the coordinates of a call for distances: weighted logarithms of its sizes."""
    per_expert = tokens * layer.top_k / layer.hit(tokens)
    axes = (per_expert, _weight_bytes(rates, layer, tokens), layer.intermediate, layer.hidden)
    return tuple(weight * math.log(axis) for weight, axis in zip(_WEIGHTS, axes, strict=True))


def estimate(times: Times, rates: Rates, layer: Layer, tokens: int, left_out: str | None = None) -> float:
    """Estimate the microseconds of a call from measured calls, weighted by their similarity.

    Args:
        left_out: measured layer that is not used, for validation.
    """
    asked, layers = _place(rates, layer, tokens), measured_layers()
    total = weighted = 0.0
    for name, cells in times.cells.items():
        if name == left_out:
            continue
        for measured, us in cells.items():
            place = _place(rates, layers[name], measured)
            distance = sum((a - b) ** 2 for a, b in zip(asked, place, strict=True))
            # The second term lets the nearest calls decide where none is near.
            weight = math.exp(-distance / 2) + 1e-9 / (1 + distance)
            total += weight
            weighted += weight * math.log(us / least_microseconds(rates, layers[name], measured))
    return least_microseconds(rates, layer, tokens) * math.exp(weighted / total)


# ---------------------------------------------------------------------------------------------------- the data


@cache
def _document() -> dict[str, Any]:
    return dict(json.loads(files("moeq.oracle").joinpath("measured_times.json").read_text()))


@cache
def measured_layers() -> dict[str, Layer]:
    """Return the layers that were measured, by name."""
    return {name: Layer(*sizes) for name, sizes in _document()["layers"].items()}


@cache
def tables() -> dict[tuple[str, str], Table]:
    """Return the tables by GPU and format."""
    return {(row["gpu"], row["format"]): read_table(row) for row in _document()["tables"]}


def read_table(row: Mapping[str, Any]) -> Table:
    """Read a table from its JSON form."""
    validated = (row.get(name, 0) for name in ("compared", "right", "regret"))
    return Table(Rates(*row["rates"]), tuple(_read_times(row["backends"])), *validated)


def _read_times(rows: Iterable[Mapping[str, Any]]) -> Iterable[Times]:
    for row in rows:
        cells = {name: {int(tokens): us for tokens, us in own.items()} for name, own in row["cells"].items()}
        yield Times(row["backend"], row["layout"], row["versions"], row["median"], row["p90"], cells)

"""`moeq run-check --engine vllm`: the engine's backends on a checkpoint's own experts, against the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from moeq.errors import MoeqError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from moeq.check.engine_check import BackendResult, EngineBackend
    from moeq.check.run_check import CheckOptions, Opened
    from moeq.oracle.records import CandidateReport, Verdict

#: Name of the row of the converted folder, which moeq's plug-in runs.
CONVERTED = "converted folder"


def run_in_engine(
    dst: str, source: str | None, revision: str | None, options: CheckOptions, *, every: bool
) -> list[BackendResult]:
    """Run the backend that vLLM selects for the source, the converted folder, and with `every` all eligible backends.

    Raises:
        MoeqError: `environment.no-engine` without vLLM, `environment.no-gpu` where its kernels need a GPU,
            `usage.no-source` if the source is not at hand; otherwise as `run_check`.
    """
    if find_spec("vllm") is None:
        raise MoeqError(
            "environment.no-engine",
            "vLLM is not installed; --engine vllm runs the engine's own kernels",
            "run it in the environment that serves the model: pip install vllm==0.33.0",
        )
    import torch

    from moeq.check.run_check import open_both
    from moeq.deploy.deployment import Deployment
    from moeq.engines.vllm.engine_experts import RELEASE
    from moeq.engines.vllm.one_layer import engine, needs_gpu
    from moeq.engines.vllm.this_device import this_device
    from moeq.pipeline.plan.decide import decide

    opened = open_both(dst, source, revision)
    if opened.reference is opened.converted:
        raise MoeqError("usage.no-source", f"the source {opened.manifest.source.name} is not here", "--source SRC")
    made_for = Deployment.from_json(opened.manifest.deployment)
    if needs_gpu():
        where = replace(made_for, backend="auto", engine=f"vllm@{RELEASE}")
        verdict = decide(opened.reference, where)
        names = ", ".join(row.backend for row in verdict.candidates if row.supported) or "none"
        raise MoeqError(
            "environment.no-gpu",
            f"vLLM {RELEASE} has no kernels for a CPU in this build; those for {where.gpu.name} need a GPU: {names}",
            "without --engine moeq's own kernels run in Triton's interpreter",
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = Deployment(this_device(), engine=f"vllm@{RELEASE}", dtype=made_for.dtype)
    verdict = decide(opened.reference, where)
    with engine(device):
        return check_opened(opened, options, chosen_backends(verdict, opened, device, every=every), device)


def chosen_backends(verdict: Verdict, opened: Opened, device: torch.device, *, every: bool) -> list[EngineBackend]:
    """List the converted folder, the selected backend, and with `every` the other eligible ones."""
    from moeq.check.engine_check import EngineBackend
    from moeq.check.kernel_calls import activations_of
    from moeq.check.run_check import DTYPES
    from moeq.engines.vllm.one_layer import converted_layer, source_layer

    dtype = DTYPES[verdict.deployment.dtype]
    entry = opened.manifest.layers[0]

    def converted(layer: int) -> tuple[str, Callable[..., Any]]:
        built = converted_layer(opened.converted, layer, device, dtype)
        return built.experts, built.run

    def row(candidate: CandidateReport, option: str, selected: bool) -> EngineBackend:
        def build(layer: int) -> tuple[str, Callable[..., Any]]:
            built = source_layer(opened.reference, layer, option, device, dtype)
            return built.experts, built.run

        return EngineBackend(candidate.backend, activation_kind(candidate.activation_key), build, selected)

    def rows() -> Iterator[EngineBackend]:
        yield EngineBackend(CONVERTED, activations_of(entry.layout, entry.matrices["w2"].spec.element), converted)
        if verdict.chosen is not None:
            yield row(verdict.chosen, "auto", selected=True)
        for candidate in verdict.candidates if every else ():
            if candidate.supported and candidate.flag and candidate != verdict.chosen:
                yield row(candidate, candidate.flag, selected=False)

    return list(rows())


def activation_kind(key: str | None) -> str | None:
    """Return what an engine's key of activations stands for: `int8`, `fp8` or empty; None if no yardstick covers it."""
    if key is None:
        return ""
    known = {"kInt8DynamicTokenSym": "int8", "kFp8DynamicTokenSym": "fp8", "kFp8Dynamic128Sym": "fp8"}
    return known.get(key)


def check_opened(
    opened: Opened, options: CheckOptions, backends: Sequence[EngineBackend], device: torch.device
) -> list[BackendResult]:
    """Run backends on the chosen layers, with every expert of each."""
    from moeq.check.engine_check import check_backends
    from moeq.check.run_check import layer_checks

    every = range(max(entry.num_experts for entry in opened.manifest.layers))
    checks, _ = layer_checks(opened, replace(options, experts=every), device)
    return [row for check in checks for row in check_backends(check, backends)]


def render(console: Console, rows: Sequence[BackendResult]) -> None:
    """Print the table of backends."""
    from rich.table import Table

    from moeq.check.engine_check import FACTOR

    tokens = list(dict.fromkeys(count for row in rows for count in row.microseconds or ()))
    table = Table()
    for name in ("layer", "backend", "experts", "answer", "error", "allowed", *(f"{count} tokens" for count in tokens)):
        table.add_column(name, overflow="fold")
    for row in rows:
        name = f"{row.backend} (selected)" if row.selected else row.backend
        answer = "refused" if row.refused else "WRONG" if row.wrong else "right" if row.allowed else "not judged"
        figures = [f"{one:.2e}" if one is not None else "-" for one in (row.error, row.allowed)]
        times = [f"{row.microseconds[count]:.0f} us" if row.microseconds else "-" for count in tokens]
        table.add_row(str(row.layer), name, row.experts or "-", answer, *figures, *times)
    console.print(table)
    for row in rows:
        if row.refused:
            console.print(f"  layer {row.layer}  {row.backend}: {row.refused}", markup=False, soft_wrap=True)
        elif row.wrong and row.expert is not None:
            expert, quotient = row.expert
            console.print(f"  layer {row.layer}  {row.backend}: expert {expert} has {quotient:.3g} x its allowed error")
    console.print(
        f"  errors are relative to the layer in float32 on dequantised weights; {FACTOR:.0f} x that of torch is allowed"
    )

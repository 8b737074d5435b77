"""Check of an engine's backends on a checkpoint's own experts against the reference: `run-check --engine vllm`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeq.errors import MoeqError
from moeq.spelling import option

if TYPE_CHECKING:
    import torch

    from moeq.check.engine_check import BackendResult, EngineBackend, EngineCheckReport
    from moeq.check.run_check import CheckOptions, Opened
    from moeq.oracle.records import CandidateReport, Verdict

#: Name of the result's row for the converted folder, which moeq's plug-in runs.
CONVERTED = "converted folder"


def run_engine_check(
    dst: str | Path,
    source: str | Path | None = None,
    *,
    engine: str = "vllm",
    all_backends: bool = False,
    revision: str | None = None,
    options: CheckOptions | None = None,
    layers: Sequence[int] | None = None,
    tokens: Sequence[int] | None = None,
    seed: int | None = None,
) -> EngineCheckReport:
    """Run the engine's backends on a checkpoint's own experts against the float32 reference. `.ok` is the answer.

    The converted folder runs as the plug-in runs it, the source in the backend that the engine selects.

    Args:
        dst: output of `convert`.
        source: the checkpoint that was converted; None: the folder that the manifest names, if that exists.
        engine: `vllm`, which has to be installed.
        all_backends: also run every other eligible backend.
        revision: Hub revision of `source`.
        options: extent of the check; the keywords below change it.
        layers: layer numbers; None: all on a GPU, a few on a CPU.
        tokens: token counts, one run each.
        seed: seed of the random tokens.

    Raises:
        MoeqError: `usage.unknown-engine`, `environment.no-engine` without vLLM, `environment.no-gpu` where its kernels
            need a GPU, `usage.no-source` if the source is not there; otherwise as `run_check`.
    """
    if engine != "vllm":
        raise MoeqError("usage.unknown-engine", f"run-check runs no backends of '{engine}'", option("engine", "vllm"))
    if find_spec("vllm") is None:
        raise MoeqError(
            "environment.no-engine",
            f"vLLM is not installed; {option('engine', 'vllm')} runs the engine's own kernels",
            "run it in the environment that serves the model: pip install vllm==0.33.0",
        )
    import torch

    from moeq.check.engine_check import EngineCheckReport
    from moeq.check.run_check import CheckOptions, open_both
    from moeq.deploy.deployment import Deployment
    from moeq.engines.vllm.engine_experts import RELEASE, current_gpu
    from moeq.engines.vllm.one_layer import engine as in_engine
    from moeq.engines.vllm.one_layer import needs_gpu
    from moeq.pipeline.plan.decide import decide

    asked: dict[str, Any] = {"layers": layers, "tokens": tokens, "seed": seed}
    extent = replace(options or CheckOptions(), **{name: value for name, value in asked.items() if value is not None})
    opened = open_both(dst, source, revision)
    if opened.reference is opened.converted:
        raise MoeqError(
            "usage.no-source", f"the source {opened.manifest.source.name} is not here", option("source", "SRC")
        )
    made_for = Deployment.from_json(opened.manifest.deployment)
    if needs_gpu():
        where = replace(made_for, backend="auto", engine=f"vllm@{RELEASE}")
        verdict = decide(opened.reference, where)
        names = ", ".join(row.backend for row in verdict.candidates if row.supported) or "none"
        raise MoeqError(
            "environment.no-gpu",
            f"vLLM {RELEASE} has no kernels for a CPU in this build; those for {where.gpu.name} need a GPU: {names}",
            f"without {option('engine')} moeq's own kernels run in Triton's interpreter",
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = Deployment(current_gpu(), engine=f"vllm@{RELEASE}", dtype=made_for.dtype)
    verdict = decide(opened.reference, where)
    with in_engine(device):
        rows = check_opened(opened, extent, chosen_backends(verdict, opened, device, every=all_backends), device)
    return EngineCheckReport(opened.converted.source.name, engine, tuple(rows))


def chosen_backends(verdict: Verdict, opened: Opened, device: torch.device, *, every: bool) -> list[EngineBackend]:
    """List the converted folder, the selected backend, and with `every` the other eligible ones."""
    from moeq.check.engine_check import EngineBackend
    from moeq.check.kernel_calls import activations_of
    from moeq.check.run_check import DTYPES
    from moeq.engines.vllm.one_layer import converted_layer, source_layer

    dtype = DTYPES[verdict.deployment.dtype]
    entry = opened.manifest.layers[0]

    def row(candidate: CandidateReport, option: str, selected: bool) -> EngineBackend:
        def build(layer: int) -> tuple[str, Callable[..., Any]]:
            return source_layer(opened.reference, layer, option, device, dtype)

        return EngineBackend(candidate.backend, activation_kind(candidate.activation_key), build, selected)

    own = activations_of(entry.layout, entry.matrices["w2"].spec.element)
    rows = [EngineBackend(CONVERTED, own, lambda layer: converted_layer(opened.converted, layer, device, dtype))]
    if verdict.chosen is not None:
        rows.append(row(verdict.chosen, "auto", selected=True))
    others = (one for one in verdict.candidates if every and one.supported and one != verdict.chosen)
    return rows + [row(one, one.flag, selected=False) for one in others if one.flag]


def activation_kind(key: str | None) -> str | None:
    """Return the kind of an engine's activation key: `int8`, `fp8` or an empty text; None if the reference lacks it."""
    if key is None:
        return ""
    known = {"kInt8DynamicTokenSym": "int8", "kFp8DynamicTokenSym": "fp8", "kFp8Dynamic128Sym": "fp8"}
    return known.get(key)


def check_opened(
    opened: Opened, options: CheckOptions, backends: Sequence[EngineBackend], device: torch.device
) -> list[BackendResult]:
    """Run backends on the chosen layers with all experts of each layer, and return a result per layer and backend."""
    from moeq.check.engine_check import check_backends
    from moeq.check.run_check import layer_checks

    every = range(max(entry.num_experts for entry in opened.manifest.layers))
    checks, _ = layer_checks(opened, replace(options, experts=every), device)
    return [row for check in checks for row in check_backends(check, backends)]

"""Run the fused kernels on converted weights, and the reference on the source's: two roads to one number."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import moeq
from moeq.check.digests import check_digests
from moeq.check.layer import LayerCheck, check_layer
from moeq.check.records import CheckReport, ProjectionResult, Sample
from moeq.check.tolerance import RULE
from moeq.checkpoint.manifest import Manifest, read_manifest
from moeq.errors import MoeqError
from moeq.model import Checkpoint

#: On a CPU the kernels run in Triton's interpreter, thousands of times slower than a GPU: a sample must do.
CPU_MAX_WEIGHTS = 8 * 2**20
CPU_TOKENS = (1, 7, 33)
GPU_TOKENS = (1, 7, 33, 256)

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class CheckOptions:
    """What to check.

    Attributes:
        layers: layer indices, or None for all on a GPU and first, last and one between on a CPU.
        experts: expert ids, or None for all on a GPU and as many as CPU_MAX_WEIGHTS allows on a CPU.
        tokens: token counts, one run each; None for the default of the device.
        seed: seed of the random tokens.
        device: `auto`, `cpu` or `cuda`.
        digests: recompute the logical digests of every expert of every layer first.
    """

    layers: Sequence[int] | None = None
    experts: Sequence[int] | None = None
    tokens: Sequence[int] | None = None
    seed: int = 0
    device: str = "auto"
    digests: bool = True


Progress = Callable[[int, int, str], None]


def run_check(
    dst: str | Path,
    source: str | Path | None = None,
    *,
    revision: str | None = None,
    options: CheckOptions | None = None,
    progress: Progress | None = None,
) -> CheckReport:
    """Check a converted checkpoint.

    Args:
        dst: output of `moeq convert`.
        source: the checkpoint it came from; default: the one its manifest names, where that is still there.
        revision: Hub revision of `source`.
        options: what to check; the default is everything a GPU can do, or a sample on a CPU.
        progress: called with steps done, steps in all, and what is being done.

    Raises:
        MoeqError: `source.no-manifest`, `source.changed` where `source` is not what was converted;
            `environment.no-triton`; `usage.*` for layers or experts that do not exist. A failed check is not an
            error but a report whose `ok` is False.
    """
    started = time.monotonic()
    options, report = options or CheckOptions(), progress or (lambda done, total, label: None)
    converted = moeq.open(dst)
    manifest = read_manifest(Path(dst))
    reference, notes = _reference(converted, manifest, source, revision)
    device = _device(options.device)
    dtype = _DTYPES[str(manifest.deployment.get("dtype", "bf16"))]
    samples = _samples(manifest, options, device, converted)

    digest_steps = sum(entry.num_experts for entry in manifest.layers) if options.digests else 0
    steps = _Steps(digest_steps + sum(len(sample.tokens) for sample in samples), report)
    layers = [entry.layer for entry in manifest.layers] if options.digests else []
    checked, mismatches = check_digests(converted, manifest, layers, steps.advance)

    results: list[ProjectionResult] = []
    for sample in samples:
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + sample.layer)
        check = LayerCheck(converted, reference, manifest.layer(sample.layer), sample, device, dtype, generator)
        results += check_layer(check, steps.advance)
    return CheckReport(
        destination=str(dst),
        source=None if reference is converted else reference.source.name,
        device=_device_name(device),
        dtype=str(manifest.deployment.get("dtype", "bf16")),
        seed=options.seed,
        digests_checked=checked,
        digest_mismatches=tuple(mismatches),
        samples=samples,
        layers_in_checkpoint=len(manifest.layers),
        results=tuple(results),
        tolerance_rule=RULE,
        seconds=time.monotonic() - started,
        notes=notes,
    )


@dataclass
class _Steps:
    """Counts steps and passes them on."""

    total: int
    report: Progress
    done: int = 0

    def advance(self, label: str) -> None:
        self.done += 1
        self.report(self.done, self.total, label)


def _reference(
    converted: Checkpoint, manifest: Manifest, source: str | Path | None, revision: str | None
) -> tuple[Checkpoint, tuple[str, ...]]:
    """The checkpoint whose dequantised weights are the truth."""
    if converted.kind != "converted":
        raise MoeqError("source.no-manifest", f"{converted.source.name} is not an output of `moeq convert`")
    if source is None:
        name = manifest.source.name
        if not Path(name).is_dir():
            note = (
                f"the source {name} is not here: the reference uses the converted checkpoint's own logical values, "
                "which the digests tie to the source; --source compares with the source itself"
            )
            return converted, (note,)
        source = name
    reference = moeq.open(source, revision=revision)
    if reference.kind != "source":
        raise MoeqError("usage.not-a-source", f"{source} is itself an output of `moeq convert`", "name its source")
    if reference.source.identity() != manifest.source.identity:
        raise MoeqError(
            "source.changed",
            f"{source} is not what was converted: its config or tensors differ from {manifest.source.name}",
            "name the right source, or convert again",
        )
    return reference, ()


def _device(asked: str) -> torch.device:
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    if asked not in ("cpu", "cuda"):
        raise MoeqError("usage.device", f"no device is called '{asked}'", "one of: auto, cpu, cuda")
    if asked == "cuda" and not torch.cuda.is_available():
        raise MoeqError("environment.no-gpu", "this torch finds no GPU", "--device cpu runs Triton's interpreter")
    if asked == "cpu":
        _enable_interpreter()
    return torch.device(asked)


def _enable_interpreter() -> None:
    from moeq_kernels import KernelEnvironmentError, interpreter

    try:
        interpreter.enable()
    except KernelEnvironmentError as error:
        raise MoeqError("environment.interpreter", error.message, error.hint) from error


def _device_name(device: torch.device) -> str:
    return "cpu (Triton interpreter)" if device.type == "cpu" else f"cuda ({torch.cuda.get_device_name(device)})"


def _samples(
    manifest: Manifest, options: CheckOptions, device: torch.device, converted: Checkpoint
) -> tuple[Sample, ...]:
    known = [entry.layer for entry in manifest.layers]
    if options.layers is None:
        spread = sorted({known[0], known[len(known) // 2], known[-1]})
        layers = spread if device.type == "cpu" else known
    else:
        layers = list(options.layers)
    tokens = tuple(options.tokens or (CPU_TOKENS if device.type == "cpu" else GPU_TOKENS))
    if min(tokens) < 1:
        raise MoeqError("usage.tokens", f"token counts must be at least 1, not {min(tokens)}")
    samples = []
    for layer in layers:
        entry = manifest.layer(layer)
        experts = _sampled_experts(manifest, layer, options, device)
        top_k = min(converted.info.top_k, len(experts))
        samples.append(Sample(layer, experts, tokens, top_k, len(experts) == entry.num_experts))
    return tuple(samples)


def _sampled_experts(manifest: Manifest, layer: int, options: CheckOptions, device: torch.device) -> tuple[int, ...]:
    entry = manifest.layer(layer)
    if options.experts is not None:
        wrong = [expert for expert in options.experts if not 0 <= expert < entry.num_experts]
        if wrong:
            raise MoeqError(
                "usage.no-such-expert", f"layer {layer} has experts 0 to {entry.num_experts - 1}, not {wrong}"
            )
        return tuple(options.experts)
    if device.type != "cpu":
        return tuple(range(entry.num_experts))
    weights = sum(matrix.padded_n * matrix.padded_k for matrix in entry.matrices.values())
    count = max(2, min(entry.num_experts, CPU_MAX_WEIGHTS // weights))
    chosen = torch.randperm(entry.num_experts, generator=torch.Generator().manual_seed(options.seed + layer))[:count]
    return tuple(sorted(chosen.tolist()))

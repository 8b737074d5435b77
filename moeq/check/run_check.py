"""Compare the fused kernels on converted weights with the reference on the source's: two independent results."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import torch

from moeq.check.activation_loss import RULE as ACTIVATION_LOSS_RULE
from moeq.check.comparison import FP8_LAYER_RULE, INT8_LAYER_RULE, LAYER_RULE, NORM_RULE
from moeq.check.layer_check import LayerCheck
from moeq.check.parallel import check_layers, choose_jobs
from moeq.check.results import CheckReport
from moeq.check.sampling import CheckOptions, choose_samples, expert_weights
from moeq.check.workload import Workload, workload
from moeq.checkpoint.manifest import Manifest, read_manifest
from moeq.digest import check_digests, default_workers
from moeq.errors import MoeqError
from moeq.load.activation import activation_of
from moeq.model import Checkpoint
from moeq.model import open as open_checkpoint
from moeq.reference.arithmetic import describe_bound
from moeq.reference.moe import ACTIVATIONS, COMBINATIONS, Activation
from moeq.spelling import option

__all__ = ["CheckOptions", "Progress", "check_opened", "run_check"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

Progress = Callable[[int, int, str], None]
Announce = Callable[[Workload], None]


@dataclass(frozen=True)
class Opened:
    """Converted checkpoint and the reference that it is compared with."""

    converted: Checkpoint  #: the packed weights
    reference: Checkpoint  #: source of the packed weights, or the converted checkpoint itself
    manifest: Manifest  #: `moeq.json` of the converted checkpoint
    notes: tuple[str, ...] = ()  #: remarks for people about the choice of the reference

    def reference_of(self, layer: int) -> Checkpoint:
        """Return the reference of a layer: the converted checkpoint itself if packing changed its numbers."""
        return self.converted if self.manifest.layer(layer).losses else self.reference


def run_check(
    dst: str | Path,
    source: str | Path | None = None,
    *,
    revision: str | None = None,
    options: CheckOptions | None = None,
    progress: Progress | None = None,
    announce: Announce | None = None,
) -> CheckReport:
    """Check a converted checkpoint; `moeq.run_check` describes most arguments and the errors.

    Without `options`, everything is checked on a GPU, and a sample on a CPU. On a CPU, `announce` is called with an
    estimate of the time before any long work starts.
    """
    return check_opened(open_both(dst, source, revision), options or CheckOptions(), progress, announce)


def check_opened(
    opened: Opened, options: CheckOptions, progress: Progress | None = None, announce: Announce | None = None
) -> CheckReport:
    """Check checkpoints that are open already; for errors see `run_check`."""
    started = time.monotonic()
    manifest, converted = opened.manifest, opened.converted
    device = prepare_device(options.device) if options.kernels else torch.device("cpu")
    checks, notes = layer_checks(opened, options, device) if options.kernels else ([], ())
    derivation = _derivation(checks)  # refuses layouts without a kernel before anything long starts

    digest_layers = options.digest_layers
    if digest_layers is None:
        digest_layers = [entry.layer for entry in manifest.layers]
    entries = [manifest.layer(layer) for layer in digest_layers] if options.digests else []
    steps = sum(entry.num_experts for entry in entries)
    steps += sum(len(check.sample.runs) + len(check.sample.experts) for check in checks)
    numbers = count(1)

    def advance(label: str) -> None:
        done = next(numbers)
        if progress is not None:
            progress(done, steps, label)

    jobs = choose_jobs(checks, options.jobs)
    if checks and announce is not None and device.type == "cpu":
        digested_weights = sum(entry.num_experts * expert_weights(entry) for entry in entries)
        announce(workload(checks, digested_weights, jobs))
    checked, mismatches = check_digests(converted, entries, advance, default_workers())
    found = check_layers(checks, jobs, advance)
    gpu = device.type != "cpu"
    device_title = f"cuda ({torch.cuda.get_device_name(device)})" if gpu else "cpu (Triton interpreter)"
    return CheckReport(
        destination=converted.source.name,
        source=None if opened.reference is converted else opened.reference.source.name,
        scheme=", ".join(dict.fromkeys(use.title for use in converted.info.schemes)),
        layout=", ".join(dict.fromkeys(entry.layout for entry in manifest.layers)),
        backend=manifest.backend,
        device=device_title if options.kernels else "no kernels were run",
        dtype=str(manifest.deployment.get("dtype", "bf16")),
        seed=options.seed,
        digests_checked=checked,
        digest_mismatches=tuple(mismatches),
        layers=tuple(found),
        layers_in_checkpoint=len(manifest.layers),
        derivation=derivation,
        seconds=time.monotonic() - started,
        notes=(*opened.notes, *_changed(opened, [check.sample.layer for check in checks]), *notes),
    )


def layer_checks(
    opened: Opened, options: CheckOptions, device: torch.device
) -> tuple[list[LayerCheck], tuple[str, ...]]:
    """Return the checks of the chosen layers, and remarks about the activation.

    Raises MoeqError `usage.no-such-layer`, `usage.no-such-expert`, `usage.tokens`.
    """
    activation, notes = _activation(opened.reference)
    manifest, converted = opened.manifest, opened.converted
    dtype = DTYPES[str(manifest.deployment.get("dtype", "bf16"))]
    checks = [
        LayerCheck(
            converted, opened.reference_of(sample.layer), manifest.layer(sample.layer), sample, device, dtype,
            options.seed, activation, options.whole, options.activation_dtype,
        )
        for sample in choose_samples(manifest, options, device, converted)
    ]  # fmt: skip
    return checks, notes


def open_both(dst: str | Path, source: str | Path | None = None, revision: str | None = None) -> Opened:
    """Open a converted checkpoint and the one whose dequantised weights are the reference."""
    converted = open_checkpoint(dst)
    manifest = read_manifest(Path(dst))
    if source is None:
        name = manifest.source.name
        if not Path(name).is_dir():
            note = (
                f"the source {name} is not here: the reference uses the converted checkpoint's own logical values, "
                f"which the digests tie to the source; {option('source')} compares with the source itself"
            )
            return Opened(converted, converted, manifest, (note,))
        source = name
    reference = open_checkpoint(source, revision=revision)
    reference.require_source()
    if reference.source.identity() != manifest.source.identity:
        raise MoeqError(
            "source.changed",
            f"{source} is not what was converted: its config or tensors differ from {manifest.source.name}",
            "name the right source, or convert again",
        )
    return Opened(converted, reference, manifest)


def _changed(opened: Opened, layers: list[int]) -> tuple[str, ...]:
    """Note the layers whose reference is not the source, since lossy packing changed their numbers."""
    changed = sum(opened.manifest.layer(layer).losses for layer in layers)
    if not changed or opened.reference is opened.converted:
        return ()
    return (
        f"{option('allow_lossy', True)} changed {changed} stored numbers of these layers: their reference is what is "
        "stored, not the source; moeq diff shows how far the two differ",
    )


def _activation(reference: Checkpoint) -> tuple[Activation, tuple[str, ...]]:
    """Find the model's activation and its parameters; SiLU and a note if the reference does not know its name."""
    name = reference.info.activation
    if name in ACTIVATIONS or name in COMBINATIONS:
        return activation_of(name, reference.source.config), ()
    return Activation(), (
        f"activation {name} is unknown to moeq; the check uses SiLU instead, which tests the weights just as well",
    )


def _derivation(checks: list[LayerCheck]) -> tuple[str, ...]:
    """Derive the tolerances in words: one line for each kind of product."""
    lines: dict[str, list[str]] = {}
    for check in checks:
        for name in check.widths:
            names = lines.setdefault(describe_bound(check.k_of(name), check.activations(name)), [])
            if name not in names:
                names.append(name)
    if not checks:
        return ()
    kinds = {check.activations("down") for check in checks}
    layer_rule = LAYER_RULE
    if "int8" in kinds:
        layer_rule = INT8_LAYER_RULE
    elif "fp8" in kinds:
        layer_rule = FP8_LAYER_RULE
    loss = (ACTIVATION_LOSS_RULE,) if checks[0].activation_dtype == "fp8" else ()
    return (NORM_RULE, *(f"{', '.join(names)}: {line}" for line, names in lines.items()), layer_rule, *loss)


def prepare_device(asked: str) -> torch.device:
    """Choose the device; on a CPU also enable Triton's interpreter, which has to happen before triton is imported.

    Raises MoeqError `usage.device`, `environment.no-gpu`, `environment.no-triton`, `environment.interpreter`.
    """
    if find_spec("triton") is None:
        raise MoeqError(
            "environment.no-triton",
            "the kernels need triton, which is not installed here",
            "pip install 'triton>=3.6,<3.10' (Linux only)",
        )
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    if asked not in ("cpu", "cuda"):
        raise MoeqError("usage.device", f"no device is called '{asked}'", "one of: auto, cpu, cuda")
    if asked == "cuda" and not torch.cuda.is_available():
        raise MoeqError(
            "environment.no-gpu", "this torch finds no GPU", f"{option('device', 'cpu')} runs Triton's interpreter"
        )
    if asked == "cpu":
        from moeq_kernels import KernelEnvironmentError, interpreter

        try:
            interpreter.enable()
        except KernelEnvironmentError as error:
            raise MoeqError("environment.interpreter", error.message, error.hint) from error
    return torch.device(asked)

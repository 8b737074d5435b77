"""The commands that check and compare, as functions. Errors are `MoeqError` and name Python arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeq.api.bars import progress_bar
from moeq.pipeline.events import Advance

if TYPE_CHECKING:
    from moeq.check.results import CheckReport
    from moeq.check.run_check import CheckOptions
    from moeq.prove.diff import Difference
    from moeq.prove.restore import Restoration
    from moeq.prove.verify import Verification


def verify(
    dst: str | Path,
    source: str | Path | None = None,
    *,
    revision: str | None = None,
    signed_by: str | None = None,
    slow: bool = False,
    workers: int | None = None,
    progress: Advance | bool = False,
) -> Verification:
    """Check every byte of a conversion against its manifest or, with `source`, the source. `.ok` is the answer.

    Args:
        dst: output of `convert`.
        source: the checkpoint that was converted.
        revision: Hub revision of `source`.
        signed_by: minisign public key (a file, or the key) that has to have signed the manifest.
        slow: also unpack every packed tensor, decode every expert of a given source, and compare digests of their
            values: a second path that shares no code with packing.
        workers: threads; None takes the cores there are, at most 8.
        progress: True for a bar, or a function that takes steps done, all steps, and a label.

    Raises:
        MoeqError: `usage.not-converted`, `usage.already-converted` for a source that is a conversion, `usage.sign-key`,
            and `source.*` for folders that cannot be read at all. Differences raise nothing: they are the answer.
    """
    from moeq.prove.verify import verify as check

    with progress_bar(progress, "verify") as advance:
        return check(dst, source, revision=revision, signed_by=signed_by, slow=slow, workers=workers, progress=advance)


def restore(
    dst: str | Path,
    out: str | Path,
    *,
    slow: bool = False,
    workers: int | None = None,
    progress: Advance | bool = False,
) -> Restoration:
    """Rebuild the source checkpoint from a conversion, byte for byte.

    Args:
        dst: output of `convert`.
        out: folder to create; a folder that already holds the source is compared instead.
        slow: take the reference path, which shares no code with the fast path and gives the same bytes.
        workers: threads; None takes the cores there are, at most 8.
        progress: True for a bar, or a function that takes bytes done, all bytes, and a label.

    Raises:
        MoeqError: `usage.not-converted`; `source.no-keepsake` for conversions without restore data, or without
            digests of it; `source.digest-mismatch` if the conversion no longer holds what was converted;
            `usage.destination-exists`; `resources.disk-full`. A failed run leaves no files.
    """
    from moeq.prove.restore import restore as rebuild

    with progress_bar(progress, "restore") as advance:
        return rebuild(dst, out, slow=slow, workers=workers, progress=advance)


def diff(
    left: str | Path,
    right: str | Path,
    *,
    experts_only: bool = False,
    workers: int | None = None,
    progress: Advance | bool = False,
) -> Difference:
    """Compare two checkpoints by dequantised values, whatever their packing. `.equal` is the answer.

    Everything that is not an expert is compared byte for byte. Layers that are stored in the same bytes are equal
    without dequantising.

    Args:
        left: a checkpoint, source or converted.
        right: another checkpoint, source or converted.
        experts_only: compare only routed experts.
        workers: threads; None takes the cores there are, at most 8.
        progress: True for a bar, or a function that takes steps done, all steps, and a label.

    Raises:
        MoeqError: `source.*` for checkpoints that cannot be read. Differences raise nothing: they are the answer.
    """
    from moeq.prove.diff import diff as compare

    with progress_bar(progress, "diff") as advance:
        return compare(left, right, experts_only=experts_only, workers=workers, progress=advance)


def run_check(
    dst: str | Path,
    source: str | Path | None = None,
    *,
    revision: str | None = None,
    options: CheckOptions | None = None,
    layers: Sequence[int] | None = None,
    experts: Sequence[int] | None = None,
    tokens: Sequence[int] | None = None,
    seed: int | None = None,
    device: str | None = None,
    digests: bool | None = None,
    kernels: bool | None = None,
    fp8_activations: bool = False,
    jobs: int | None = None,
    progress: Advance | bool = False,
) -> CheckReport:
    """Compare fused kernels on converted weights with a float32 reference on source weights. `.ok` is the answer.

    Args:
        dst: output of `convert`.
        source: the checkpoint that was converted; None: the folder that the manifest names, if that exists.
        revision: Hub revision of `source`.
        options: extent of the check; the keywords below change it.
        layers: layer numbers; None: all on a GPU, a few on a CPU.
        experts: expert numbers; None: all on a GPU, a few on a CPU.
        tokens: token counts, one run each.
        seed: seed of the random tokens.
        device: `auto`, `cpu` (Triton's interpreter) or `cuda`.
        digests: recompute the digest of every expert first.
        kernels: run kernels; False: check only digests.
        fp8_activations: quantise activations to e4m3: bound their error in each layer, and run FP8 weights with them.
        jobs: processes that check layers at the same time on a CPU.
        progress: True for a bar, or a function that takes steps done, all steps, and a label.

    Raises:
        MoeqError: `usage.not-converted`, `source.no-manifest`; `source.changed` where `source` is not what was
            converted; `answer.no-kernel` where moeq's kernels do not read the layout; `environment.no-triton`;
            `usage.*` for layers or experts that do not exist. A failed check raises nothing: its report's `.ok` is
            False.
    """
    from moeq.check.run_check import CheckOptions
    from moeq.check.run_check import run_check as check

    asked: dict[str, Any] = {
        "layers": layers,
        "experts": experts,
        "tokens": tokens,
        "seed": seed,
        "device": device,
        "jobs": jobs,
    }
    asked |= {"digests": digests, "kernels": kernels, "activation_dtype": "fp8" if fp8_activations else None}
    extent = replace(options or CheckOptions(), **{name: value for name, value in asked.items() if value is not None})
    with progress_bar(progress, "run-check") as advance:
        return check(dst, source, revision=revision, options=extent, progress=advance)

"""Choose the layers, experts and token counts of a check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moeq.check.inputs import MIN_ROWS
from moeq.check.results import Run, Sample
from moeq.checkpoint.manifest import LayerEntry, Manifest
from moeq.errors import MoeqError
from moeq.model import Checkpoint

#: Limits of a sample on a CPU, where Triton's interpreter is thousands of times slower than a GPU.
CPU_MAX_WEIGHTS = 8 * 2**20
CPU_TOKENS = (1, 7, 33)
GPU_TOKENS = (1, 7, 33, 256)

#: Token count of the run whose tokens all go to the same experts; an odd number, which no tile size divides.
SAME_TOKENS = 7


@dataclass(frozen=True)
class CheckOptions:
    """Options of a check.

    Attributes:
        layers: layer indices; None: all on a GPU; the first, the middle and the last on a CPU.
        experts: expert ids; None: all on a GPU, as many as CPU_MAX_WEIGHTS allows on a CPU.
        tokens: token counts, one run each; None: CPU_TOKENS or GPU_TOKENS.
        seed: seed of the random tokens and of the choice of experts.
        device: `auto`, `cpu` or `cuda`.
        digests: whether the logical digests of all experts are recomputed first.
        kernels: whether kernels run; without them only digests are checked, which needs neither triton nor a GPU.
        whole: whether the fused layer is checked too, not only each product.
        digest_layers: layers whose digests are recomputed; None: all.
        jobs: processes that check layers at the same time on a CPU; None: by the amount of work.
        activation_dtype: `fp8` to bound the loss of e4m3 activations, and to run FP8 weights with them; empty: 16-bit
            activations, or int8 ones for layouts that have them.
    """

    layers: Sequence[int] | None = None
    experts: Sequence[int] | None = None
    tokens: Sequence[int] | None = None
    seed: int = 0
    device: str = "auto"
    digests: bool = True
    kernels: bool = True
    whole: bool = True
    digest_layers: Sequence[int] | None = None
    jobs: int | None = None
    activation_dtype: str = ""


def choose_samples(
    manifest: Manifest, options: CheckOptions, device: torch.device, converted: Checkpoint
) -> tuple[Sample, ...]:
    """Choose a sample of every chosen layer.

    Raises:
        MoeqError: `usage.no-such-layer`, `usage.no-such-expert`, `usage.tokens`.
    """
    known = [entry.layer for entry in manifest.layers]
    if options.layers is None:
        spread = sorted({known[0], known[len(known) // 2], known[-1]})
        layers = spread if device.type == "cpu" else known
    else:
        layers = list(dict.fromkeys(options.layers))
    tokens = tuple(options.tokens or (CPU_TOKENS if device.type == "cpu" else GPU_TOKENS))
    if min(tokens) < 1:
        raise MoeqError("usage.tokens", f"token counts must be at least 1, not {min(tokens)}")
    samples = []
    for layer in layers:
        entry = manifest.layer(layer)
        experts = _choose_experts(entry, options, device)
        top_k = min(converted.info.top_k or 1, len(experts))
        runs = _runs(tokens, len(experts), top_k)
        samples.append(Sample(layer, experts, runs, top_k, len(experts) == entry.num_experts))
    return tuple(samples)


def _runs(tokens: Sequence[int], experts: int, top_k: int) -> tuple[Run, ...]:
    """List the runs: one by the router for each token count, one on the same experts, one that uses all experts."""
    needed = -(-MIN_ROWS * experts // top_k)
    odd_count = needed + 1 - needed % 2
    routed = [Run(count) for count in sorted(dict.fromkeys(tokens))]
    return (*routed, Run(SAME_TOKENS, "same"), Run(odd_count, "spread"))


def expert_weights(entry: LayerEntry) -> int:
    """Return the number of weights of one expert of a layer, padding included."""
    return sum(matrix.padded_n * matrix.padded_k for matrix in entry.matrices.values())


def _choose_experts(entry: LayerEntry, options: CheckOptions, device: torch.device) -> tuple[int, ...]:
    if options.experts is not None:
        wrong = [expert for expert in options.experts if not 0 <= expert < entry.num_experts]
        if wrong:
            raise MoeqError(
                "usage.no-such-expert", f"layer {entry.layer} has experts 0 to {entry.num_experts - 1}, not {wrong}"
            )
        return tuple(dict.fromkeys(options.experts))
    if device.type != "cpu":
        return tuple(range(entry.num_experts))
    count = max(2, min(entry.num_experts, CPU_MAX_WEIGHTS // expert_weights(entry)))
    generator = torch.Generator().manual_seed(options.seed + entry.layer)
    return tuple(sorted(torch.randperm(entry.num_experts, generator=generator)[:count].tolist()))

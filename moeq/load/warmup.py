"""Compile the kernels of a converted checkpoint before it is served."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moeq.checkpoint.manifest import LayerEntry
from moeq.errors import MoeqError
from moeq.load.activation import activation_arguments, activation_of
from moeq.load.kernel_experts import empty_parts, kernel_experts
from moeq.load.ranks import Rank, RankPart, plan_rank
from moeq.load.torch_loader import DTYPES, check_groups, check_kernel, uneven_unit
from moeq.spelling import option

if TYPE_CHECKING:
    from moeq.deploy.deployment import Gpu
    from moeq.model.converted import ConvertedCheckpoint
    from moeq_kernels import PreparedLayer


#: Kind of layers to the future of its compilation in another thread; None once its kernels are compiled and loaded.
_READY: dict[Any, Future[None] | None] = {}


@dataclass(frozen=True)
class LayerKind:
    """Layers whose kernels are the same."""

    layers: tuple[int, ...]  #: numbers of the layers
    what: str  #: description of these layers: sizes, format, kernel family, and the reason if that is the portable one


@dataclass(frozen=True)
class WarmUp:
    """Result of a warm-up."""

    kinds: tuple[LayerKind, ...]  #: kinds of layers
    kernels: int  #: number of kernels that calls of all lengths need
    compiled: int  #: number of kernels that were not in the cache yet
    seconds: float  #: wall time


def warm_up(
    checkpoint: ConvertedCheckpoint, *, gpu: str | None, tp: int, ep: int, dtype: str, max_tokens: int
) -> WarmUp:
    """Compile, in parallel, all kernels that the layers of all ranks need for 1 to `max_tokens` tokens.

    Args:
        gpu: name of a GPU, which this machine need not have; None: this machine's GPU.
        tp: number of ranks that share every expert.
        ep: number of ranks that share the experts.
        dtype: dtype of the activations, `bf16` or `fp16`.
        max_tokens: largest number of tokens in a call.

    Raises MoeqError `answer.no-kernel`, `usage.*` if moeq's kernels do not run a layer of this deployment;
    `environment.no-gpu` if none is named and torch finds none; `environment.kernels` if a kernel does not compile here,
    if its machine code cannot be kept, and for GPUs of AMD.
    """
    import torch

    from moeq_kernels import KernelEnvironmentError, KernelError, interpreter, warmup

    if interpreter.active():
        raise MoeqError(
            "environment.kernels", "TRITON_INTERPRET is set: kernels are interpreted, not compiled", "unset it"
        )
    if gpu is None and not torch.cuda.is_available():
        raise MoeqError("environment.no-gpu", "this torch finds no GPU", f"{option('gpu', 'NAME')} needs no GPU here")
    ranks = [Rank(i, tp, j, ep) for i in range(tp) for j in range(ep)]
    try:
        found = list(_prepared(checkpoint, gpu, ranks, dtype, max_tokens))
        here = next((layer.problem.gpu for _, layer in found), None)
        if here is not None and here.backend != "cuda":
            raise MoeqError(
                "environment.kernels",
                f"{here.name} is an AMD GPU: Triton compiles its kernels when they are first called, not ahead of time",
                "serve the folder without a warm-up: its first requests take longer",
            )
        done = warmup(layer for _, layer in found)
    except KernelEnvironmentError as error:
        raise MoeqError("environment.kernels", error.message, error.hint) from error
    except KernelError as error:  # the kernels refuse a layer
        raise MoeqError("answer.no-kernel", error.message, error.hint) from error
    if not done.kept:
        raise MoeqError(
            "environment.kernels",
            f"{done.compiled} kernels were compiled for nothing: the folder for them cannot be used",
            "set MOEQ_KERNEL_CACHE to a folder of your own with mode 700",
        )
    kinds = dict.fromkeys(LayerKind(numbers, str(layer)) for numbers, layer in found)
    return WarmUp(tuple(kinds), done.kernels, done.compiled, round(done.seconds, 2))


def _prepared(
    checkpoint: ConvertedCheckpoint, gpu: str | None, ranks: Sequence[Rank], dtype: str, max_tokens: int
) -> Iterator[tuple[tuple[int, ...], PreparedLayer]]:
    """Yield (layer numbers, prepared layer without weights) for each kind of layer on each kind of rank.

    Ranks differ if experts or features do not divide evenly. Under expert parallelism each kind is prepared twice: vLLM
    hands kernels a map of experts, SGLang local numbers.
    """
    import torch

    from moeq_kernels import prepare

    info, torch_dtype = checkpoint.info, getattr(torch, DTYPES[dtype])
    kinds: dict[Any, list[tuple[LayerEntry, RankPart]]] = {}
    for entry in checkpoint.manifest.layers:
        check_kernel(entry, torch_dtype, dtype)
        for rank in ranks:
            part = plan_rank(entry, rank, uneven_unit(checkpoint, entry.layer))
            check_groups(entry, part)
            sizes = tuple(matrix.spec for matrix in part.matrices.values())
            kinds.setdefault((entry.layout, sizes, part.experts[1] - part.experts[0]), []).append((entry, part))
    for layers in kinds.values():
        entry, part = layers[0]
        specs = {role: matrix.spec for role, matrix in part.matrices.items()}
        held = part.experts[1] - part.experts[0]
        device = "meta" if gpu else "cuda"
        parts = empty_parts(entry.layout, specs, held, device, torch_dtype)
        numbers = tuple(dict.fromkeys(entry.layer for entry, _ in layers))
        for num_experts in (None, entry.num_experts) if ranks[0].ep_size > 1 else (None,):
            layer = prepare(
                kernel_experts(entry.layout, specs, parts),
                top_k=info.top_k or 1,
                max_tokens=max_tokens,
                dtype=torch_dtype,
                hidden_size=entry.matrices["w2"].spec.n,
                num_experts=num_experts,
                gpu=gpu,
                **activation_arguments(activation_of(info.activation, checkpoint.source.config)),
            )
            yield numbers, layer


def make_ready(prepared: PreparedLayer, logger: logging.Logger, *, wait: bool = True) -> None:
    """Compile, in parallel, and load all kernels of a layer; log them once for every kind of layer.

    With `wait=False` this returns at once; the next call that waits also waits for these kernels.
    """
    if (key := (prepared.problem, prepared.max_tokens, prepared.device)) not in _READY:
        if wait:
            _warm(prepared, logger)
            _READY[key] = None
        else:
            threads = ThreadPoolExecutor(1)
            _READY[key] = threads.submit(_warm, prepared, logger)
            threads.shutdown(wait=False)
    for begun in [key for key, future in _READY.items() if wait and future is not None]:
        future = _READY.pop(begun)
        assert future is not None
        future.result()
        _READY[begun] = None


def _warm(prepared: PreparedLayer, logger: logging.Logger) -> None:
    done = prepared.warm()
    if not done.kept:
        logger.warning("moeq: kernels are compiled at every start: the folder for them cannot be used")
    logger.info("moeq: %s: %d kernels, %d compiled, %.1f s", prepared, done.kernels, done.compiled, done.seconds)


def kernel_gpu(gpu: Gpu) -> str:
    """Return the kernels' name for a GPU: the GPU's own name, or that of a GPU with the same architecture.

    Raises MoeqError `usage.unknown-gpu` if there are no kernels for it.
    """
    from moeq_kernels.gpu import GPUS

    alike = [name for name, one in GPUS.items() if gpu.arch == (f"sm{one.arch}" if one.backend == "cuda" else one.arch)]
    if not alike:
        raise MoeqError("usage.unknown-gpu", f"moeq has no kernels for {gpu.name}", f"they know {', '.join(GPUS)}")
    return gpu.name if gpu.name in alike else alike[0]

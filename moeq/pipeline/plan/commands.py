"""Command lines that moeq suggests to type next: convert a checkpoint, and serve it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from moeq.deploy.deployment import Deployment
from moeq.oracle.engines.sglang.verdict import is_sglang
from moeq.oracle.versions import BUILTIN
from moeq.pipeline.plan.calibration import is_weight_only

if TYPE_CHECKING:
    from moeq.checkpoint.manifest import Manifest
    from moeq.model import Checkpoint
    from moeq.model.converted import ConvertedCheckpoint
    from moeq.pipeline.plan.decide import Answer

#: Names of activation dtypes in engines.
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}

#: First word of a loader's title to its name (`moeq.oracle.loaders.Loader`): manifests keep titles.
_LOADERS = {"vLLM": "vllm", "SGLang": "sglang", "transformers": "transformers", "moeq.load_experts": "load_experts"}


def next_command(src: str, checkpoint: Checkpoint, answer: Answer) -> str | None:
    """Return the command line that serves a source, after converting it where possible; None if nothing serves it."""
    if not answer.ok:
        return serve_source(src, checkpoint, answer) if answer.verdict.ok else None
    convert = convert_command(src, answer)
    names = [loader.name for loader in answer.loaders]
    serve = serve_converted("DST", checkpoint.info.dtype, answer.question.deployment, names)
    return " && ".join(filter(None, (convert, serve))) if _is_shell(serve) else f"{convert}, then {serve}"


def next_of_converted(dst: str, checkpoint: ConvertedCheckpoint) -> str:
    """Return the command line that serves a converted checkpoint on its deployment."""
    deployment = Deployment.from_json(checkpoint.manifest.deployment)
    names = loaders_of_manifest(checkpoint.manifest)
    serve = serve_converted(dst, checkpoint.info.dtype, deployment, names)
    return serve or f"moeq verify {dst}: nothing loads it yet"


def loaders_of_manifest(manifest: Manifest) -> list[str]:
    """Return the names of the loaders that a manifest lists by title."""
    words = [title.split()[0] for title in manifest.loads_in if title.strip()]
    return [_LOADERS[word] for word in words if word in _LOADERS]


def convert_command(src: str, answer: Answer) -> str:
    """Return the command line that converts a checkpoint for the deployment and with the options of an answer."""
    deployment, options = answer.question.deployment, answer.question.options
    flags = [f"--gpu {shlex.quote(deployment.gpu.name)}"]
    flags += [f"--{name} {size}" for name in ("tp", "ep", "dp") if (size := getattr(deployment, name)) > 1]
    flags += [f"--dtype {deployment.dtype}"] if deployment.dtype != "bf16" else []
    flags += [f"--engine {deployment.engine}"] if deployment.engine == BUILTIN else []
    flags += [f"--backend {deployment.backend}"] if deployment.backend != "auto" else []
    flags += [f"--layout {options.layout}"] if options.layout else []
    return " ".join(["moeq convert", src, "DST", *flags])


def serve_converted(dst: str, dtype: str | None, deployment: Deployment, loaders: list[str]) -> str | None:
    """Return how to serve a converted checkpoint whose config declares `dtype`; None if no loader takes it.

    The line has no options for method and kernels, which plug-ins choose by themselves.
    """
    wanted = "sglang" if is_sglang(deployment.engine) else "vllm"
    for engine in dict.fromkeys((wanted, "vllm", "sglang")):
        if engine in loaders:
            return _start(dst, dtype, deployment, sglang=engine == "sglang")
    if "transformers" in loaders:
        return f"`import moeq.engines.transformers` and from_pretrained({dst!r})"
    return f"moeq.load_experts({dst!r}, layer)" if loaders else None


def serve_source(src: str, checkpoint: Checkpoint, answer: Answer) -> str | None:
    """Return the command line that serves a source with the engine's own backend; None if outputs would be wrong."""
    verdict = answer.verdict
    deployment, sglang = verdict.deployment, is_sglang(verdict.engine)
    if verdict.engine == BUILTIN or _harmed(checkpoint, answer):
        return None
    asked = [f"--quantization {deployment.quantization}"] if deployment.quantization else []
    option = "--moe-runner-backend" if sglang else "--moe-backend"
    asked += [f"{option} {deployment.backend}"] if deployment.backend != "auto" else []
    return " ".join([_start(src, checkpoint.info.dtype, deployment, sglang=sglang), *asked])


def _harmed(checkpoint: Checkpoint, answer: Answer) -> bool:
    """Return whether the engine quantises activations by static scales that are missing or unusable."""
    parts = (part for part in answer.parts if not is_weight_only(part.verdict))
    return any(checkpoint.scale_faults(layer) for part in parts for layer in part.layers)


def _is_shell(command: str | None) -> bool:
    return command is None or command.startswith(("vllm", "python")) or "=" in command.split()[0]


def _start(path: str, dtype: str | None, deployment: Deployment, *, sglang: bool) -> str:
    """Return the command line that starts an engine, with the options for ranks and the activation dtype."""
    wanted = _DTYPES[deployment.dtype]
    env = [f"{name}={shlex.quote(value)}" for name, value in deployment.env]
    start = f"python -m sglang.launch_server --model-path {path}" if sglang else f"vllm serve {path}"
    ranks = _sglang_ranks(deployment) if sglang else _vllm_ranks(deployment)
    # Without an option, engines take the dtype that the config declares.
    return " ".join([*env, start, *ranks, *([f"--dtype {wanted}"] if dtype != wanted else [])])


def _sglang_ranks(deployment: Deployment) -> list[str]:
    """Return SGLang's options for ranks; expert parallelism uses the ranks of tensor parallelism."""
    tp, ep, dp = max(deployment.tp, deployment.ep), deployment.ep, deployment.dp
    sizes = {"--tp-size": tp, "--ep-size": ep, "--dp-size": dp}
    return [f"{option} {size}" for option, size in sizes.items() if size > 1]


def _vllm_ranks(deployment: Deployment) -> list[str]:
    """Return vLLM's options for ranks; experts are spread over all ranks of tensor, data and context parallelism."""
    ep, dp, pcp = deployment.ep, deployment.dp, deployment.pcp
    tp = max(1, ep // (dp * pcp)) if ep > 1 else deployment.tp
    sizes = {"--tensor-parallel-size": tp, "--data-parallel-size": dp, "--prefill-context-parallel-size": pcp}
    flags = [f"{option} {size}" for option, size in sizes.items() if size > 1]
    flags += ["--enable-expert-parallel"] if ep > 1 else []
    flags += ["--enable-eplb"] if deployment.eplb else []
    replicas = deployment.redundant_experts
    return [*flags, *([f"--eplb-config.num_redundant_experts {replicas}"] if replicas else [])]

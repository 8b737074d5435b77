"""Inspect, repack and prove the expert weights of quantised Mixture-of-Experts checkpoints.

    import moeq

    ckpt = moeq.open("path/or/hub-org/name")          # headers only
    ckpt.info                                         # what `moeq inspect --json` prints, as records
    ckpt.dequantize(0, 3, "gate")                     # float32 [N, K]
    deployment = moeq.Deployment(gpu=moeq.gpu("H100"), tp=2)
    verdict = moeq.decide(ckpt, deployment)           # backend, layout and every reason
    moeq.plan("source", deployment).plan.bytes_out    # what `moeq plan` prints, as records
    moeq.convert("source", "destination", deployment)
    moeq.run_check("destination", source="source")
    experts = moeq.load_experts("destination", 0, device="cuda")  # for moeq_kernels.fused_moe

Importing this module imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from moeq.version import __version__

# Public name -> "module:attribute". Resolved on first use, so that `import moeq` stays instant.
_PUBLIC = {
    "MoeqError": "moeq.errors:MoeqError",
    "open": "moeq.model:open",
    "Checkpoint": "moeq.model:Checkpoint",
    "Deployment": "moeq.deploy.deployment:Deployment",
    "Gpu": "moeq.deploy.deployment:Gpu",
    "gpu": "moeq.deploy.gpus:parse_gpu",
    "decide": "moeq.pipeline.plan.decide:decide",
    "plan": "moeq.pipeline.convert:plan",
    "convert": "moeq.pipeline.convert:convert",
    "finalize": "moeq.pipeline.finalize:finalize",
    "verify": "moeq.prove.verify:verify",
    "restore": "moeq.prove.restore:restore",
    "diff": "moeq.prove.diff:diff",
    "run_check": "moeq.check.run_check:run_check",
    "CheckOptions": "moeq.check.run_check:CheckOptions",
    "load_experts": "moeq.load.torch_loader:load_experts",
    "load_tensors": "moeq.load.torch_loader:load_tensors",
}

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from moeq.check.run_check import CheckOptions as CheckOptions
    from moeq.check.run_check import run_check as run_check
    from moeq.deploy.deployment import Deployment as Deployment
    from moeq.deploy.deployment import Gpu as Gpu
    from moeq.deploy.gpus import parse_gpu
    from moeq.errors import MoeqError as MoeqError
    from moeq.load.torch_loader import load_experts as load_experts
    from moeq.load.torch_loader import load_tensors as load_tensors
    from moeq.model import Checkpoint as Checkpoint
    from moeq.model import open as open
    from moeq.pipeline.convert import convert as convert
    from moeq.pipeline.convert import plan as plan
    from moeq.pipeline.finalize import finalize as finalize
    from moeq.pipeline.plan.decide import decide as decide
    from moeq.prove.diff import diff as diff
    from moeq.prove.restore import restore as restore
    from moeq.prove.verify import verify as verify

    gpu = parse_gpu


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'moeq' has no attribute '{name}'")
    module, _, attribute = _PUBLIC[name].partition(":")
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

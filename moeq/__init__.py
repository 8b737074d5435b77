"""Inspect, repack and prove the expert weights of quantised Mixture-of-Experts checkpoints.

    import moeq

    ckpt = moeq.open("path/or/hub-org/name")          # headers only
    ckpt.info                                         # what `moeq inspect --json` prints, as records
    ckpt.dequantize(0, 3, "gate")                     # float32 [N, K]
    moeq.decide("source", gpu="H100", tp=2)           # backend, layout and every reason
    moeq.plan("source", gpu="H100").plan.bytes_out    # what `moeq plan` prints, as records
    moeq.convert("source", "destination", gpu="H100", progress=True)
    moeq.verify("destination", "source").ok
    moeq.run_check("destination", source="source")
    experts = moeq.load_experts("destination", 0, device="cuda")  # for moeq_kernels.fused_moe
    writer = moeq.Writer([moeq.writable_layer("destination", 0, tensors=served)])
    writer.update(0, 3, "gate", new_weights)          # in place, the bytes of a fresh conversion

Each command is one function, whose arguments have the names of the command's options; one `moeq.Deployment` may
stand for the deployment options. A record prints as one line, and is a table in a notebook.

Importing this module imports no torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
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
    "decide": "moeq.api.functions:decide",
    "plan": "moeq.api.functions:plan",
    "convert": "moeq.api.functions:convert",
    "finalize": "moeq.api.functions:finalize",
    "transcode": "moeq.api.functions:transcode",
    "push": "moeq.api.functions:push",
    "verify": "moeq.api.proofs:verify",
    "restore": "moeq.api.proofs:restore",
    "diff": "moeq.api.proofs:diff",
    "run_check": "moeq.api.proofs:run_check",
    "run_engine_check": "moeq.api.engine_backends:run_engine_check",
    "CheckOptions": "moeq.check.run_check:CheckOptions",
    "load_experts": "moeq.load.torch_loader:load_experts",
    "load_tensors": "moeq.load.torch_loader:load_tensors",
    "writable_layer": "moeq.update.layers:writable_layer",
    "Writer": "moeq.update.writer:Writer",
    "snapshot": "moeq.update.snapshot:snapshot",
}

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from moeq.api.engine_backends import run_engine_check as run_engine_check
    from moeq.api.functions import convert as convert
    from moeq.api.functions import decide as decide
    from moeq.api.functions import finalize as finalize
    from moeq.api.functions import plan as plan
    from moeq.api.functions import push as push
    from moeq.api.functions import transcode as transcode
    from moeq.api.proofs import diff as diff
    from moeq.api.proofs import restore as restore
    from moeq.api.proofs import run_check as run_check
    from moeq.api.proofs import verify as verify
    from moeq.check.run_check import CheckOptions as CheckOptions
    from moeq.deploy.deployment import Deployment as Deployment
    from moeq.deploy.deployment import Gpu as Gpu
    from moeq.deploy.gpus import parse_gpu
    from moeq.errors import MoeqError as MoeqError
    from moeq.load.torch_loader import load_experts as load_experts
    from moeq.load.torch_loader import load_tensors as load_tensors
    from moeq.model import Checkpoint as Checkpoint
    from moeq.model import open as open
    from moeq.update.layers import writable_layer as writable_layer
    from moeq.update.snapshot import snapshot as snapshot
    from moeq.update.writer import Writer as Writer

    gpu = parse_gpu


class _FrontDoor(ModuleType):
    """Module whose functions no imported folder of the same name hides (`moeq.transcode`)."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _PUBLIC and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _FrontDoor


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'moeq' has no attribute '{name}'")
    module, _, attribute = _PUBLIC[name].partition(":")
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

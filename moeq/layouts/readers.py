"""Who reads the bytes of a layout. Layout classes declare it; plans, the oracle and engine plug-ins derive from that.

Importing this needs neither torch nor an engine.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Versions of vLLM that moeq's plug-in was run with, newest first (`moeq.engines.vllm.plugin`).
VLLM_VERSIONS = ("0.33.0", "0.32.0", "0.31.0", "0.30.0", "0.29.0", "0.28.0", "0.27.1", "0.27.0", "0.26.0")


@dataclass(frozen=True)
class Only:
    """Conditions of a deployment and a checkpoint; one that is None always holds."""

    dtype: str | None = None  #: dtype of the activations
    env: str | None = None  #: environment variable and value, `NAME=value`
    configs: tuple[str, ...] | None = None  #: vLLM's config classes, as the oracle names them
    #: Weight keys of vLLM, which tell scales of blocks, channels and tensors apart.
    weights: tuple[str, ...] | None = None
    activations: str | None = None  #: vLLM's key of the activations that the checkpoint asks for; `none` for 16 bits
    devices: tuple[str, ...] | None = None  #: device terms (`moeq.oracle.devices`), of which one has to hold
    max_tp: int | None = None  #: largest number of ranks that share an expert
    activation: str | None = None  #: activation function of the experts


@dataclass(frozen=True)
class VLLM:
    """A backend of vLLM that reads the bytes; moeq's plug-in hands them to it unless `loads` is False."""

    backend: str  #: the engine's name of the backend
    option: str = "auto"  #: value of `--moe-backend` that asks for it; `auto` where no value does
    since: str | None = None  #: the oldest version that reads these bytes; None: every version in `VLLM_VERSIONS`
    until: str | None = None  #: the newest version that reads them; None: no end is known
    dtypes: tuple[str, ...] = ("bf16", "fp16")  #: dtypes of the activations
    #: The kernel applies the activation function itself and finds gate and up where the layout has them.
    activates: bool = False
    weights_only: bool = False  #: the kernel quantises no activations, so it needs no scales of static ones
    shards: bool = True  #: tensor-parallel ranks may hold parts of experts
    loads: bool = True  #: moeq's plug-in hands the stored bytes to this backend
    only: Only = Only()  #: conditions under which the backend reads these bytes instead of others
    #: The oracle names this layout for the backend. Where this is False, a plan writes it instead of a named one.
    chosen: bool = True
    lossy: bool = False  #: the engine changes numbers when it makes these bytes, so they are written on request only
    older_differ: bool = False  #: versions before `since` read other bytes, for which there is no layout

    @property
    def versions(self) -> tuple[str, ...]:
        """The versions in `VLLM_VERSIONS` that read these bytes, newest first."""
        newest = VLLM_VERSIONS.index(self.until) if self.until else 0
        oldest = VLLM_VERSIONS.index(self.since) if self.since else len(VLLM_VERSIONS) - 1
        return VLLM_VERSIONS[newest : oldest + 1]


@dataclass(frozen=True)
class MOEQ:
    """A kernel of moeq; `moeq_kernels.formats` says how it reads the bytes."""

    #: Value of `--backend` that asks for it; None where the oracle never chooses it, because the bytes are made for an
    #: engine's kernel.
    backend: str | None = None
    #: Activations run in 16 bits even where the checkpoint asks for 8 or 4, and the layout turns scales of whole blocks
    #: and tensors into scales of groups and channels.
    keeps_16_bit: bool = False


Reader = VLLM | MOEQ

"""Records of the oracle's questions and answers: frozen, free of torch, and written to reports and JSON unchanged."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from moeq.deploy.deployment import Deployment
from moeq.display import DisplayedRecord

Routing = Literal[
    "Default",
    "Renormalize",
    "RenormalizeNaive",
    "DeepSeekV3",
    "Llama4",
    "TopK",
    "SigmoidRenorm",
    "MiniMax2",
    "Sigmoid",
    "Unspecified",
    "DeepseekV4",
    "Custom",
    "Simulated",
]


@dataclass(frozen=True)
class MoeShape:
    """Sizes and kinds of one MoE layer, from the model's config."""

    hidden_size: int  #: model width, `K` of w13
    intermediate_size: int  #: width of one expert, before sharding
    num_experts: int  #: routed experts of the layer, over all ranks
    top_k: int  #: experts per token
    activation: str = "silu"  #: engine-neutral activation name (`silu`, `gelu`, `swigluoai`, ..., `relu2_no_mul`)
    gated: bool = True  #: whether w13 holds gate and up
    has_bias: bool = False  #: whether expert projections have biases
    #: Rule from router logits to expert weights; kernels with a built-in router depend on it.
    routing: Routing = "Renormalize"
    router_dtype: str | None = None  #: dtype of router logits, or None for the activation dtype
    hash_routing: bool = False  #: whether experts are chosen by token id
    swiglu_limit: float | None = None  #: clamp of the gated activation, or None
    routed_scaling_factor: float = 1.0  #: factor on the combined output
    router_weight_on_input: bool = False  #: whether router weights multiply the input instead of the output
    model_type: str = ""  #: `model_type` of the config (`gpt_oss`), if known: some engines branch on it
    architecture: str = ""  #: model class that the config names (`KimiK3ForConditionalGeneration`), if known
    #: Dtype of the experts that the model's config states outside the quantisation config (DeepSeek-V4: `fp4` or
    #: `fp8`); empty without such a statement.
    expert_dtype: str = ""


@dataclass(frozen=True)
class StoredTensor:
    """Header of one tensor of an expert; experts with equal headers share a record."""

    projection: str  #: `gate`, `up`, `down`, or `gate_up` for both in one tensor
    part: str  #: name below the projection in the file, such as `qweight` or `weight_scale`
    dtype: str  #: safetensors name of the dtype
    shape: tuple[int, ...]  #: shape of one expert's tensor
    experts: tuple[int, ...] = ()  #: numbers of the experts; empty for all of them
    stacked: bool = False  #: whether one tensor of the file holds all experts

    @property
    def which(self) -> str:
        """Words that name the experts, for messages; empty for all of them."""
        return f", experts {', '.join(map(str, self.experts[:8]))}" if self.experts else ""


@dataclass(frozen=True)
class Reason:
    """One failed rule."""

    code: str  #: rule code for `moeq explain CODE`
    text: str  #: failure with its numbers
    remedy: str | None = None  #: change that satisfies this rule, or None if the deployment cannot


#: Reason for the missing layout of a kernel that reads the stored bytes.
AS_IT_IS = "it reads the checkpoint's weights as they are"


@dataclass(frozen=True)
class CandidateReport:
    """Judgement of one backend of the family."""

    backend: str  #: engine's name of the backend
    #: Experts class that runs (the supported one, else the one that came closest); None if the engine's method runs a
    #: kernel without such a class.
    experts: str | None
    layout: str | None  #: id of the offline layout that its kernel reads, or None
    no_layout: str | None  #: reason why `layout` is None
    supported: bool  #: whether every rule holds
    reasons: tuple[Reason, ...] = ()  #: every failed rule of the closest class, not only the first
    unlock: str | None = None  #: nearest single change that makes the backend supported, or None
    flag: str | None = None  #: value of the engine's backend option that selects it, or None if the option cannot
    monolithic: bool = False  #: whether the kernel does its own routing
    #: Engine's key of the activations that the kernel runs; None for 16-bit activations.
    activation_key: str | None = None
    #: Whether the kernel computes in the number types of the checkpoint. If the engine selects such a backend,
    #: `convert` writes for no other backend unless one is requested.
    native: bool = False
    as_it_is: bool = False  #: whether the kernel reads the bytes of the checkpoint, so that there is nothing to convert
    #: Id of the layout that its kernel reads if the engine changes numbers when it makes it, or None.
    lossy_layout: str | None = None


@dataclass(frozen=True)
class Advisory:
    """Known defect of the engine that concerns a decision."""

    code: str
    requirement: tuple[str, ...]  #: ids of moeq's requirements that it concerns (`R14`)
    versions: str  #: engine versions that have the defect, among the examined ones
    symptom: str  #: effect that the user would see
    workaround: str  #: workaround inside the engine
    check: str = ""  #: command that shows whether a checkpoint is affected
    shown: str = ""  #: evidence: recorded answers, executed code, read code, or a report from upstream
    issue: str | None = None  #: upstream issue or pull request, or None
    fixed_by: str = ""  #: behaviour of moeq instead


@dataclass(frozen=True)
class Gate:
    """Result of a check outside backend selection."""

    code: str  #: code, `G0` to `G13`
    stage: str  #: stage of the engine's start
    passed: bool  #: whether the deployment passes
    text: str  #: facts with their numbers
    error: str | None = None  #: exception type that the engine raises on failure
    kind: str | None = None  #: kind of failure (`CONFIG`, `CONVERSION`, `KERNEL_CREATION`, ...)
    remedy: str | None = None  #: nearest change that passes


@dataclass(frozen=True)
class EngineError:
    """Error with which the engine's own selection ends."""

    error: str
    #: Kind of failure: `NO_BACKEND`, `CONFIG`, `OVERRIDE_UNKNOWN`, `OVERRIDE_UNSUPPORTED`, `BARE_ASSERTION`, ...
    kind: str
    text: str  #: meaning with its numbers
    hint: str | None = None  #: nearest alternative that works
    code: str | None = None  #: rule code of the deciding reason, or None


@dataclass(frozen=True)
class Sizes:
    """Sizes of one rank's experts, in elements."""

    hidden: int
    intermediate: int  #: expert width per rank, before padding
    padded_hidden: int  #: model width that the backend stores
    padded_intermediate: int  #: expert width per rank that the backend stores
    local_experts: int  #: experts on the fullest rank

    @property
    def text(self) -> str:
        """Sizes per rank before and after padding, for people."""
        inner = f"intermediate per rank {self.intermediate} -> {self.padded_intermediate}"
        return f"hidden {self.hidden} -> {self.padded_hidden}, {inner}"


@dataclass(frozen=True)
class ConvertTarget:
    """Layout that `moeq convert` writes for a decision."""

    backend: str  #: backend whose kernel reads the layout
    experts: str | None
    layout: str
    #: Option to start the engine with, such as `--moe-backend marlin`; None if the engine selects the backend.
    flag: str | None
    sizes: Sizes
    why: str | None = None  #: reason why it differs from the engine's own choice, or None
    #: Rounding of stored values that do not fit; `convert` then stops unless lossy layouts are allowed. None if all
    #: possible values fit.
    rounding: str | None = None


@dataclass(frozen=True, repr=False)
class Verdict(DisplayedRecord):
    """Answer of the oracle for one scheme, shape and deployment."""

    engine: str  #: engine that decided, `vllm@0.33.0` or `moeq`
    scheme: str  #: title of the scheme
    deployment: Deployment  #: deployment with the sizes that the engine derives
    shape: MoeShape
    asked: str  #: requested backend, or `auto`
    method: str | None  #: engine's integration class for this checkpoint, or None if it refuses the config
    family: str | None  #: backend family, or None
    weight_key: str | None  #: engine's effective weight key
    activation_key: str | None  #: engine's effective activation key, or None for 16-bit activations
    selected: CandidateReport | None  #: result of the engine's selection, even if a later gate fails
    error: EngineError | None  #: error with which the selection ends, or None
    gates: tuple[Gate, ...]
    candidates: tuple[CandidateReport, ...]  #: every backend of the family in the engine's order, with all reasons
    convert: ConvertTarget | None  #: layout that `moeq convert` writes, or None with `refusal`
    runs_as: str | None = None  #: precision of weights and activations that really runs, `W4A16`
    sizes: Sizes | None = None
    transient_bytes: int | None = None  #: peak of extra device memory per layer for the engine's own repack, in bytes
    #: Environment variables and packages that would change the choice, with their values.
    mattered: tuple[tuple[str, str], ...] = ()
    advisories: tuple[Advisory, ...] = ()
    notes: tuple[str, ...] = ()  #: further facts, such as inferred sizes and fallbacks
    reported_backend: str | None = None  #: name in the engine's log, if it differs from the backend that runs
    no_convert: str | None = None  #: reason why `convert` is None although a backend was selected
    #: Nearest single change with which the engine runs: a verdict confirmed it. None if it runs already.
    works: str | None = None

    @property
    def chosen(self) -> CandidateReport | None:
        """Backend that runs: it is selected and every gate passed. None means that the engine does not run."""
        return self.selected if all(gate.passed for gate in self.gates) else None

    @property
    def ok(self) -> bool:
        """Whether the engine runs this checkpoint on this deployment."""
        return self.chosen is not None

    @property
    def failed_gates(self) -> frozenset[str]:
        """Codes of the gates that failed."""
        return frozenset(gate.code for gate in self.gates if not gate.passed)

    @property
    def known(self) -> bool:
        """Whether moeq knows what the engine decides: an unknown answer is neither yes nor no."""
        return self.error is None or self.error.kind != "NOT_FOLLOWED"

    @property
    def refusal(self) -> str:
        """Reason for a no, with its numbers; empty if the engine runs and there is something to convert."""
        failed = [gate.text for gate in self.gates if not gate.passed]
        if self.error is not None:
            return self.error.text
        if failed:
            return f"{self.engine}: {'; '.join(failed)}"
        if self.convert is None and self.selected is not None:
            return f"nothing to convert to: {self.no_convert}"
        return ""

    @property
    def nearest(self) -> str | None:
        """Nearest alternative, or None: the error's hint, else a tried change, else the remedies of rules."""
        if self.error is not None and self.error.hint:
            return self.error.hint
        if self.works is not None:
            return self.works
        remedies = [gate.remedy for gate in self.gates if not gate.passed and gate.remedy]
        if remedies:
            return "; ".join(dict.fromkeys(remedies))
        rows = [row for row in self.candidates if row.unlock and not row.supported]
        rows.sort(key=lambda row: _distance(str(row.unlock)))  # a stable sort keeps the engine's order
        return "; ".join(f"{row.backend}: {row.unlock}" for row in rows[:2]) or None

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON document."""
        document = asdict(self)
        document.update(ok=self.ok, refusal=self.refusal or None, nearest=None if self.ok else self.nearest)
        document["chosen"] = asdict(self.chosen) if self.chosen else None
        document["deployment"]["env"] = dict(self.deployment.env)
        document["deployment"]["packages"] = dict(self.deployment.packages)
        document["mattered"] = dict(self.mattered)
        for row in (document["chosen"] or {}, *document["candidates"]):
            row.pop("activation_key", None)
        return document


def _distance(unlock: str) -> tuple[bool, int, bool]:
    """Return a sort key of a change: a requested backend first, several changes after one, another device last."""
    return ("a device of" in unlock, unlock.count(" and "), not unlock.startswith("--"))

"""Records of the oracle's questions and answers: frozen, free of torch, and written to reports and JSON unchanged."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from moeq.deploy.deployment import Deployment
from moeq.shown import Shown

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
    """Sizes and kinds of one MoE layer, from the model's config.

    Attributes:
        hidden_size: model width, `K` of w13.
        intermediate_size: width of one expert, before sharding.
        num_experts: routed experts of the layer, over all ranks.
        top_k: experts per token.
        activation: engine-neutral activation name (`silu`, `gelu`, `swigluoai`, ..., `relu2_no_mul`).
        gated: whether w13 holds gate and up.
        has_bias: whether expert projections have biases.
        routing: rule from router logits to expert weights; kernels with a built-in router depend on it.
        router_dtype: dtype of router logits, or None for the activation dtype.
        hash_routing: whether experts are chosen by token id.
        swiglu_limit: clamp of the gated activation, or None.
        routed_scaling_factor: factor on the combined output.
        router_weight_on_input: whether router weights multiply the input instead of the output.
        model_type: `model_type` of the config (`gpt_oss`), if known: some engines branch on it.
        architecture: model class that the config names (`KimiK3ForConditionalGeneration`), if known.
        expert_dtype: dtype of the experts that the model's config states outside the quantisation config
            (DeepSeek-V4: `fp4` or `fp8`); empty without such a statement.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    activation: str = "silu"
    gated: bool = True
    has_bias: bool = False
    routing: Routing = "Renormalize"
    router_dtype: str | None = None
    hash_routing: bool = False
    swiglu_limit: float | None = None
    routed_scaling_factor: float = 1.0
    router_weight_on_input: bool = False
    model_type: str = ""
    architecture: str = ""
    expert_dtype: str = ""


@dataclass(frozen=True)
class StoredTensor:
    """Header of one tensor of an expert; experts with equal headers share a record.

    Attributes:
        projection: `gate`, `up`, `down`, or `gate_up` for both in one tensor.
        part: name below the projection in the file, such as `qweight` or `weight_scale`.
        dtype: safetensors name of the dtype.
        shape: shape of one expert's tensor.
        experts: numbers of the experts; empty for all of them.
        stacked: whether one tensor of the file holds all experts.
    """

    projection: str
    part: str
    dtype: str
    shape: tuple[int, ...]
    experts: tuple[int, ...] = ()
    stacked: bool = False

    @property
    def which(self) -> str:
        """Words that name the experts, for messages; empty for all of them."""
        return f", experts {', '.join(map(str, self.experts[:8]))}" if self.experts else ""


@dataclass(frozen=True)
class Reason:
    """One failed rule.

    Attributes:
        code: rule code for `moeq explain CODE`.
        text: failure with its numbers.
        remedy: change that satisfies this rule, or None if the deployment cannot.
    """

    code: str
    text: str
    remedy: str | None = None


#: Reason for the missing layout of a kernel that reads the stored bytes.
AS_IT_IS = "it reads the checkpoint's weights as they are"


@dataclass(frozen=True)
class CandidateReport:
    """Judgement of one backend of the family.

    Attributes:
        backend: engine's name of the backend.
        experts: experts class that runs (the supported one, else the one that came closest); None if the engine's
            method runs a kernel without such a class.
        layout: id of the offline layout that its kernel reads, or None.
        no_layout: reason why `layout` is None.
        supported: whether every rule holds.
        reasons: every failed rule of the closest class, not only the first.
        unlock: nearest single change that makes the backend supported, or None.
        flag: value of the engine's backend option that selects it, or None if the option cannot.
        monolithic: whether the kernel does its own routing.
        activation_key: engine's key of the activations that the kernel runs; None for 16-bit activations.
        native: whether it computes in the number types of the checkpoint. If the engine selects such a backend,
            `convert` writes for no other backend unless one is requested.
        as_it_is: whether it reads the bytes of the checkpoint, so that there is nothing to convert.
        lossy_layout: id of the layout that its kernel reads if the engine changes numbers when it makes it, or None.
    """

    backend: str
    experts: str | None
    layout: str | None
    no_layout: str | None
    supported: bool
    reasons: tuple[Reason, ...] = ()
    unlock: str | None = None
    flag: str | None = None
    monolithic: bool = False
    activation_key: str | None = None
    native: bool = False
    as_it_is: bool = False
    lossy_layout: str | None = None


@dataclass(frozen=True)
class Advisory:
    """Known defect of the engine that concerns a decision.

    Attributes:
        requirement: ids of moeq's requirements that it concerns (`R14`).
        versions: engine versions that have the defect, among the examined ones.
        symptom: effect that the user would see.
        workaround: workaround inside the engine.
        check: command that shows whether a checkpoint is affected.
        shown: evidence: recorded answers, executed code, read code, or a report from upstream.
        issue: upstream issue or pull request, or None.
        fixed_by: behaviour of moeq instead.
    """

    code: str
    requirement: tuple[str, ...]
    versions: str
    symptom: str
    workaround: str
    check: str = ""
    shown: str = ""
    issue: str | None = None
    fixed_by: str = ""


@dataclass(frozen=True)
class Gate:
    """Result of a check outside backend selection.

    Attributes:
        code: code, `G0` to `G12`.
        stage: stage of the engine's start.
        passed: whether the deployment passes.
        text: facts with their numbers.
        error: exception type that the engine raises on failure.
        kind: kind of failure (`CONFIG`, `CONVERSION`, `KERNEL_CREATION`, ...).
        remedy: nearest change that passes.
    """

    code: str
    stage: str
    passed: bool
    text: str
    error: str | None = None
    kind: str | None = None
    remedy: str | None = None


@dataclass(frozen=True)
class EngineError:
    """Error with which the engine's own selection ends.

    Attributes:
        kind: kind of failure: `NO_BACKEND`, `CONFIG`, `OVERRIDE_UNKNOWN`, `OVERRIDE_UNSUPPORTED`, `BARE_ASSERTION`, ...
        text: meaning with its numbers.
        hint: nearest alternative that works.
        code: rule code of the deciding reason, or None.
    """

    error: str
    kind: str
    text: str
    hint: str | None = None
    code: str | None = None


@dataclass(frozen=True)
class Sizes:
    """Sizes of one rank's experts, in elements.

    Attributes:
        intermediate: expert width per rank, before padding.
        padded_hidden: model width that the backend stores.
        padded_intermediate: expert width per rank that the backend stores.
        local_experts: experts on the fullest rank.
    """

    hidden: int
    intermediate: int
    padded_hidden: int
    padded_intermediate: int
    local_experts: int


@dataclass(frozen=True)
class ConvertTarget:
    """Layout that `moeq convert` writes for a decision.

    Attributes:
        backend: backend whose kernel reads the layout.
        flag: option to start the engine with, such as `--moe-backend marlin`; None if the engine selects the backend.
        why: reason why it differs from the engine's own choice, or None.
        rounding: rounding of stored values that do not fit; `convert` then stops unless lossy layouts are allowed.
            None if all possible values fit.
    """

    backend: str
    experts: str | None
    layout: str
    flag: str | None
    sizes: Sizes
    why: str | None = None
    rounding: str | None = None


@dataclass(frozen=True, repr=False)
class Verdict(Shown):
    """Answer of the oracle for one scheme, shape and deployment.

    Attributes:
        engine: engine that decided, `vllm@0.33.0` or `moeq`.
        scheme: title of the scheme.
        deployment: deployment with the sizes that the engine derives.
        asked: requested backend, or `auto`.
        method: engine's integration class for this checkpoint, or None if it refuses the config.
        family: backend family, or None.
        weight_key: engine's effective weight key.
        activation_key: engine's effective activation key, or None for 16-bit activations.
        selected: result of the engine's selection, even if a later gate fails.
        error: error with which the selection ends, or None.
        candidates: every backend of the family in the engine's order, with all reasons.
        convert: layout that `moeq convert` writes, or None with `refusal`.
        runs_as: precision of weights and activations that really runs, `W4A16`.
        transient_bytes: peak of extra device memory per layer for the engine's own repack, in bytes.
        mattered: environment variables and packages that would change the choice, with their values.
        notes: further facts, such as inferred sizes and fallbacks.
        reported_backend: name in the engine's log, if it differs from the backend that runs.
        no_convert: reason why `convert` is None although a backend was selected.
        works: nearest single change with which the engine runs, tried as a whole; None if it runs already.
    """

    engine: str
    scheme: str
    deployment: Deployment
    shape: MoeShape
    asked: str
    method: str | None
    family: str | None
    weight_key: str | None
    activation_key: str | None
    selected: CandidateReport | None
    error: EngineError | None
    gates: tuple[Gate, ...]
    candidates: tuple[CandidateReport, ...]
    convert: ConvertTarget | None
    runs_as: str | None = None
    sizes: Sizes | None = None
    transient_bytes: int | None = None
    mattered: tuple[tuple[str, str], ...] = ()
    advisories: tuple[Advisory, ...] = ()
    notes: tuple[str, ...] = ()
    reported_backend: str | None = None
    no_convert: str | None = None
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
    """Rank a change by its distance: a mere name first, several changes after one, another device last."""
    return ("a device of" in unlock, unlock.count(" and "), not unlock.startswith("--"))

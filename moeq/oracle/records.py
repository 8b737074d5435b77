"""Records that the oracle takes and gives. Frozen, plain, free of torch: they go into reports and JSON as they are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from moeq.deploy.deployment import Deployment

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
    """Sizes and kinds of one MoE layer, as the model's config tells them.

    Attributes:
        hidden_size: model width, `K` of w13.
        intermediate_size: width of one expert, global (unsharded).
        num_experts: routed experts of the layer, over all ranks.
        top_k: experts per token.
        activation: engine-neutral activation name (`silu`, `gelu`, `swigluoai`, ..., `relu2_no_mul`).
        gated: w13 holds gate and up.
        has_bias: expert projections carry biases.
        routing: how router logits become weights (drives monolithic kernels).
        router_dtype: dtype of router logits, or None for the activation dtype.
        hash_routing: experts are chosen by token id.
        swiglu_limit: clamp of the gated activation, or None.
        routed_scaling_factor: factor on the combined output (1: none).
        router_weight_on_input: router weights multiply the input instead of the output.
        model_type: the model config's own name (`gpt_oss`), where known: some engines branch on it.
        architecture: the model class that its config names (`KimiK3ForConditionalGeneration`), where known.
        expert_dtype: what the model's config says of its experts beside the quantisation config (DeepSeek-V4's `fp4`
            or `fp8`); empty where it says nothing.
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
class Reason:
    """One failed rule.

    Attributes:
        code: rule code; `moeq explain CODE` says more.
        text: what failed, with its numbers.
        remedy: the change that would satisfy this rule, or None where the deployment cannot.
    """

    code: str
    text: str
    remedy: str | None = None


#: Why there is no layout where a kernel reads the stored bytes.
AS_IT_IS = "it reads the checkpoint's weights as they are"


@dataclass(frozen=True)
class CandidateReport:
    """One backend of the family, judged.

    Attributes:
        backend: the engine's name of the backend.
        experts: experts class that runs (the supported one, else the one that came closest); None where the engine's
            method runs a kernel without one.
        layout: id of the offline layout its kernel reads, or None.
        no_layout: why there is no offline layout, where `layout` is None.
        supported: every rule holds.
        reasons: every failed rule of the closest class, not only the first.
        unlock: the nearest single change that makes it supported, or None where no single change does.
        flag: value of the engine's backend option that asks for it, or None where it cannot be asked for.
        monolithic: the kernel does its own routing.
        activation_key: the engine's key of the activations that its kernel runs, None for 16-bit ones.
        native: it computes in the number types of the checkpoint: where the engine picks it, `convert` writes for no
            other backend unless one is asked for.
        as_it_is: it reads the bytes of the checkpoint, so that there is nothing to convert.
        lossy_layout: id of the layout its kernel reads where the engine changes numbers when it makes it, or None.
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
    """A known defect or trap that this decision meets.

    Attributes:
        code: stable name.
        requirement: ids of moeq's requirements that it bears on (`R14`).
        versions: engine versions that have it, of those that were looked at.
        symptom: what the user would see.
        workaround: what to do in the engine.
        check: the command that shows whether a checkpoint meets it.
        shown: how it was shown: recorded answers, executed code, read code, or a report from upstream.
        issue: upstream issue or pull request, where there is one.
        fixed_by: what moeq does instead.
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
    """A check outside backend selection.

    Attributes:
        code: `G0` .. `G9`.
        stage: what the engine is doing then.
        passed: whether the deployment gets through.
        text: the facts, with numbers.
        error: exception type the engine raises, where it fails.
        kind: kind of failure (`CONFIG`, `CONVERSION`, `KERNEL_CREATION`, ...).
        remedy: the nearest change that passes.
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
    """How the engine's own selection ends when it ends in an error.

    Attributes:
        error: exception type the engine raises.
        kind: `NO_BACKEND`, `CONFIG`, `OVERRIDE_UNKNOWN`, `OVERRIDE_UNSUPPORTED`, `BARE_ASSERTION`, ...
        text: what it means, with numbers.
        hint: nearest thing that works.
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
        hidden: model width.
        intermediate: expert width per rank, before padding.
        padded_hidden: as the backend stores it.
        padded_intermediate: as the backend stores it.
        local_experts: experts per rank (the largest rank).
    """

    hidden: int
    intermediate: int
    padded_hidden: int
    padded_intermediate: int
    local_experts: int


@dataclass(frozen=True)
class ConvertTarget:
    """What `moeq convert` writes for this decision.

    Attributes:
        backend: backend whose kernel reads it.
        experts: experts class.
        layout: layout id.
        flag: what to start the engine with, such as `--moe-backend marlin`; None where the engine chooses the same.
        sizes: sizes per rank.
        why: why this is not the engine's own choice, or None.
        rounding: what is rounded where stored values do not fit; `convert` then stops unless lossy layouts are allowed.
            None where all values fit, whatever they are.
    """

    backend: str
    experts: str | None
    layout: str
    flag: str | None
    sizes: Sizes
    why: str | None = None
    rounding: str | None = None


@dataclass(frozen=True)
class Verdict:
    """The oracle's answer for one scheme, shape and deployment.

    Attributes:
        engine: policy that decided, `vllm@0.33.0` or `moeq`.
        scheme: title of the scheme.
        deployment: as decided on, with the sizes the engine derives filled in.
        shape: the layer.
        asked: backend asked for, `auto` where none was.
        method: the engine's integration class for this checkpoint, or None where it refuses the config.
        family: backend family, or None.
        weight_key: the engine's effective weight key.
        activation_key: the engine's effective activation key, or None for 16-bit activations.
        selected: what the engine's selection returns, even where a later gate fails.
        error: how the selection ends instead.
        gates: every gate, passed or not.
        candidates: every backend of the family in the engine's order, with all reasons.
        convert: what `moeq convert` writes, or None with `refusal`.
        runs_as: precision of weights and activations that really runs, `W4A16`.
        sizes: sizes per rank for the selected backend.
        transient_bytes: extra device memory per layer that the engine's own repack needs at its peak.
        mattered: environment variables and packages that would change the choice, with their values.
        advisories: known defects that this decision meets.
        notes: facts worth saying (inferred sizes, fallbacks taken).
        reported_backend: what the engine's log calls it, where that is not what runs.
        no_convert: why `convert` is None although a backend was chosen.
        works: the nearest single change with which the engine runs, tried as a whole, where it does not run.
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
        """The backend that really runs: selected, and every gate passed. None is the answer "no"."""
        return self.selected if all(gate.passed for gate in self.gates) else None

    @property
    def ok(self) -> bool:
        """Whether the engine runs this checkpoint on this deployment."""
        return self.chosen is not None

    @property
    def refusal(self) -> str:
        """One sentence on why not, with its numbers; empty where `ok` and something can be converted."""
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
        """The nearest thing that works, or None: the refusal's own hint, what was tried, what the failed rules say."""
        if self.error is not None and self.error.hint:
            return self.error.hint
        if self.works is not None:
            return self.works
        remedies = [gate.remedy for gate in self.gates if not gate.passed and gate.remedy]
        if remedies:
            return "; ".join(dict.fromkeys(remedies))
        rows = [row for row in self.candidates if row.unlock and not row.supported]
        rows.sort(key=lambda row: _distance(str(row.unlock)))  # stable: equal ones keep the engine's order
        return "; ".join(f"{row.backend}: {row.unlock}" for row in rows[:2]) or None

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON document."""
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
    """How far a change is: another device last, several changes after one, a mere name first."""
    return ("a device of" in unlock, unlock.count(" and "), not unlock.startswith("--"))

"""The engine's answer and moeq's to the same case, in the same words, and where they differ."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from moeq.deploy.deployment import Deployment, Gpu
from moeq.oracle.engines.vllm.outcome import Outcome, resolve
from moeq.oracle.engines.vllm.policy import EnginePolicy
from moeq.oracle.engines.vllm.sizes import sizes_for
from moeq.oracle.records import MoeShape
from moeq.schemes.config_types import checked

Row = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """`choice` with backend and class, or `error` with its type and kind."""

    outcome: str
    first: str
    second: str | None

    def agrees(self, other: Answer) -> bool:
        """The same decision: the same backend and class, or a refusal by both."""
        return self.outcome == other.outcome and (self.outcome == "error" or self == other)

    def equals(self, other: Answer) -> bool:
        """The same decision, and errors of the same type and kind (refusals before selection count as one kind)."""
        kinds = [_EARLY.get(str(row.second), row.second) for row in (self, other)]
        same = self.outcome == "choice" or (self.first == other.first and kinds[0] == kinds[1])
        return self.agrees(other) and same


_EARLY = {"BARE_ASSERTION": "CONFIG", "METHOD": "CONFIG"}

# ------------------------------------------------------------------------------------------------ the engine's side


def _kind(error: Row, stage: str) -> str:
    """The kind of a refusal, in moeq's words."""
    text, selecting = error["msg"], "/oracle/" in " ".join(error["frames"])
    if "Expected one of" in text and "is not supported for" in text:
        return "OVERRIDE_UNKNOWN"
    if selecting and (error["error"] == "NotImplementedError" or "backends available" in text):
        return "NO_BACKEND"
    if selecting and error["error"] == "ValueError":
        return "OVERRIDE_UNSUPPORTED"
    if stage == "config" or not selecting:
        return "BARE_ASSERTION" if error["error"] == "AssertionError" and not text else "CONFIG"
    return "OTHER"


def engine_answer(found: Row) -> Answer:
    """What the engine decided, from `inside.decide`'s row."""
    if found.get("variables"):
        return Answer("error", found["variables"]["error"], "CONFIG")
    if found.get("verify"):
        return Answer("error", found["verify"]["error"], "METHOD")
    for stage in ("shape", "config", "select"):
        if found.get(stage):
            return Answer("error", found[stage]["error"], "SHAPE" if stage == "shape" else _kind(found[stage], stage))
    chosen = found["chosen"]
    if chosen["backend"] in ("NONE", "None") or (chosen["experts"] is None and chosen["backend"] is None):
        return Answer("error", "none", "SILENT_NONE")
    return Answer("choice", chosen["backend"], chosen["experts"])


def short(found: Row) -> Row:
    """What is compared of `inside.decide`'s row: the answer, the text of an error, the stages around it."""
    answer = engine_answer(found)
    row: Row = {"answer": [answer.outcome, answer.first, answer.second]}
    error = next(
        (found[stage] for stage in ("variables", "verify", "shape", "config", "select") if found.get(stage)), None
    )
    if error is not None and error["msg"]:
        row["text"] = re.sub(r"\d+", "#", error["msg"])[:80]
    row.update({name: found[name] for name in ("capability", "dtype", "eplb") if isinstance(found.get(name), bool)})
    if isinstance(found.get("sizes"), list):
        row["sizes"] = found["sizes"]
    row.update({name: found[name] is None for name in ("ranks", "create", "validate") if name in found})
    if (found.get("create") or {}).get("msg") in _NO_DEVICE:
        del row["create"]
    return row


#: Ways in which weights cannot be made where there is no device: no answer of the engine's.
_NO_DEVICE = ("Torch not compiled with CUDA enabled", "'intermediate_size_full'")


# ------------------------------------------------------------------------------------------------ moeq's side


def gpu_of(world: Row) -> Gpu:
    """The device of a world."""
    kind = world["kind"]
    if kind == "cuda":
        major, minor = world["cap"]
        return Gpu(f"sm{major}{minor}", "cuda", f"sm{major}{minor}", (major, minor))
    if kind == "rocm":
        return Gpu(world["gcn"], "rocm", world["gcn"])
    if kind == "xpu":
        return Gpu("xpu", "xpu", "xpu")
    arch = {"arm": "arm64", "power": "ppc64le"}.get(world["arch"])
    arch = arch or ("x86-zen" if world.get("zen") else "x86-amx" if world.get("amx") else "x86")
    return Gpu(arch, "cpu", arch)


def question_of(world: Row, case: Row) -> tuple[Row, MoeShape, Deployment]:
    """Config, layer and deployment of a case."""
    pcp = case.get("pcp", 1)
    ranks = case["tp"] * case["dp"] * pcp
    deployment = Deployment(
        gpu=gpu_of(world),
        tp=case["tp"],
        ep=ranks if case["ep"] else 1,
        dp=case["dp"],
        pcp=pcp,
        all2all=case["a2a"],
        lora=case["lora"],
        eplb=case["eplb"],
        redundant_experts=case.get("redundant", 0),
        dtype=case["dtype"],
        backend=case["override"],
        env=tuple(sorted(world["env"].items())),
        packages=tuple(sorted(world["flags"].items())),
        quantization=case["user_quant"],
    )
    shape = MoeShape(
        hidden_size=case["hidden"],
        intermediate_size=case["inter"],
        num_experts=case["experts"],
        top_k=case["topk"],
        activation=case["act"],
        gated=not case["act"].endswith("_no_mul"),
        has_bias=case["bias"],
        routing=case["routing"],
        router_dtype="fp32" if case["router_fp32"] else None,
        hash_routing=case["hash_routing"],
        swiglu_limit=case["swiglu_limit"],
        model_type=case["model_type"],
        expert_dtype=case.get("expert_dtype", ""),
    )
    return dict(case["qcfg"] or {}), shape, deployment


def moeq_outcome(policy: EnginePolicy, world: Row, case: Row) -> Outcome:
    """moeq's decision of a case, with the config read as users' configs are."""
    config, shape, deployment = question_of(world, case)
    return resolve(policy, checked(config), shape, deployment, prefix=case["prefix"])


def moeq_answer(outcome: Outcome) -> Answer:
    """moeq's decision in the words of the comparison."""
    for gate in outcome.gates:
        if gate.code in ("G0", "G1") and not gate.passed:
            return Answer("error", str(gate.error), "METHOD")
    if any(gate.code == "G5" and gate.error == "AssertionError" for gate in outcome.gates):
        return Answer("error", "AssertionError", "SHAPE")
    selection = outcome.selection
    if selection.error is not None:
        return Answer("error", selection.error.error, selection.error.kind)
    assert selection.selected is not None
    return Answer("choice", selection.reported or selection.selected.backend, selection.selected.experts)


# ------------------------------------------------------------------------------------------------ comparison


def stages(found: Row, outcome: Outcome) -> dict[str, bool]:
    """Stages around the choice, each True where both agree; only where the decision is the same.

    Args:
        found: the engine's answer, from `short`.
        outcome: moeq's.
    """
    failed = {gate.code for gate in outcome.gates if not gate.passed}
    dtype = any(gate.code == "G3" and not gate.passed and "is not supported for" in gate.text for gate in outcome.gates)
    out: dict[str, bool] = {}
    if "capability" in found:
        out["capability"] = found["capability"] == ("G2" not in failed)
        out["dtype"] = found["dtype"] == (not dtype)
    if "ranks" in found:
        out["ranks"] = found["ranks"] == ("G10" not in failed)
    chosen = outcome.selection.selected
    if chosen is None:
        return out
    if "sizes" in found and "Marlin" not in (chosen.experts or ""):  # Marlin pads when weights are converted
        sizes = sizes_for(outcome.case, chosen)
        out["sizes"] = found["sizes"] == [sizes.padded_hidden, sizes.padded_intermediate]
    for name, (stage, gate) in {
        "load balancing": ("eplb", "G6"),
        "weights": ("create", "G7"),
        "kernel": ("validate", "G9"),
    }.items():
        if stage in found:
            out[name] = found[stage] == (gate not in failed)
    return out


def cluster(family: str, theirs: Answer, mine: Answer, found: Row) -> str:
    """One line for differences of the same look: numbers do not count."""
    words = [f"engine {theirs.first} {theirs.second}", found.get("text", ""), f"moeq {mine.first} {mine.second}"]
    return " | ".join([family, *(word for word in words if word)])


# ------------------------------------------------------------------------------------------------ many cases


@dataclass
class Agreement:
    """How many cases of a family there were, and in how many both agreed.

    Attributes:
        cases: all of them.
        decision: the same backend and class, or a refusal by both.
        exact: errors are of the same type and kind as well.
    """

    cases: int = 0
    decision: int = 0
    exact: int = 0


@dataclass
class Comparison:
    """What came out of many cases.

    Attributes:
        families: agreement by family.
        stages: stage -> cases in which both agree, and in all.
        clusters: what differs, by its look -> case numbers.
    """

    families: dict[str, Agreement] = field(default_factory=dict)
    stages: dict[str, list[int]] = field(default_factory=dict)
    clusters: dict[str, list[int]] = field(default_factory=dict)

    def add(self, policy: EnginePolicy, world: Row, case: Row, found: Row) -> None:
        """Compare one case; `found` is the engine's answer, from `short`."""
        theirs, outcome = Answer(*found["answer"]), moeq_outcome(policy, world, case)
        mine, row = moeq_answer(outcome), self.families.setdefault(case["family"], Agreement())
        row.cases += 1
        row.decision += theirs.agrees(mine)
        row.exact += theirs.equals(mine)
        if not theirs.equals(mine):
            self._note(cluster(case["family"], theirs, mine, found), case)
        for name, good in stages(found, outcome).items() if theirs.agrees(mine) else ():
            counts = self.stages.setdefault(name, [0, 0])
            counts[0] += good
            counts[1] += 1
            if not good:
                self._note(f"{case['family']} | stage: {name} | {theirs.first} {theirs.second}", case)

    def _note(self, name: str, case: Row) -> None:
        self.clusters.setdefault(name, []).append(case["id"])

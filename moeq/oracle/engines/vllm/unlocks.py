"""Unlocks of backends that do not run as asked: tried changes with which the engine runs them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import default_dtype, parse_gpu
from moeq.oracle.engines.vllm.counterfactuals import Admits, Again, Change, admit_all, changes, equipped
from moeq.oracle.engines.vllm.outcome import Outcome
from moeq.oracle.engines.vllm.policy import Family
from moeq.oracle.engines.vllm.select import ORDER_CODES, on_device
from moeq.oracle.records import CandidateReport

#: Codes of rules about the model itself, which none of `changes` alters, and of the rule about the activation format.
_LASTING_CODES = (
    *("P02_NOT_GATED", "P03_ACTIVATION", "P06_HASH_ROUTING", "P08_ROUTING", "P10_HIDDEN", "L02_EXPERTS", "L05_TOP_K"),
    *("L07_LIMIT", "P11_FORMAT"),
)
#: Backend that needs an unlock -> value of the backend option that names it, or None.
Waiting = Mapping[str, str | None]


@dataclass(frozen=True)
class Trial:
    """The question without a requested backend, and functions that decide and admit changed questions."""

    outcome: Outcome
    again: Again  #: function that decides a changed question
    admits: Admits = admit_all  #: function that returns False for deployments that must not be suggested

    @property
    def deployment(self) -> Deployment:
        """The deployment without a requested backend."""
        return replace(self.outcome.case.deployment, backend="auto")

    @property
    def unchanged(self) -> Change:
        """The question itself."""
        return Change("", self.outcome.config, self.outcome.case.shape, self.deployment)

    @property
    def family(self) -> Family:
        """Family of the question's backends."""
        return self.outcome.case.policy.families[self.outcome.case.method.family]

    def unlocks(self, backend: str, flag: str | None, change: Change) -> str | None:
        """Return the text of a change if it makes the engine run a backend of the family; None if it does not.

        The text names the backend option, too, where the backend has to be requested by name. Every answer is a whole
        decision: config, selection and every gate.
        """
        if not self.admits(change.deployment):
            return None
        changed = self.again(change.config, change.shape, change.deployment)
        if self._is_run(changed, backend):
            return change.text
        row = next((row for row in changed.selection.candidates if row.backend == backend), None)
        if flag is None or row is None or changed.refused or any(r.code not in ORDER_CODES for r in row.reasons):
            return None
        named = self.again(change.config, change.shape, replace(change.deployment, backend=flag))
        if not self._is_run(named, backend):
            return None
        option = "" if row.supported else f"{self.outcome.case.policy.backend_flag} {flag}"
        return " and ".join(filter(None, (change.text, option)))

    def _is_run(self, outcome: Outcome, backend: str) -> bool:
        runs, family = outcome.runs, outcome.case.method.family
        return runs is not None and runs.partition("/")[0] == backend and family == self.family.name


def with_unlocks(trial: Trial) -> tuple[CandidateReport, ...]:
    """Return the candidates; unsupported ones have an unlock where one was found.

    An unlock is the nearest tried change with which the engine runs the backend, by itself or requested by name.
    """
    outcome = trial.outcome
    here, elsewhere = {}, {}
    for row in outcome.selection.candidates:
        if row.supported:
            continue
        if not on_device(outcome.case, trial.family.backends[row.backend]):
            elsewhere[row.backend] = row.flag
        elif not any(reason.code in _LASTING_CODES for reason in row.reasons) or outcome.case.format == "batched":
            here[row.backend] = row.flag
    found = dict(_here(trial, here)) | dict(_elsewhere(trial, elsewhere))
    return tuple(replace(row, unlock=found.get(row.backend)) for row in outcome.selection.candidates)


def running(trial: Trial) -> list[CandidateReport]:
    """List the candidates that the engine runs without a change, by itself or when requested by name."""
    rows = trial.outcome.selection.candidates
    return [row for row in rows if row.supported and trial.unlocks(row.backend, row.flag, trial.unchanged) is not None]


def _here(trial: Trial, waiting: Waiting) -> Iterator[tuple[str, str]]:
    """Yield backend and unlock for the backends that one change makes the engine run on this device."""
    left = dict(waiting)
    case = replace(trial.outcome.case, deployment=trial.deployment)
    for change in itertools.chain([trial.unchanged], changes(replace(trial.outcome, case=case))):
        if not left:
            return
        for backend, flag in list(left.items()):
            text = trial.unlocks(backend, flag, change)
            if text:
                del left[backend]
                yield backend, text


def _elsewhere(trial: Trial, waiting: Waiting) -> Iterator[tuple[str, str]]:
    """Yield backend and unlock for backends of other devices: the kinds of device that need the shortest change."""
    policy, config = trial.outcome.case.policy, trial.outcome.config
    found: dict[str, dict[str, list[str]]] = {}
    for kind in policy.devices:
        where = on_kind(trial.deployment, kind)
        case = replace(trial.outcome.case, deployment=where)
        for backend, flag in waiting.items():
            variants = [
                variant
                for name in trial.family.backends[backend].classes
                for variant in policy.classes[name].variants.get(kind, ())
            ]
            for words, equipment in (("", where), *equipped(case, where, variants)) if variants else ():
                text = trial.unlocks(backend, flag, Change(words, config, trial.outcome.case.shape, equipment))
                if text is not None:
                    found.setdefault(backend, {}).setdefault(text, []).append(kind)
                    break
    for backend, by_text in found.items():
        text = min(by_text, key=len)
        yield backend, " and ".join(filter(None, (f"a device of kind {', '.join(by_text[text])}", text)))


def on_kind(deployment: Deployment, kind: str) -> Deployment:
    """Return the deployment on another kind of device; a default dtype becomes the new device's default."""
    gpu = parse_gpu(kind)
    default = deployment.dtype == default_dtype(deployment.gpu)
    return replace(deployment, gpu=gpu, dtype=default_dtype(gpu) if default else deployment.dtype)

"""moeq's answers beside SGLang's own: counts, and what differs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from moeq.oracle.engines.sglang.decision import decide_sglang
from moeq.oracle.engines.sglang.layer import SglangLayer, SglangRefusal

Row = dict[str, Any]


def layer_of(case: Row) -> SglangLayer:
    """The layer and deployment of a case."""
    major, minor = case["capability"]
    names = ("hidden", "inter", "experts", "tp", "ep", "dtype", "act", "runner", "quantization")
    return SglangLayer(capability=(major, minor), **{name: case[name] for name in names})


def ours(case: Row) -> Row:
    """moeq's answer in the words of the engine's."""
    try:
        made = decide_sglang(case["config"], layer_of(case))
    except SglangRefusal as refused:
        return {"stage": refused.stage, "error": refused.error}
    return {"name": made.name, "class": made.method, "runner": made.runner}


def theirs(row: Row) -> Row:
    """The engine's answer, cut to what is compared."""
    if "error" in row:
        return {"stage": row["stage"], "error": row["error"]}
    return {"name": row["name"], "class": row["scheme"] or row["method"], "runner": row["runner"]}


@dataclass
class Counts:
    """What came out: cases, the same decision, the same error as well, and what differs by its look."""

    cases: int = 0
    decision: int = 0
    exact: int = 0
    families: dict[str, list[int]] = field(default_factory=dict)
    differences: Counter[str] = field(default_factory=Counter)

    def add(self, case: Row, row: Row) -> None:
        """Compare one case."""
        mine, engine = ours(case), theirs(row)
        both = "error" in mine and "error" in engine
        self.cases += 1
        self.decision += both or mine == engine
        self.exact += mine == engine
        counts = self.families.setdefault(case["config"]["quant_method"], [0, 0, 0])
        for index, good in enumerate((True, both or mine == engine, mine == engine)):
            counts[index] += good
        if mine != engine:
            self.differences[f"engine {engine} | moeq {mine}"] += 1

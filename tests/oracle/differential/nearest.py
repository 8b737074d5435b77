"""Puts what moeq suggests after a refusal to the engine itself: the changed case has to get a yes.

    python tests/oracle/differential/nearest.py ask VERSION --rows ROWS.jsonl --out QUESTIONS.jsonl
    python tests/oracle/differential/record.py SITE --questions QUESTIONS.jsonl --out ANSWERS.jsonl
    python tests/oracle/differential/nearest.py count VERSION --rows ANSWERS.jsonl

ROWS is what `record.py --out` wrote. The share is kept in `tests/data/oracle/agreement.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from oracle.differential import agree
from oracle.differential.compare import Row, engine_answer, moeq_outcome

from moeq.deploy.deployment import Deployment
from moeq.oracle.engines.vllm.case import DEFAULT_ALL2ALL
from moeq.oracle.engines.vllm.counterfactuals import Change, nearest_yes
from moeq.oracle.engines.vllm.outcome import Outcome, resolve
from moeq.oracle.engines.vllm.policy import EnginePolicy, load_policy
from moeq.oracle.records import MoeShape


def change_of(policy: EnginePolicy, world: Row, case: Row) -> Change | None:
    """What moeq suggests where it refuses a case."""
    outcome = moeq_outcome(policy, world, case)
    if outcome.runs is not None:
        return None

    def again(config: Mapping[str, Any], layer: MoeShape, where: Deployment) -> Outcome:
        return resolve(policy, config, layer, where, prefix=case["prefix"], brief=True)

    return nearest_yes(outcome, again)


def changed(world: Row, case: Row, change: Change) -> tuple[Row, Row]:
    """World and case with the change."""
    d = change.deployment
    return (
        {**world, "flags": dict(d.packages), "env": dict(d.env)},
        {
            **case, "tp": d.tp, "dp": d.dp, "pcp": d.pcp,
            "ep": d.ep > 1, "a2a": d.all2all or DEFAULT_ALL2ALL, "lora": d.lora,
            "eplb": d.eplb, "redundant": d.redundant_experts,
            "dtype": d.dtype, "override": d.backend, "user_quant": d.quantization,
            "qcfg": dict(change.config) or None, "bias": change.shape.has_bias,
            "router_fp32": change.shape.router_dtype == "fp32", "change": change.text,
        },
    )  # fmt: skip


def questions(version: str, rows: Path) -> Iterator[Row]:
    """The changed cases, for every case that the engine refuses; those without a suggestion have no `case`."""
    policy = load_policy(f"vllm@{version}")
    for line in rows.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if engine_answer(row["engine"]).outcome == "error":
            change = change_of(policy, row["world"], row["case"])
            world, case = changed(row["world"], row["case"], change) if change else (row["world"], None)
            yield {"world": world, "case": case}


def main() -> None:
    """Ask or count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ask", "count"))
    parser.add_argument("version")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = agree.load()
    counts: dict[str, int] = results[options.version].setdefault("nearest", {})
    if options.what == "ask":
        asked = list(questions(options.version, options.rows))
        kept = [row for row in asked if row["case"]]
        options.out.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        counts.update(refused=len(asked), suggested=len(kept), yes=0)
    else:
        refusals: Counter[str] = Counter()
        for line in options.rows.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if engine_answer(row["engine"]).outcome == "choice":
                refusals["yes"] += 1
            else:
                answer = engine_answer(row["engine"])
                refusals[f"{row['case']['change']}: {answer.first} {answer.second} ({row['case']['id']})"] += 1
        counts["yes"] = refusals.pop("yes", 0)
        for name, count in refusals.most_common():
            print(count, name)
    print(counts)
    agree.save(results)


if __name__ == "__main__":
    main()

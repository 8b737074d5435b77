"""Compares what the engine did with checkpoints (see `engine.py`) with moeq's verdicts on the same files.

python tests/oracle/loads/compare.py --seed S --rows FILE.jsonl [--engine vllm@X] [--show KIND] [--case N] [--save]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from oracle.loads import cases, files, samples

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.pipeline.plan.decide import answer
from moeq.pipeline.plan.options import Question

Row = dict[str, Any]
ENGINE = "vllm@0.33.0"

#: What the engine says where only the pretended device is in the way: weights were loaded by then.
_NEEDS_GPU = re.compile(
    r"_OpNamespace|_C::|No module named|not compiled with CUDA|CUDA|accelerator device|must be a cuda device|"
    r"NVIDIA driver|Triton|triton|get_arch|'NoneType' and 'int'|not implemented for|nvcc|DeepGEMM backend"
)
#: Parameters that no stored tensor has to fill: the method ignores or replaces them.
_HARMLESS = re.compile(r"_(bias|g_idx|qzeros|weight_shape|input_\w+|g_idx_sort_indices|weight_zero_point)$")

#: Parts of single experts whose numbers are lost where no loader takes them.
_MEANT = {"bias", "weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_global_scale", "qweight"}
_MEANT |= {"weight_scale_2", "weight_zero_point", "scales", "scale", "act_scale"}


@dataclass(frozen=True)
class Loaded:
    """Whether the engine loads a checkpoint, and why not.

    Attributes:
        ok: every number that it computes with comes out of the file.
        raised: the engine stops; otherwise it would serve what memory held.
        why: the error or the parameters.
    """

    ok: bool
    raised: bool
    why: str


def loaded(engine: Row) -> Loaded:
    """Read an outcome of `engine.outcome`."""
    stage = engine.get("stage")
    online = any("Online" in method for method in engine.get("methods", ()))  # weights are quantised while they load
    if stage == "process" and "all2all" in engine["at"]:  # processes of other ranks, which are not there
        stage = None
    late = stage == "process" or (stage == "load" and online)
    if stage and not (late and _NEEDS_GPU.search(engine["msg"])):
        return Loaded(False, True, f"{stage}: {engine['error']}: {engine['msg']} ({engine['at']})")
    unfilled = sorted(name for name in engine.get("unfilled", {}) if not _HARMLESS.search(name))
    if unfilled:
        return Loaded(False, False, f"unfilled: {', '.join(unfilled)}")
    for kind in ("linears", "lost"):
        if engine.get(kind):
            return Loaded(False, False, f"{kind}: {', '.join(engine[kind][:4])}")
    if engine.get("bad_scales"):
        return Loaded(False, False, f"scales: {', '.join(engine['bad_scales'])}")
    if engine.get("stale"):
        return Loaded(False, False, f"stale copies: {', '.join(engine['stale'][:3])}")
    unread = sorted({*engine.get("left", ())} & _MEANT)
    if unread:
        return Loaded(False, False, f"unread: {', '.join(unread)}")
    return Loaded(True, False, "")


def verdict(case: Row, folder: Path, engine: str = ENGINE) -> tuple[bool, str]:
    """Whether moeq says that the engine runs the checkpoint, and its reason or the backend."""
    given = case["deployment"]
    deployment = Deployment(
        gpu=parse_gpu(given["gpu"]), engine=engine, tp=given["tp"], dp=given["dp"],
        ep=given["tp"] * given["dp"] if given["ep"] else 1, backend=given["backend"],
        quantization=given["quantization"],
    )  # fmt: skip
    try:
        checkpoint = moeq.open(folder)
        checkpoint.read_activation_scales()
        found = answer(checkpoint, Question(deployment), brief=True)
    except MoeqError as error:
        return False, f"{error.code}: {error.message}"
    refused = [part.verdict for part in found.parts if not part.verdict.ok]
    if refused:
        return False, f"{refused[0].method}: {refused[0].refusal}"
    return True, f"{found.verdict.method} {found.verdict.selected and found.verdict.selected.backend}"


def kind_of(engine: Loaded, ok: bool) -> str:
    """`yes/yes`, `no/no`, `yes-but-raises`, `yes-but-unfilled` or `no-but-loads`: moeq's word first."""
    if ok:
        return "yes/yes" if engine.ok else "yes-but-raises" if engine.raised else "yes-but-unfilled"
    return "no-but-loads" if engine.ok else "no/no"


def main() -> None:
    """Count, and show disagreements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--engine", default=ENGINE)
    parser.add_argument("--show", default="")
    parser.add_argument("--case", type=int)
    parser.add_argument("--save", action="store_true", help="keep the rows as the sample that the tests compare")
    args = parser.parse_args()
    if args.save:
        samples.save(args.seed, [json.loads(line) for line in args.rows.read_text(encoding="utf-8").splitlines()])
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        for row in map(json.loads, args.rows.read_text(encoding="utf-8").splitlines()):
            if args.case not in (None, row["id"]):
                continue
            case = cases.case(args.seed, row["id"])
            ok, why = verdict(case, files.write(Path(scratch, str(row["id"])), case), args.engine)
            theirs = loaded(row["engine"])
            kind = kind_of(theirs, ok)
            counts[case["family"], kind] += 1
            if args.show and re.search(args.show, kind):
                name = case["config"]["model_type"]
                print(f"{kind} #{row['id']} {case['family']} {case['twist']} {name} {case['deployment']}")
                print(
                    f"    engine: {theirs.why[:400]!r} {row['engine'].get('methods')} left {row['engine'].get('left')}"
                )
                print(f"    moeq: {why[:400]}")
    kinds = ("yes/yes", "no/no", "yes-but-raises", "yes-but-unfilled", "no-but-loads")
    print(f"{'family':16}", *(f"{kind:>17}" for kind in kinds))
    for family in (*dict.fromkeys(family for family, _ in counts), ""):
        line = [sum(n for (one, what), n in counts.items() if what == kind and family in ("", one)) for kind in kinds]
        print(f"{family or 'all':16}", *(f"{number:17}" for number in line))


if __name__ == "__main__":
    main()

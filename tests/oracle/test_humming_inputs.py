"""The activations that Humming's kernels run, for every kind of weights, every kind asked for, and every generation.

PYTHONPATH=.:kernels:tests:tools python tests/oracle/test_humming_inputs.py    (writes what runs now)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from oracle.asking import POLICY, gpu
from oracle.examples import SHAPE

from moeq.oracle.engines.vllm.case import Case, Method
from moeq.oracle.engines.vllm.configs.humming import HummingInputs, HummingWeights, runtime_inputs
from moeq.oracle.engines.vllm.configs.question import ConfigRefusal

PATH = Path(__file__).parents[1] / "data" / "oracle" / "humming_inputs.txt"
GPUS = ("V100", "T4", "A100", "L40S", "H100", "B200", "RTX 5090", "MI300X")

WEIGHTS = (
    *(
        HummingWeights("uint", bits, group, "", zeros)
        for bits, group, zeros in product((3, 4, 5, 8), (0, 8, 16, 32, 64, 128), (False, True))
    ),
    *(HummingWeights("fp8", 8, group, "") for group in (0, 128)),
    *(HummingWeights("fp4", 4, group, "", powers=powers) for group, powers in ((16, False), (32, False), (32, True))),
)
ASKED = (None, *(HummingInputs(kind, group) for kind, group in product(("fp8", "fp4", "int8", "int4"), (0, 32, 128))))


def ran(name: str, dtype: str, weights: HummingWeights, asked: HummingInputs | None) -> str:
    case = Case(POLICY, gpu(name, dtype=dtype), SHAPE, Method("", "wna16", "humming", ""))
    try:
        found = runtime_inputs(case, weights, asked)
    except ConfigRefusal:
        return "no"
    return "16" if found is None else f"{found.kind}/{found.group}{'p' if found.powers else ''}"


def lines() -> Iterator[str]:
    for asked, weights in product(ASKED, WEIGHTS):
        marks = f"{'z' if weights.zeros else ''}{'p' if weights.powers else ''}"
        kind = f"{weights.kind}{weights.bits if weights.kind == 'uint' else ''}{marks}/{weights.group}"
        words = "none" if asked is None else f"{asked.kind}/{asked.group}"
        # Half precision differs on the oldest GPUs alone.
        cells = [ran(name, "fp16" if name in ("V100", "T4") else "bf16", weights, asked) for name in GPUS]
        yield f"{words} {kind}: {' '.join(cells)} {ran('T4', 'bf16', weights, asked)}"


def test_activations_are_as_they_were() -> None:
    assert list(lines()) == PATH.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    PATH.write_text("".join(f"{line}\n" for line in lines()), encoding="utf-8")

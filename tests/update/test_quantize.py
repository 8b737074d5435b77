"""Quantisers: bit-equal to compressed-tensors' and ModelOpt's own, by stored digests and by the packages themselves.

`python tests/update/test_quantize.py` writes the digests, from the packages.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode
from update import quantizers

from moeq.digest import logical_digest
from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.model.tensor_bytes import same_matrix
from moeq.update.quantize import quantize, under_scales

GOLDEN = Path(__file__).parents[1] / "data" / "quantizers.json"
N, K, SEEDS = 136, 256, range(3)
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


@dataclass(frozen=True)
class Kind:
    """A kind of quantised matrix: library, element type, group size (0: channel), rows of a block, scales, symmetry."""

    rule: str
    element: str
    group: int
    scale: str
    rows: int = 1
    symmetric: bool = True

    @property
    def spec(self) -> MatrixSpec:
        return MatrixSpec("down", N, K, self.element, self.group or K, self.scale, self.symmetric)

    @property
    def name(self) -> str:
        zeros = "" if self.symmetric else " zeros"
        return f"{self.rule} {self.element} g{self.group} rows {self.rows} {self.scale}{zeros}"

    def ours(self, weight: torch.Tensor) -> QuantizedMatrix:
        return quantize(weight, self.spec, self.rule, rows=self.rows)  # type: ignore[arg-type]

    def theirs(self, weight: torch.Tensor) -> QuantizedMatrix:
        library: Callable[..., QuantizedMatrix] = getattr(quantizers, self.rule.replace("-", "_"))
        return library(weight, self.spec, self.rows)


CT, MO = "compressed-tensors", "modelopt"
INTEGERS = [(bits, group, zeros) for bits in ("int4", "int8") for group in (0, 32, 128) for zeros in (False, True)]
KINDS = [
    *(Kind(CT, e, g, scale, symmetric=not z) for e, g, z in INTEGERS for scale in ("bf16", "f16")),
    *(
        Kind(CT, "e4m3", group, scale, rows)
        for group, rows in ((0, 1), (128, 128), (0, -1))
        for scale in ("bf16", "f32")
    ),
    Kind(CT, "e2m1", 32, "e8m0"),
    Kind(CT, "e4m3", 32, "e8m0"),
    Kind(CT, "e2m1", 16, "e4m3"),
    Kind(MO, "e2m1", 32, "e8m0"),
    Kind(MO, "e2m1", 16, "e4m3"),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_quantisers_give_the_bits_of_the_packages(kind: Kind) -> None:
    golden = json.loads(GOLDEN.read_text())
    for dtype, torch_dtype in DTYPES.items():
        for seed in SEEDS:
            found = logical_digest(kind.ours(quantizers.weights(seed, N, K, torch_dtype)))[:16]
            assert found == golden[kind.name][dtype][seed], (dtype, seed)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_quantisers_equal_the_installed_package(kind: Kind) -> None:
    package = "modelopt" if kind.rule == MO else "compressed_tensors"
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    for dtype in DTYPES.values():
        for seed in range(100, 108):
            weight = quantizers.weights(seed, N, K, dtype)
            assert same_matrix(kind.ours(weight), kind.theirs(weight)), (dtype, seed)


class ReciprocalDivision(TorchFunctionMode):
    """Division by a Python number as torch does it on a GPU: multiplication by the rounded reciprocal."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.Tensor.div and isinstance(args[1], (int, float)):
            return func(args[0], 1.0).mul(float(torch.tensor(1.0) / torch.tensor(float(args[1]))))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_gpu_s_division_gives_the_same_matrix(kind: Kind) -> None:
    for dtype in DTYPES.values():
        weight = quantizers.weights(11, N, K, dtype)
        wanted = kind.ours(weight)
        with ReciprocalDivision():
            assert same_matrix(kind.ours(weight), wanted), dtype


def test_codes_under_the_scales_that_made_them_are_the_same() -> None:
    for kind in KINDS:
        weight = quantizers.weights(7, N, K, torch.float32)
        found = kind.ours(weight)
        again = under_scales(weight, found)
        assert (again.codes != found.codes).float().mean() < 0.02, kind.name  # ties, and the sign of zeros


def test_weights_beyond_the_scales_get_the_outermost_codes() -> None:
    largest = {"int4": (0, 15), "int8": (0, 255), "e2m1": (15, 7), "e4m3": (0xFE, 0x7E)}
    for kind in KINDS:
        weight = quantizers.weights(7, N, K, torch.float32)
        beyond = under_scales(weight.sign() * 1e6, kind.ours(weight)).codes
        low, high = largest[kind.element]
        assert bool((beyond[weight < 0] == low).all() and (beyond[weight > 0] == high).all()), kind.name


class Divisions(TorchFunctionMode):
    """Tensors that are divided by Python numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.by: list[object] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function in (torch.Tensor.__truediv__, torch.Tensor.div, torch.div) and isinstance(args[1], int | float):
            self.by.append(args[1])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_nothing_is_divided_by_a_python_number(kind: Kind) -> None:
    """A GPU would multiply by its rounded reciprocal, and round some numbers otherwise than a CPU."""
    weight = quantizers.weights(0, N, K, torch.bfloat16)
    with Divisions() as divisions:
        kind.ours(weight)
    assert divisions.by == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    weight = torch.zeros(N, K, dtype=torch.bfloat16)
    weight[3, 5] = value
    with pytest.raises(MoeqError, match=r"\[3, 5\]") as caught:
        KINDS[0].ours(weight)
    assert caught.value.code == "source.bad-data"


def test_unknown_rules_and_formats_without_one_are_refused() -> None:
    weight = torch.zeros(N, K)
    for kind in (Kind("awq", "int4", 32, "f16"), Kind(CT, "e5m2", 0, "f32"), Kind(CT, "int4", 96, "f16")):
        with pytest.raises(MoeqError) as caught:
            kind.ours(weight)
        assert caught.value.code == "usage.quantizer"


def main() -> None:
    found = {
        kind.name: {
            name: [logical_digest(kind.theirs(quantizers.weights(seed, N, K, dtype)))[:16] for seed in SEEDS]
            for name, dtype in DTYPES.items()
        }
        for kind in KINDS
    }
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

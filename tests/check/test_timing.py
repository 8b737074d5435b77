"""Times of a layer, on a device whose clock moves by numbers of this file."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeq.check import timing
from moeq.check.inputs import Inputs
from moeq.check.results import Run
from moeq.reference.moe import Activation


class Device:
    """A stream whose calls take 1 s until they are warm, then 10, 20, ... microseconds; `calls` counts them."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, 0
        self.flush = torch.ones(4)

    def run(
        self, packed: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, activation: Activation
    ) -> None:
        assert not self.flush.any(), "the cache is written over before a call"
        assert (x.shape, weights.shape, ids.tolist()) == ((3, 8), (3, 2), [[0, 5], [5, 0], [5, 5]])
        self.flush.fill_(1)
        self.calls += 1
        self.now += 1e3 if self.calls <= 3 else 0.01 * (self.calls - 3)  # milliseconds

    def event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        device = self

        class Event:
            at, done = 0.0, False

            def record(self) -> None:
                self.at = device.now

            def synchronize(self) -> None:
                self.done = True

            def elapsed_time(self, other: Event) -> float:
                assert other.done, "the driver refuses events that have not happened"
                return other.at - self.at

        return Event()


MATRIX = SimpleNamespace(
    n=12, k=8, weight=torch.zeros(4, 48, dtype=torch.uint8), scale=torch.zeros(4, 12, dtype=torch.bfloat16),
    zero=None, bias=torch.zeros(4, 12), permutation=None, group_index=torch.zeros(4, 8, dtype=torch.int32),
)  # fmt: skip
DOWN = SimpleNamespace(**vars(MATRIX) | {"n": 8, "k": 6, "bias": None, "group_index": None})


@pytest.mark.parametrize(
    ("name", "floor"),
    # 688 bytes over the bandwidth of the data sheets; the 1,728 operations take less.
    [("NVIDIA H100 PCIe", 688 / 2.0e12 * 1e6), ("NVIDIA H100 80GB HBM3", 688 / 3.35e12 * 1e6), ("a new one", None)],
)
def test_the_median_of_warm_calls(name: str, floor: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(timing, "fused_experts", device.run)
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: device.flush)
    part: Any = SimpleNamespace(
        experts=SimpleNamespace(w13=MATRIX, w2=DOWN, intermediate_size=6), local_ids=lambda ids: ids - 1
    )
    ids = torch.tensor([[9, 9], [1, 6], [6, 1], [6, 6]])
    runs = ((Run(1, "same"), slice(0, 1)), (Run(3), slice(1, 4)))
    inputs = Inputs(torch.zeros(4, 8), torch.ones(4, 2), ids, runs)
    assert timing.time_runs([part, part], inputs, Activation(), 7) == ()
    (found,) = timing.time_runs([part], inputs, Activation(), 7)
    assert (found.layer, found.run, device.calls) == (7, "3 tokens", 23)
    assert found.microseconds == pytest.approx(105.0), "the median of 10, 20, ... 200"
    # 48 codes, 12 scales of two bytes, 12 biases and 8 indices of four; the other matrix has codes and scales alone.
    assert (timing.expert_bytes(MATRIX), timing.expert_bytes(DOWN)) == (152, 72)  # type: ignore[arg-type]
    assert found.weight_bytes == 2 * (152 + 72)
    # Three tokens of 8 features are read and written, six rows of 6 are written and read, two bytes each.
    assert found.total_bytes == 448 + 2 * 2 * 24 + 2 * 2 * 6 * 6
    assert found.flops == 2 * 6 * (12 * 8 + 8 * 6)
    assert found.floor_microseconds == (None if floor is None else pytest.approx(floor))


def test_a_longer_name_is_looked_for_first() -> None:
    names = list(timing.PEAKS)
    assert all(names.index(long) < names.index(short) for long in names for short in names if short in long != short)


@pytest.mark.parametrize(
    ("device", "peaks"),
    [
        ("NVIDIA B200", (8000, 2250)),
        ("NVIDIA H200", (4800, 989)),
        ("NVIDIA H100 PCIe", (2000, 756)),
        ("NVIDIA H100 80GB HBM3", (3350, 989)),
        ("NVIDIA A100-SXM4-80GB", (2039, 312)),
        ("NVIDIA A100-PCIE-40GB", (1555, 312)),
        ("NVIDIA L40S", (864, 362)),
        ("NVIDIA GeForce RTX 4090", (1008, 165)),
        ("AMD Instinct MI300X", (5300, 1307)),
        ("AMD Instinct MI355X", (8000, 2500)),
    ],
)
def test_peaks_of_the_data_sheets(device: str, peaks: tuple[int, int]) -> None:
    """GB/s of memory, and TFLOP/s of dense 16-bit arithmetic, under the name that the driver gives."""
    bandwidth, flops = next(found for name, found in timing.PEAKS.items() if name in device)
    assert (round(bandwidth / 1e9), round(flops / 1e12)) == peaks

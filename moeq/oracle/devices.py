"""Conditions on GPUs as the data files write them, and the device of an engine's tables that stands for a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from moeq.deploy.deployment import Gpu
from moeq.errors import MoeqError


@dataclass(frozen=True)
class DeviceTerm:
    """One alternative of a device condition, such as `cuda 9.0..12.x`. Platform first, always.

    A bare capability comparison would be meaningless on ROCm, where gfx90a reads as (9, 0) like a Hopper.
    """

    text: str
    platform: str
    low: tuple[int, int] | None = None
    high: tuple[int, int] | None = None
    arch: str | None = None

    def admits(self, gpu: Gpu) -> bool:
        """Whether the device is one of these."""
        if gpu.platform != self.platform:
            return False
        if self.arch:
            return gpu.arch == self.arch
        capability = gpu.capability or (0, 0)
        return (self.low is None or capability >= self.low) and (self.high is None or capability <= self.high)


@cache
def device_term(text: str) -> DeviceTerm:
    """Parse a device condition. Raises MoeqError `bug.policy` for one that cannot be read."""
    platform, _, detail = text.partition(" ")
    if not detail:
        return DeviceTerm(text, platform)
    if platform != "cuda":
        return DeviceTerm(text, platform, arch=detail)
    low, _, high = detail.partition("..")
    try:
        if low.endswith("+"):
            return DeviceTerm(text, platform, _version(low[:-1], 0), None)
        return DeviceTerm(text, platform, _version(low, 0), _version(high or low, 99))
    except ValueError:
        raise MoeqError("bug.policy", f"device condition '{text}' cannot be read") from None


def _version(text: str, minor: int) -> tuple[int, int]:
    """`9.0` is (9, 0); `10.x` is (10, minor)."""
    major, _, rest = text.partition(".")
    return (int(major), minor if rest == "x" else int(rest))


def nearest_device(gpu: Gpu, known: Mapping[str, Any]) -> str | None:
    """The device of an engine's tables that stands for a GPU: itself, else the newest older one of its kind, or
    None."""
    if gpu.arch in known:
        return gpu.arch
    if gpu.platform == "cuda" and gpu.capability is not None:
        older = [name for name in known if name.startswith("sm") and _capability(name) <= gpu.capability]
        return max(older, key=_capability, default=None)
    if gpu.platform == "rocm":
        # One generation differs in its last digit: gfx1200 and gfx1201, but not gfx906 and gfx90a.
        alike = [name for name in known if name[:-1] == gpu.arch[:-1] and (name + gpu.arch[-1:])[-2:].isdigit()]
        return max(alike, default=None)
    return None


def _capability(arch: str) -> tuple[int, int]:
    return int(arch[2:-1]), int(arch[-1])

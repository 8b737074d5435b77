"""Device conditions in data files, and the device of an engine's tables that represents a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from moeq.deploy.deployment import Gpu
from moeq.errors import MoeqError


@dataclass(frozen=True)
class DeviceTerm:
    """One device condition, such as `cuda 9.0..12.x`.

    The platform is always compared first: on ROCm, gfx90a has capability (9, 0) like a Hopper GPU.
    """

    text: str
    platform: str
    low: tuple[int, int] | None = None  #: least compute capability, or None
    high: tuple[int, int] | None = None  #: largest compute capability, or None
    arch: str | None = None  #: the only architecture that is admitted, or None

    def admits(self, gpu: Gpu) -> bool:
        """Tell whether a GPU meets the condition."""
        if gpu.platform != self.platform:
            return False
        if self.arch:
            return gpu.arch == self.arch
        capability = gpu.capability or (0, 0)
        return (self.low is None or capability >= self.low) and (self.high is None or capability <= self.high)


@cache
def device_term(text: str) -> DeviceTerm:
    """Parse a device condition. Raise MoeqError `bug.policy` if it cannot be read."""
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
    """Parse `9.0` as (9, 0) and `10.x` as (10, minor)."""
    major, _, rest = text.partition(".")
    return (int(major), minor if rest == "x" else int(rest))


def nearest_device(gpu: Gpu, known: Mapping[str, Any]) -> str | None:
    """Return the device of an engine's tables that represents a GPU, or None.

    Its own architecture is preferred, then the newest older one of its platform (for ROCm, of its generation).
    """
    if gpu.arch in known:
        return gpu.arch
    if gpu.platform == "cuda" and gpu.capability is not None:
        older = [name for name in known if name.startswith("sm") and _capability(name) <= gpu.capability]
        return max(older, key=_capability, default=None)
    if gpu.platform == "rocm":
        # Names of one generation differ in the last digit: gfx1200 and gfx1201, but not gfx906 and gfx90a.
        alike = [name for name in known if name[:-1] == gpu.arch[:-1] and (name + gpu.arch[-1:])[-2:].isdigit()]
        return max(alike, default=None)
    return None


def _capability(arch: str) -> tuple[int, int]:
    return int(arch[2:-1]), int(arch[-1])

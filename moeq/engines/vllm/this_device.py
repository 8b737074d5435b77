"""Device of this process, in the terms of deployments."""

from __future__ import annotations

from vllm.platforms import current_platform

from moeq.deploy.deployment import Gpu
from moeq.deploy.detect import detect_cpu, detect_gpu
from moeq.deploy.gpus import find_by_device_name, parse_gpu


def this_device() -> Gpu:
    """Return the device that the engine runs on.

    CUDA devices are named by the engine's platform, which asks the driver without taking memory on the device.

    Raises MoeqError `usage.unknown-gpu`.
    """
    if current_platform.is_cuda():
        capability = current_platform.get_device_capability()
        named = find_by_device_name(current_platform.get_device_name())
        if named is not None and named.capability == (capability.major, capability.minor):
            return named
        return parse_gpu(f"sm{capability.major}{capability.minor}")
    if current_platform.is_cpu():
        return detect_cpu()
    return detect_gpu() or parse_gpu("XPU")

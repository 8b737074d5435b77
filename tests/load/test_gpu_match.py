"""Loaders compare the GPU with the one that a checkpoint was converted for, unless they are told not to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import moeq
from moeq.errors import MoeqError
from moeq.load import torch_loader
from moeq.load.torch_loader import check_device, device_arch, open_converted, require_arch
from moeq.update.layers import writable_layer

NAME = "gptq-int4-g32-qwen3moe"


def test_a_gpu_of_another_architecture(converted) -> None:
    checkpoint = open_converted(converted[NAME])
    require_arch(checkpoint, "sm80")
    with pytest.raises(MoeqError, match=r"converted for A100 \(sm80\), and this GPU is sm90") as caught:
        require_arch(checkpoint, "sm90")
    assert "--gpu sm90" in (caught.value.hint or "")


def test_the_architecture_of_a_device(converted, monkeypatch) -> None:
    checkpoint = open_converted(converted[NAME])
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    assert device_arch(torch.device("cuda")) == "sm90"
    with pytest.raises(MoeqError) as caught:
        moeq.load_experts(checkpoint, 0, device="cuda")
    assert (caught.value.code, caught.value.message) == (
        "environment.gpu-mismatch",
        f"{converted[NAME]} was converted for A100 (sm80), and this GPU is sm90",
    )
    monkeypatch.setattr("torch.version.hip", "7")
    amd = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: amd)
    assert device_arch(torch.device("cuda")) == "gfx942"


def test_the_gpu_is_compared_unless_that_is_turned_off(converted, monkeypatch) -> None:
    compared: list[torch.device] = []
    monkeypatch.setattr(torch_loader, "check_device", lambda checkpoint, device: compared.append(device))
    for load in (moeq.load_tensors, moeq.load_experts, writable_layer):
        load(converted[NAME], 0)
        assert compared == [torch.device("cpu")], load
        load(converted[NAME], 0, check_gpu=False)
        assert compared == [torch.device("cpu")], load
        compared.clear()


def test_a_gpu_of_another_architecture_is_refused(converted, monkeypatch) -> None:
    opened = open_converted(converted[NAME])
    arch = opened.manifest.deployment["gpu"]["arch"]
    for found in (arch, "sm70"):
        monkeypatch.setattr(torch_loader, "device_arch", lambda device, found=found: found)
        check_device(opened, torch.device("cpu"))
        if found == arch:
            check_device(opened, torch.device("cuda"))
            continue
        with pytest.raises(MoeqError, match=rf"\({arch}\), and this GPU is sm70") as refused:
            check_device(opened, torch.device("cuda"))
        assert refused.value.code == "environment.gpu-mismatch"

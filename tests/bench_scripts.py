"""The scripts below `examples/bench`, importable: they import one another by name, as scripts in one folder do."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "examples" / "bench"
sys.path.append(str(FOLDER))

import checkpoint_formats  # noqa: E402
import convert_speed  # noqa: E402
import generating  # noqa: E402
import inspect_speed  # noqa: E402
import judging  # noqa: E402
import make_checkpoint  # noqa: E402
import make_family  # noqa: E402
import measuring  # noqa: E402
import naive_convert  # noqa: E402
import step_profile  # noqa: E402
import transcode_speed  # noqa: E402

__all__ = [
    "FOLDER",
    "checkpoint_formats",
    "convert_speed",
    "generating",
    "inspect_speed",
    "judging",
    "make_checkpoint",
    "make_family",
    "measuring",
    "naive_convert",
    "step_profile",
    "transcode_speed",
]

"""Check that the installed transformers works with `moeq.engines.transformers`. Imports no engine."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from moeq.errors import MoeqError
from moeq.oracle.loaders import TRANSFORMERS_OLDEST


def check_version() -> None:
    """Refuse a transformers that is missing or too old, before an import from it fails.

    Raises MoeqError `environment.engine-version`.
    """
    try:
        found = version("transformers")
    except PackageNotFoundError:
        found = ""
    if not found or Version(found).release < Version(TRANSFORMERS_OLDEST).release:
        here = f"this is transformers {found}" if found else "it is not installed here"
        raise MoeqError(
            "environment.engine-version",
            f"moeq's loader works with transformers {TRANSFORMERS_OLDEST} and newer, and {here}",
            f"pip install 'transformers>={TRANSFORMERS_OLDEST}'",
        )

"""Which versions of transformers `moeq.engines.transformers` works with. Importing this imports no engine."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from moeq.errors import MoeqError

#: The oldest version that works. 5.0 reads the number of experts of a Qwen3-MoE from `num_experts` only, which configs
#: that later versions wrote lack; transformers 4 has no conversions of weights while loading. The newest is not
#: limited: `docs/reference/tested.md` says what was run.
OLDEST = (5, 1)


def check_version() -> None:
    """Refuse a transformers that is missing or too old: before it is imported, as what is imported from it is missing.

    Raises:
        MoeqError: `environment.engine-version`.
    """
    try:
        found = version("transformers")
    except PackageNotFoundError:
        found = ""
    if not found or tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        here = f"this is transformers {found}" if found else "it is not installed here"
        raise MoeqError(
            "environment.engine-version",
            f"moeq's loader works with transformers {oldest} and newer, and {here}",
            f"pip install 'transformers>={oldest}'",
        )

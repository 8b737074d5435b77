"""Entry point of the SGLang plug-in (`sglang.srt.plugins`). Importing this module imports no engine.

SGLang calls `register` in each of its processes, before options are read.
"""

from __future__ import annotations

from importlib.metadata import version

from moeq.errors import MoeqError

#: The versions of the engine that `moeq.engines.sglang` was run with.
ENGINES = ("0.5.23",)


def register() -> None:
    """Register the quantisation method and the MoE runner `moeq`.

    Raises MoeqError `environment.engine-version` for another version. The engine logs it, goes on, and refuses
    converted checkpoints, whose method it then does not know.
    """
    found = version("sglang")
    if found not in ENGINES:
        raise MoeqError(
            "environment.engine-version",
            f"moeq's plug-in was written against SGLang {' and '.join(ENGINES)}, and this is SGLang {found}",
            f"pip install sglang=={ENGINES[0]}; or serve the source checkpoint, which this engine repacks itself",
        )
    from moeq.engines.sglang.config import register_config

    register_config()

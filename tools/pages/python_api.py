"""The reference of Python functions: where each public name of moeq is, for mkdocstrings to render."""

from __future__ import annotations

import inspect

import moeq
from pages.tables import NOTE

_EXAMPLE = """```python
import moeq

checkpoint = moeq.open("path/to/checkpoint")  # headers only
verdict = moeq.decide(checkpoint, gpu="H100", tp=2)  # backend, layout, reasons for every backend
moeq.convert("source", "destination", gpu="H100", tp=2, progress=True)
moeq.verify("destination", "source").ok
experts = moeq.load_experts("destination", 0)  # for moeq_kernels.fused_moe(x, experts, topk_weights, topk_ids)
```"""


def python_page() -> str:
    """Return the page of functions and records."""
    public = {name: getattr(moeq, name) for name in sorted(moeq.__all__, key=str.lower) if name != "__version__"}
    functions = [_place(found) for found in public.values() if inspect.isfunction(found)]
    records = [_place(found) for found in public.values() if inspect.isclass(found)]
    intro = (
        "`import moeq` imports no torch. What a command does is one function; the command's options are its keywords, "
        "those of the deployment too (`gpu`, `tp`, ...). Results are records: one line as text, a table in a notebook. "
        "Errors are `MoeqError`, with `code`, `hint` and the keyword that helps (`force=True`)."
    )
    parts = ["# Python", NOTE, intro, _EXAMPLE, "## Functions", *functions, "## Records", *records]
    return "\n\n".join([*parts, "## Kernels", "::: moeq_kernels.fused_moe"]) + "\n"


def _place(found: object) -> str:
    return f"::: {found.__module__}.{getattr(found, '__qualname__', '')}"

"""Names and stored forms of expert tensors that vLLM's model classes load, version by version.

Facts are `expert_names.json`, extracted by `tools/extract.py names`: it executes `load_weights` of every class of vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

FACTS = "expert_names.json"

#: Stands for an expert's number.
EXPERT = "*"


#: What follows the name of a tensor of all experts, as far as classes were asked: `gate_up_proj_packed`.
SUFFIXES = ("", ".weight", "_packed", "_scale", "_scale_inv", ".weight_packed", ".weight_scale", ".qweight")
#: The same of tensors that are one for all experts.
WHOLE_SUFFIXES = ("_shape", ".weight_shape")
#: gpt-oss' own, which its class loads in a way of its own.
OWN_SUFFIXES = ("_blocks", "_scales")


_ASKED = (*SUFFIXES, *WHOLE_SUFFIXES, *OWN_SUFFIXES)


@dataclass(frozen=True)
class StoredName:
    """A tensor of a layer's experts, or all parts of one expert's module, as a checkpoint names it.

    Attributes:
        path: below the layer: `mlp.experts.*.gate_proj` for a module, `mlp.experts.gate_up_proj_packed` for a tensor of
            all experts.
        order: order of its rows, as of `ClassNames.tensors`; None where nothing is said of it.
    """

    path: str
    order: str | None = "halves"

    @property
    def single(self) -> bool:
        """Whether it belongs to one expert."""
        return f".{EXPERT}." in self.path


@dataclass(frozen=True)
class ClassNames:
    """What a model class loads.

    Attributes:
        architecture: name under which a config asks for it.
        modules: path of a module of one expert below its layer, `mlp.experts.*.gate_proj`, to `any`, or to the order of
            the rows where it holds gate and up.
        tensors: name of a tensor of all experts below its layer, `mlp.experts.gate_up_proj_packed`, to the order of its
            rows: `halves`, `interleaved`, `transposed` (rows and columns exchanged), `either` of halves and transposed,
            told by the shape, or `as-is`.
    """

    architecture: str
    modules: Mapping[str, str]
    tensors: Mapping[str, str]

    def problem(self, names: Iterable[StoredName]) -> str | None:
        """Why the class does not load experts that are stored so; None where it does, or where that is not known."""
        for name in names:
            known = (self.modules if name.single else self.tensors).get(name.path)
            if known is None and (name.single or self._was_asked(name.path)):
                return f"{self.architecture} does not load {name.path}, but {self._loads}"
            accepted = {"either": ("halves", "transposed")}.get(str(known), (known,))
            if known not in (None, "any", "as-is") and name.order is not None and name.order not in accepted:
                return f"{self.architecture} takes the rows of {name.path} as {known}, and they are {name.order}"
        return None

    def _was_asked(self, path: str) -> bool:
        """Whether the class was asked about such a tensor: what it is called ends in a known way."""
        leaf = path.rpartition("experts")[2] or path
        suffix = max((end for end in _ASKED if end and leaf.endswith(end)), key=len, default="")
        return leaf.removesuffix(suffix).endswith(("proj", "linear", "w1", "w2", "w3", "w13", "v1", "fc1", "fc2"))

    @property
    def _loads(self) -> str:
        """The spellings that it loads, in short."""
        plain = [name for name in self.tensors if not name.endswith(tuple(filter(None, _ASKED)))]
        return " or ".join((*_short(self.modules), *_short(plain or self.tensors)))


def _short(paths: Iterable[str]) -> Iterator[str]:
    """Paths, those of one module together: `mlp.experts.*.{gate_proj, up_proj, down_proj}`."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        before, _, leaf = path.rpartition(f".{EXPERT}.")
        if not before:
            before, _, leaf = path.rpartition("experts.")
            before = f"{before}experts" if before else path
        groups.setdefault(before + (f".{EXPERT}" if EXPERT in path else ""), []).append(leaf)
    for before, leaves in groups.items():
        yield f"{before}.{{{', '.join(leaves)}}}" if len(leaves) > 1 else f"{before}.{leaves[0]}".rstrip(".")


@cache
def _facts() -> Any:
    return json.loads(files(__package__).joinpath(FACTS).read_text(encoding="utf-8"))


def names_of_class(version: str, architecture: str) -> ClassNames | None:
    """What the class that a version has for an architecture loads; None where that is not known."""
    for row in _facts()["classes"].get(architecture, ()):
        if version in row["versions"]:
            return ClassNames(architecture, row["modules"], row["tensors"])
    return None


def versions() -> tuple[str, ...]:
    """Versions that were looked at."""
    return tuple(_facts()["versions"])

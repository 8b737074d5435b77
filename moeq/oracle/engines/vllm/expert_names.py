"""Names and row orders of expert tensors that vLLM's model classes load, version by version.

`tools/extract.py names` executes `load_weights` of every class of vLLM and writes `expert_names.json`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moeq.oracle.engines.vllm.facts import read_facts

#: Placeholder for an expert's number.
EXPERT = "*"

#: Suffixes of stacked tensors with which `tools/extract.py names` tried the classes: `gate_up_proj_packed`.
SUFFIXES = ("", ".weight", "_packed", "_scale", "_scale_inv", ".weight_packed", ".weight_scale", ".qweight")
#: Suffixes of tensors that all experts share.
WHOLE_SUFFIXES = ("_shape", ".weight_shape")
#: Suffixes of gpt-oss, which its class loads by separate code.
OWN_SUFFIXES = ("_blocks", "_scales")
_TRIED_SUFFIXES = (*SUFFIXES, *WHOLE_SUFFIXES, *OWN_SUFFIXES)


@dataclass(frozen=True)
class StoredName:
    """Name in a checkpoint of a stacked tensor, or of one expert's module with all its parts."""

    #: Path below the layer: `mlp.experts.*.gate_proj` for a module, `mlp.experts.gate_up_proj_packed` for a stacked
    #: tensor.
    path: str
    order: str | None = "halves"  #: order of its rows (see `ClassNames.tensors`); None if unknown

    @property
    def single(self) -> bool:
        """Whether the path is a module of one expert."""
        return f".{EXPERT}" in self.path


@dataclass(frozen=True)
class ClassNames:
    """Names that a model class loads."""

    architecture: str  #: name of the class in a config
    stacks: Sequence[str]  #: paths of layers that the class finds in checkpoints: `model.layers`
    #: Path of one expert's module below its layer, `mlp.experts.*.gate_proj` -> `any`, or the order of the rows if it
    #: holds gate and up.
    modules: Mapping[str, str]
    #: Path of a stacked tensor below its layer, `mlp.experts.gate_up_proj_packed` -> order of its rows: `halves`,
    #: `interleaved`, `transposed` (rows and columns exchanged), `either` (halves or transposed, by the shape), or
    #: `as-is`.
    tensors: Mapping[str, str]

    def problem(self, names: Iterable[StoredName]) -> str | None:
        """Return why the class does not load experts with these names; None if it loads them or that is unknown."""
        for name in names:
            known = (self.modules if name.single else self.tensors).get(name.path)
            if known is None and (name.single or self._was_tried(name.path)):
                return f"{self.architecture} does not load {name.path}, but {self._loads}"
            accepted = {"either": ("halves", "transposed")}.get(str(known), (known,))
            if known not in (None, "any", "as-is") and name.order is not None and name.order not in accepted:
                return f"{self.architecture} takes the rows of {name.path} as {known}, and they are {name.order}"
        return None

    def stack_problem(self, stack: str) -> str | None:
        """Return why the class does not find layers below the path `stack`; None if it finds them."""
        if stack in self.stacks:
            return None
        return f"{self.architecture} looks for layers in {' or '.join(self.stacks)}, and these are in {stack}"

    def _was_tried(self, path: str) -> bool:
        """Tell whether the extractor tried such a tensor with the class: its name has a known suffix."""
        leaf = path.rpartition("experts")[2] or path
        suffix = max((end for end in _TRIED_SUFFIXES if end and leaf.endswith(end)), key=len, default="")
        return leaf.removesuffix(suffix).endswith(("proj", "linear", "w1", "w2", "w3", "w13", "v1", "fc1", "fc2"))

    @property
    def _loads(self) -> str:
        """Short list of the names that the class loads."""
        plain = [name for name in self.tensors if not name.endswith(tuple(filter(None, _TRIED_SUFFIXES)))]
        return " or ".join((*_short(self.modules), *_short(plain or self.tensors)))


def _short(paths: Iterable[str]) -> Iterator[str]:
    """Yield paths, grouped by module: `mlp.experts.*.{gate_proj, up_proj, down_proj}`."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        before, _, leaf = path.rpartition(f".{EXPERT}.")
        if not before:
            before, _, leaf = path.rpartition("experts.")
            before = f"{before}experts" if before else path
        groups.setdefault(before + (f".{EXPERT}" if EXPERT in path else ""), []).append(leaf)
    for before, leaves in groups.items():
        yield f"{before}.{{{', '.join(leaves)}}}" if len(leaves) > 1 else f"{before}.{leaves[0]}".rstrip(".")


def names_of_class(version: str, architecture: str) -> ClassNames | None:
    """Look up the names that a version's class for an architecture loads; None if unknown."""
    for row in read_facts("expert_names.json")["classes"].get(architecture, ()):
        if version in row["versions"]:
            return ClassNames(architecture, row["stacks"], row["modules"], row["tensors"])
    return None


def versions() -> tuple[str, ...]:
    """List the versions with known names."""
    return tuple(read_facts("expert_names.json")["versions"])

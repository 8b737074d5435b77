"""Names of the written experts of a layer, which are the names that engines look for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn, get_args

from moeq.checkpoint.families import ModelFamily
from moeq.checkpoint.names import StoredName
from moeq.errors import MoeqError
from moeq.model.expert_kinds import WHOLE_PARTS, Experts
from moeq.spelling import option
from moeq.transcode.target_formats import TargetFormat

#: Values of `--names`. `source` means the family's names; the source's own if no family is known or it has stacks.
NamesOption = Literal["source", "mlp", "block-sparse-moe", "per-expert", "stacked"]
NAMES: tuple[NamesOption, ...] = get_args(NamesOption)

_LONG: dict[StoredName, str] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_SHORT: dict[StoredName, str] = {"gate": "w1", "up": "w3", "down": "w2"}
_GGUF: dict[StoredName, str] = {"gate": "ffn_gate_exps", "up": "ffn_up_exps", "down": "ffn_down_exps"}
_STACKED: dict[StoredName, str] = {"gate_up": "gate_up_proj", "down": "down_proj"}

#: Modules for gate, up and down of a Granite-MoE layer; `input_linear` has gate rows, then up rows.
_GRANITE = ("input_linear", "input_linear", "output_linear")

#: Modules that hold experts and router, by the option that asks for them.
_CONTAINERS: dict[NamesOption, str] = {"mlp": "mlp", "block-sparse-moe": "block_sparse_moe"}

#: Containers of experts whose projections are called w1, w3, w2.
_SHORT_CONTAINERS = ("block_sparse_moe", "ffn")


@dataclass(frozen=True)
class Naming:
    """Names of the tensors of one layer's experts."""

    prefix: str  #: module path of the experts
    spelled: Mapping[StoredName, str]  #: projection -> last part of its module's name
    stacked: bool = False  #: whether tensors hold all experts
    interleaved: bool = False  #: whether gate and up rows of a stacked tensor are interleaved
    transposed: bool = False  #: whether stacked tensors of floats are transposed
    #: Source prefix and target prefix of the module that holds experts and router; None if they are equal.
    renamed: tuple[str, str] | None = None
    #: Whether each projection is a list of experts, `ffn_up_exps.0`, instead of each expert having projections.
    listed: bool = False
    modules: bool = False  #: whether stacked tensors are weights of modules, `input_linear.weight`, not parameters

    def module(self, projection: StoredName, expert: int) -> str:
        """Return the module name of a projection, as configs have it."""
        name = self.spelled[projection]
        if self.listed:
            return f"{self.prefix}.{name}.{expert}"
        return f"{self.prefix}.{name}" if self.stacked else f"{self.prefix}.{expert}.{name}"

    def tensor(self, projection: StoredName, expert: int, part: str) -> str:
        """Return the name of the tensor that holds a part."""
        if not self.stacked or self.modules:
            return f"{self.module(projection, expert)}.{part}"
        suffix = part.removeprefix("weight").removeprefix("_")
        return f"{self.prefix}.{self.spelled[projection]}" + (f"_{suffix}" if suffix else "")

    def is_row(self, part: str) -> bool:
        """Return whether an expert's part is a row of a tensor of all experts."""
        return self.stacked and part not in WHOLE_PARTS


def choose_naming(experts: Experts, family: ModelFamily | None, target: TargetFormat, asked: NamesOption) -> Naming:
    """Choose the names for one layer. Raises MoeqError `usage.names` if the target cannot have those asked for."""
    # Floats are stacked as the family stacks them; gpt-oss' own format has one spelling.
    floats, stackable, gpt_oss = target.element is not None, target.stackable, "gpt-oss" in target.spellings.values()
    layer, first = experts.layer, experts.kind(0)

    def refuse(detail: str, hint: str = "leave the option out") -> NoReturn:
        raise MoeqError("usage.names", detail, hint)

    if target.experts_only:  # GGUF's names, with a number per expert
        if asked != "source":
            refuse(f"{option('names', asked)}: the format has names of its own")
        return Naming(f"blk.{layer.layer}", _GGUF, listed=True)
    if gpt_oss:
        if asked not in ("source", "stacked"):
            refuse(f"{option('names', asked)}: gpt-oss' format has stacked tensors only")
        return Naming(layer.prefix, _STACKED, stacked=True, interleaved=True)
    # Only gpt-oss' format interleaves gate and up rows; other formats that stack have gate rows, then up rows.
    keeps_stack = "gate_up" in layer.spelling and layer.fused and stackable and (floats or not first.interleaved)
    own = family_naming(experts, family, floats=floats) if asked == "source" and (floats or not keeps_stack) else None
    if own is not None:
        return own
    if asked == "stacked" or (asked == "source" and keeps_stack):
        stacked, single = option("names", "stacked"), option("names", "per-expert")
        if not stackable:
            hint = f"{single}, or {option('to', 'compressed-tensors')}"
            refuse(f"{stacked}: no tool writes stacked experts in this format", hint)
        interleaved = family is not None and family.interleaved
        if interleaved and not floats:
            what = f"{layer.prefix} stacks interleaved gate and up rows, and no tool writes that in this format"
            refuse(f"{stacked}: {what}", single)
        if not first.gated:
            refuse(f"{layer.prefix} has no gate: nothing to stack", single)
        return Naming(
            layer.prefix,
            _STACKED,
            stacked=True,
            interleaved=interleaved,
            transposed=floats and family is not None and family.transposed,
        )
    prefix, renamed = _prefix(layer.prefix, asked)
    if asked == "source" and not layer.fused and not layer.listed and "gate_up" not in layer.spelling:
        spelled: Mapping[StoredName, str] = dict(layer.spelling)
    else:
        short = any(f".{name}." in f"{prefix}." for name in _SHORT_CONTAINERS)
        spelled = _SHORT if short else _LONG
    return Naming(prefix, spelled, renamed=renamed)


def family_naming(experts: Experts, family: ModelFamily | None, *, floats: bool) -> Naming | None:
    """Return the names that transformers loads; None if they are unknown or `Naming` cannot express them.

    For other names transformers ignores the experts and fills the model with random numbers. Families that stack
    floats define no names for quantised experts.
    """
    layer, first = experts.layer, experts.kind(0)
    if family is None or not first.gated or not (floats or family.stacking == "per-expert"):
        return None
    head = f"{layer.stack}.{layer.layer}"
    prefix = f"{head}.{family.experts}"
    if family.projections == _GRANITE:
        return Naming(prefix, {"gate_up": _GRANITE[0], "down": _GRANITE[2]}, stacked=True, modules=True)
    before, after = (path.rpartition(".")[0] for path in (layer.prefix, prefix))
    if before != after and head in (before, after):  # the router does not lie in a container of its own
        return None
    renamed = None if before == after else (before, after)
    if family.stacking == "per-expert":
        spelled: Mapping[StoredName, str] = dict(zip(("gate", "up", "down"), family.projections, strict=True))
        return Naming(prefix, spelled, renamed=renamed)
    if family.projections != ("gate_proj", "up_proj", "down_proj"):
        return None
    return Naming(
        prefix, _STACKED, stacked=True, interleaved=family.interleaved, transposed=family.transposed, renamed=renamed
    )


def _prefix(prefix: str, asked: NamesOption) -> tuple[str, tuple[str, str] | None]:
    """Return the experts' module path in the requested container, and the container's renaming (`Naming.renamed`)."""
    if asked not in _CONTAINERS:
        return prefix, None
    parts = prefix.split(".")
    if parts[-1] != "experts" or len(parts) < 2 or parts[-2].isdecimal():
        raise MoeqError("usage.names", f"{option('names', asked)}: {prefix} is no module of experts in a container")
    before = ".".join(parts[:-1])
    after = ".".join([*parts[:-2], _CONTAINERS[asked]])
    return f"{after}.experts", (before, after) if before != after else None


def rename(name: str, renamed: Sequence[tuple[str, str]]) -> str:
    """Return the target's name of a copied tensor: router and shared experts are renamed with their container."""
    for before, after in renamed:
        if name.startswith(f"{before}."):
            return after + name[len(before) :]
    return name

"""Which model classes of the installed vLLM run their experts through its `FusedMoE`, and so can be served converted.

    python examples/vllm_models.py            # a table for people
    python examples/vllm_models.py --json     # one object per architecture

Every registered class is imported, and the code that builds its layers is followed from class to class: what a
constructor names and its module knows. Classes that cannot be imported here are listed with the reason.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

from vllm.model_executor.layers.fused_moe import layer as fused_moe_layer
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.models.registry import ModelRegistry

#: The function that builds a layer's experts, by the engine's version.
BUILDERS = [found for name in ("FusedMoE", "FusedMoEFactory") if (found := getattr(fused_moe_layer, name, None))]
#: Words in a class's name that say it has experts.
WORDS = ("moe", "expert")


@dataclass(frozen=True)
class Row:
    """One architecture.

    Attributes:
        architecture: its name in `config.json`.
        place: module and class below `vllm.model_executor.models`.
        found: `yes`: its experts are RoutedExperts; `inside`: those of the model it wraps may be (a vision model
            builds its language model by name); `own`: it has experts of its own making; `no`: none; `unknown`.
        why: the class that does it, or the reason.
    """

    architecture: str
    place: str
    found: str
    why: str


def codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of everything defined inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def named(function: FunctionType) -> Iterator[Any]:
    """What a function's code names and its module knows, attributes of modules too, and what arguments default to."""
    yield from [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    names = sorted({name for code in codes(function.__code__) for name in code.co_names})
    known = [function.__globals__[name] for name in names if name in function.__globals__]
    yield from known
    for module in known:
        if isinstance(module, ModuleType):
            yield from (vars(module)[name] for name in names if name in vars(module))


def functions(value: Any) -> Iterator[FunctionType]:
    """A function, those inside its wrappers, and those that its arguments default to."""
    value = getattr(value, "__func__", value)
    if not isinstance(value, FunctionType):
        return
    yield value
    cells = [cell.cell_contents for cell in value.__closure__ or () if cell.cell_contents is not value]
    for inner in [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]:
        yield from functions(inner)


def follow(start: type) -> tuple[str, str]:
    """How a class gets its experts: `Row.found` and `Row.why`."""
    waiting, seen, inside, own = [start], {start}, False, ""
    while waiting:
        kind = waiting.pop()
        for owner in inspect.getmro(kind):
            if not owner.__module__.startswith("vllm.model_executor.models"):
                continue
            builders = [inner for value in vars(owner).values() for inner in functions(value)]
            for thing in (
                thing for builder in builders if builder.__name__ != "load_weights" for thing in named(builder)
            ):
                if any(thing is builder for builder in BUILDERS) or (
                    isinstance(thing, type) and issubclass(thing, RoutedExperts)
                ):
                    return "yes", owner.__name__
                inside |= getattr(thing, "__name__", "") == "init_vllm_registered_model"
                modelled = str(getattr(thing, "__module__", "")).startswith("vllm.model_executor.models")
                if isinstance(thing, type) and modelled and thing not in seen:
                    seen.add(thing)
                    waiting.append(thing)
                    if any(word in thing.__name__.lower() for word in WORDS):
                        own = thing.__name__
    if inside:
        return "inside", "the model that it wraps"
    return ("own", own) if own else ("no", "")


def rows() -> Iterator[Row]:
    """Every architecture that the engine knows, by name."""
    for architecture, model in sorted(ModelRegistry.models.items()):
        place = f"{getattr(model, 'module_name', '?').rpartition('.')[2]}:{getattr(model, 'class_name', '?')}"
        try:
            kind = model.load_model_cls()
        except Exception as error:  # noqa: BLE001 - whatever an import lacks is the answer
            yield Row(architecture, place, "unknown", f"{type(error).__name__}: {error}".splitlines()[0][:120])
            continue
        yield Row(architecture, place, *follow(kind))


def main() -> None:
    found = list(rows())
    if "--json" in sys.argv:
        json.dump([asdict(row) for row in found], sys.stdout, indent=1)
        return
    for answer in ("yes", "inside", "own", "unknown"):
        some = [row for row in found if row.found == answer]
        print(f"{answer}: {len(some)}")
        for row in some:
            print(f"  {row.architecture:44} {row.place:40} {row.why}")


if __name__ == "__main__":
    main()

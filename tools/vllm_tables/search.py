"""vLLM's selection functions, run on classes that refuse everything and write down that they were asked: which
candidates are tried in which order, how the search ends, and by which factors of a case that differs."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vllm_tables import inside, sandbox
from vllm_tables.classes import LAYERS, Domain, class_name, experts_classes, layer_of
from vllm_tables.questions import ASKED, BASE, PACKAGE_FACTORS, RICH, SWITCHES, World

Factor = dict[str, dict[str, Any]]  # value's name -> what it changes in the question, its world or the call


class Asked:
    """Experts classes that write down that they were asked and refuse, except the one whose turn is `accept`."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any, Any]] = []
        self.accept: int | None = None
        for name, cls in experts_classes().items():
            cls.is_supported_config = staticmethod(self._answer(name))

    def _answer(self, name: str) -> Callable[..., tuple[bool, str | None]]:
        def answer(
            cls: Any, moe: Any, weight_key: Any = None, activation_key: Any = None, *rest: Any, **more: Any
        ) -> Any:
            self.log.append((class_name(cls) if isinstance(cls, type) else name, weight_key, activation_key))
            return (len(self.log) - 1 == self.accept), "refused"

        return answer


def _selectors() -> dict[str, Callable[..., Any]]:
    """The selection functions of this version by moeq's name of the family: `(moe, weight, activation, call) ->
    (backend, class)`."""
    found: dict[str, Callable[..., Any]] = {}

    def from_oracle(name: str, module_name: str, function: str) -> None:
        select = getattr(inside.family(module_name), function, None)
        if select is None:
            return
        takes = inspect.signature(select).parameters

        def call(moe: Any, weight: Any, activation: Any, extra: Mapping[str, Any]) -> Any:
            given = {
                "weight_key": weight,
                "activation_key": activation,
                "quant_config": None,
                "may_have_zp": False,
                "may_have_bias": False,
                "allow_tile_padding": True,
                "allow_vllm_cutlass": False,
                **extra,
            }
            return select(moe, **{key: value for key, value in given.items() if key in takes})

        found[name] = call

    from_oracle("wna16", "int_wna16", "select_wna16_moe_backend")
    from_oracle("int8", "int8", "select_int8_moe_backend")
    from_oracle("mxfp4", "mxfp4", "select_mxfp4_moe_backend")
    from_oracle("mxfp4-generic", "mxfp4", "select_deepseek_v4_mxfp4_moe_backend")
    from_oracle("fp8", "fp8", "select_fp8_moe_backend")
    from_oracle("nvfp4", "nvfp4", "select_nvfp4_moe_backend")
    from_oracle("mxfp8", "mxfp8", "select_mxfp8_moe_backend")
    from_oracle("unquantized", "unquantized", "select_unquantized_moe_backend")
    from_oracle("w4a8-fp8", "w4a8", "select_w4a8_moe_backend")
    from_oracle("w4a8-int8", "w4a8_int8", "select_w4a8_int8_moe_backend")
    wna16 = inside.family("int_wna16")
    if hasattr(wna16, "_backend_incompatibility_reason"):  # its rules are readers' business: see filters.py
        wna16._backend_incompatibility_reason = lambda *a, **k: None
    for name, module, cls in (
        (
            "mxfp4-ct",
            "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_mxfp4",
            "CompressedTensorsW4A4Mxfp4MoEMethod",
        ),
        ("mxfp4-inc", "inc.schemes.inc_mxfp4_moe", "INCMxfp4MoEMethod"),
    ):
        with contextlib.suppress(ImportError, AttributeError):
            made = getattr(importlib.import_module(f"vllm.model_executor.layers.quantization.{module}"), cls)
            found[name] = _of_method(made)
    with contextlib.suppress(ImportError, AttributeError):
        humming: Any = importlib.import_module("vllm.model_executor.layers.quantization.humming")
        select = humming.select_humming_moe_experts

        def call(moe: Any, weight: Any, activation: Any, extra: Mapping[str, Any]) -> Any:
            cls = select(config=moe, weight_key=weight, activation_key=activation)
            return ("HUMMING" if cls else None), cls

        found["humming"] = call
    return found


def _of_method(cls: Any) -> Callable[..., Any]:
    """Methods that choose in their constructor, without a selection function."""

    def call(moe: Any, weight: Any, activation: Any, extra: Mapping[str, Any]) -> Any:
        try:
            method = cls(moe)
        except TypeError:
            method = cls(inside.Loose(), moe)
        found, experts = inside.chosen(method), getattr(method, "experts_cls", None)
        return _real_backend(found["backend"], experts), experts

    return call


def _real_backend(reported: str | None, experts: Any) -> str | None:
    """`REAL~REPORTED` where a method reports a backend whose class is not the one that it runs."""
    module = inside.family("mxfp4")
    enum = module.Mxfp4MoeBackend
    if reported is None or reported not in enum.__members__ or experts in module.backend_to_kernel_cls(enum[reported]):
        return reported
    for backend in enum:
        with contextlib.suppress(ValueError):  # a member without classes
            if experts in module.backend_to_kernel_cls(backend):
                return f"{backend.name}~{reported}"
    return reported


def factors(family: str, kind: str, domain: Domain) -> dict[str, Factor]:
    """Everything that a family's search may look at."""
    table: dict[str, Factor] = {
        "keys": {f"{w}|{a}": {"keys": (w, a)} for w, a in ASKED[family][1:]},
        "form": {name: form for name, form in domain.forms.items() if name != "single"},
        "activation": {a: {"act": a} for a in domain.activations if a != "silu"},
        "routing": {r: {"routing": r} for r in domain.routings if r != "Renormalize"},
        "lora": {"1": {"lora": True}},
        "limit": {"1": {"swiglu_limit": 7.0}},
        "bias": {"1": {"bias": True}},
        "hash": {"1": {"hash_routing": True}},
        "fp32": {"1": {"router_fp32": True}},
        "dtype": {"fp16": {"dtype": "fp16"}},
        "ragged": {"1": {"inter": 2112}},  # 128 does not divide it
        "cutlass": {"1": {"call": {"allow_vllm_cutlass": True}}} if family == "fp8" else {},
        "model": {name: {"model_type": name} for name in _special_models()},
    }
    for name in PACKAGE_FACTORS.get(kind, ()):
        table[name] = {"0": {"flags": {name: False}}}
    for name, tried in {**SWITCHES[kind], "VLLM_BATCH_INVARIANT": ("1",)}.items():
        values = {value for value in (*tried, RICH[kind]["env"].get(name)) if value is not None}
        table[name] = {value: {"env": {name: value}} for value in sorted(values)}
    return {name: values for name, values in table.items() if values}


def _special_models() -> tuple[str, ...]:
    module: Any = importlib.import_module("vllm.utils.deep_gemm")
    return tuple(getattr(module, "_DEEPGEMM_BLACKWELL_EXCLUDED_MODEL_TYPES", ()))


class SelectionProbe:
    """One family's selection function on the current device, asked for its order of trial."""

    def __init__(self, family: str, select: Callable[..., Any], asked: Asked, world: World, domain: Domain) -> None:
        self.family, self.select, self.asked, self.world, self.domain = family, select, asked, world, domain
        self.env: dict[str, str] = {}
        self.flags: dict[str, bool] = {}
        sandbox.apply({**world, "env": {}})  # the search before this one may have left its variables
        LAYERS.clear()
        self.known: dict[str, str] = {}
        self.names: dict[int, str] = {}
        self.refusal = ""

    def _run(self, changes: list[dict[str, Any]], accept: int | None) -> tuple[str, str]:
        question, call, keys, env = dict(BASE), {}, ASKED[self.family][0], {}
        flags: dict[str, bool] = {}
        for change in changes:
            question.update({k: v for k, v in change.items() if k not in ("call", "keys", "env", "flags")})
            call.update(change.get("call", {}))
            keys = change.get("keys", keys)
            env.update(change.get("env", {}))
            flags.update(change.get("flags", {}))
        if question["ep"] is False:
            question["inter"] = question["inter"] * question["tp"] * question["dp"]
        if (env, flags) != (self.env, self.flags):
            sandbox.apply({**self.world, "env": env, "flags": {**self.world["flags"], **flags}})
            LAYERS.clear()
            self.env, self.flags = env, flags
        self.asked.log, self.asked.accept, self.keys = [], accept, keys
        named = self.domain.keys
        try:
            moe = layer_of(question)
        except Exception:  # noqa: BLE001  (refused before any selection: not this table's business)
            return "never", "!never"
        try:
            backend, cls = self.select(moe, named[keys[0]], named[keys[1]], call)
        except Exception as error:  # noqa: BLE001  (how the search ends is the answer)
            self.refusal = str(error)
            return "error", f"!{type(error).__name__}:{error_kind(error)}"
        word = getattr(backend, "name", backend)
        if cls is None or word in (None, "NONE", "None"):
            return "none", "!none:SILENT_NONE"
        return "choice", f"{word}/{class_name(cls)}"

    def _key(self, key: Any) -> str:
        if id(key) not in self.names:
            self.names[id(key)] = next(name for name, known in self.domain.keys.items() if known == key)
        return self.names[id(key)]

    def listed(self) -> list[str]:
        """Names that the family's refusal of an unknown backend lists: some are not values of the option."""
        self._run([{"override": "no such backend"}], None)
        return re.findall(r"'([a-z0-9_]+)'", self.refusal.partition("Expected one of")[2])

    def sequence(self, changes: list[dict[str, Any]]) -> str:
        """The candidates in order, and the end: tokens `BACKEND/Class[@activation key]`, then `=choice` or
        `!error:kind`."""
        kind, end = self._run(changes, None)
        log, tokens = list(self.asked.log), []
        if kind == "never":
            return end
        # One class may stand for several backends: which one it is depends on the name that was asked for.
        asked = repr([(name, self._key(activation)) for name, _, activation in log])
        cache = f"{changes[0]['override']} {asked} {end} {self.keys}"
        if cache in self.known:
            return self.known[cache]
        for turn, (_, _, activation) in enumerate(log):
            got, word = self._run(changes, turn)
            if got != "choice":
                word = f"?/{log[turn][0]}"
            if self.family.startswith("mxfp4"):  # elsewhere candidates are asked with the method's own key
                word += f"@{self._key(activation)}"
            tokens.append(word)
        tokens.append(f"={end}" if kind == "choice" else end)
        self.known[cache] = " ".join(tokens)
        return self.known[cache]


def error_kind(error: Exception) -> str:
    """The kind of a search's error, in moeq's words."""
    text = str(error)
    if "Expected one of" in text and "is not supported for" in text:
        return "OVERRIDE_UNKNOWN"
    if isinstance(error, NotImplementedError) or "backends available" in text:
        return "NO_BACKEND"
    if isinstance(error, AssertionError) and not text:
        return "BARE_ASSERTION"
    return "OVERRIDE_UNSUPPORTED" if isinstance(error, ValueError) else "CONFIG"


def table_of(search: SelectionProbe, override: str, all_factors: dict[str, Factor]) -> dict[str, Any] | str:
    """A requested backend's searches: by which factors they differ, and the search for every combination of those."""
    start = {"override": override}
    base = search.sequence([start])
    free = override == "auto" or base == search.sequence([{"override": "auto"}])  # a name that changes nothing
    values = {(f, v): change for f, rows in all_factors.items() for v, change in rows.items()}
    # A name that is refused at once is refused whatever the rest: a few of the factors show it.
    probed = [key for key in values if key in _TWO_FOLD] if base == "!ValueError:OVERRIDE_UNKNOWN" else list(values)
    effects = {key: [_effect(search, base, [start, values[key]])] for key in probed}
    if any(effect for (effect,) in effects.values()):
        effects = {key: effects.get(key) or [_effect(search, base, [start, values[key]])] for key in values}
    elif " " not in base:
        return base
    # What a factor does may depend on another one: try the likely ones beside each other.
    core = [key for key, (effect,) in effects.items() if effect or (_core(*key) if free else key in _TWO_FOLD)]
    corners = [
        [start, values[key]]
        for key in core
        if key[0] not in ("form", "activation", "routing", "model") or key in _TWO_FOLD
    ]
    # A switch may mean nothing until a package is gone: those two together are a corner as well.
    gone = [key for key in core if key[0] in PACKAGE_FACTORS.get(search.world["kind"], ())]
    switches = [key for key in core if key[0].startswith("VLLM_")]
    corners += [[start, values[one], values[other]] for one in gone for other in switches]
    at = [base, *(search.sequence(corner) for corner in corners)]
    for key in core:
        effects[key] += [
            _effect(search, before, [*corner, values[key]]) for before, corner in zip(at[1:], corners, strict=True)
        ]
    matter: dict[str, dict[str, list[str]]] = {}  # factor -> representative value -> values of the same effect
    for (factor, value), effect in effects.items():
        if any(effect):
            groups = matter.setdefault(factor, {})
            same = next((rep for rep in groups if effects[factor, rep][: len(effect)] == effect), None)
            groups.setdefault(same or value, []).append(value)
    rows: dict[str, str] = {}
    names = list(matter)
    for picked in itertools.product(*(["", *matter[name]] for name in names)):
        changes = [start, *(values[name, value] for name, value in zip(names, picked, strict=True) if value)]
        words = [f"{name}={value}" for name, value in zip(names, picked, strict=True) if value]
        rows[",".join(words)] = search.sequence(changes)
    alike = {
        name: {v: rep for rep, group in groups.items() for v in group if v != rep} for name, groups in matter.items()
    }
    return {"by": names, "same": {n: g for n, g in alike.items() if g}, "rows": rows}


_TWO_FOLD = {("lora", "1"), ("limit", "1"), ("form", "dp"), ("form", "ep"), ("form", "ep:deepep_low_latency")}


def _core(factor: str, value: str) -> bool:
    """Values whose effect is looked at in combination too."""
    usual = {"activation": ("swigluoai",), "routing": ("DeepseekV4",)}
    return "+eplb" not in value and factor not in ("hash", "fp32", "bias") and value in usual.get(factor, (value,))


def _effect(search: SelectionProbe, before: str, changes: list[dict[str, Any]]) -> str:
    """The search after a change, empty where it is the same or where nothing is selected at all."""
    got = search.sequence(changes)
    return "" if got == before or got == "!never" else got


def selection_rows(world: World, domain: Domain) -> Iterator[dict[str, Any]]:
    """Every family's searches on the current device, by requested backend."""
    asked = Asked()
    for family, select in _selectors().items():
        search = SelectionProbe(family, select, asked, world, domain)
        table = factors(family, world["kind"], domain)
        tables: dict[str, Any] = {}
        for override in dict.fromkeys((*domain.overrides, *search.listed())):
            made = table_of(search, override, table)
            tables[override] = "auto" if override != "auto" and made == tables.get("auto") else made
        yield {"family": family, "tables": tables}


def probe(world: World, domain: Domain) -> Iterator[list[str]]:
    """Some of every table's searches on the current device: where they are the same, so are the tables."""
    asked = Asked()
    for family, select in _selectors().items():
        search = SelectionProbe(family, select, asked, world, domain)
        table = factors(family, world["kind"], domain)
        every = [change for rows in table.values() for change in rows.values()]
        few = [change for name, rows in table.items() for value, change in rows.items() if _probing(name, value)]
        for override in dict.fromkeys((*domain.overrides, *search.listed())):
            start = {"override": override}
            changes = [{}, *(every if override == "auto" else few)]
            yield [search.sequence([start, change]) for change in changes]


def _probing(factor: str, value: str) -> bool:
    return (factor, value) in _TWO_FOLD or factor in ("bias", "dtype", "ragged", "keys", "cutlass")

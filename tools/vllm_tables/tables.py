"""vLLM's tables, taken out of vLLM by executing it: `python tools/extract.py tables X --site SITE`.

Two kinds of tables. *Classes* (`classes.py`): what every experts class says yes to on a device. *Selection*
(`search.py`): for every family, device and requested backend, which candidates are tried in which order. Here the
probes are run on every device, and what they find becomes one data file.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from moeq.errors import MoeqError
from vllm_tables import inside, sandbox
from vllm_tables.classes import LAYERS, Domain, class_rows, standing
from vllm_tables.methods import method_limits, method_names, rounding
from vllm_tables.questions import (
    DEVICES,
    GROUPS,
    NOT_FOR_CLASSES,
    RICH,
    SWITCHES,
    World,
    parallel_forms,
)
from vllm_tables.search import probe, selection_rows

# ------------------------------------------------------------------------------------------------ one device


def _json_of(work: Callable[[], Any]) -> Any:
    """The result of `work`, run in a fork: what it caches is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/rows"
        if not inside.in_fork(lambda: [work()], path):
            raise RuntimeError("a fork of the extractor failed")
        return json.loads(Path(path).read_text(encoding="utf-8"))


_searched: dict[str, Any] = {}  # selection tables by their probe: devices of one import that are alike share them


def device_tables(world: World) -> dict[str, Any]:
    """Every table on one device. The package is imported, and `world` its device."""
    kind = world["kind"]
    rich = {**world, **RICH[kind]}

    def in_world(changed: World, work: Callable[[Domain], Any]) -> Any:
        def run() -> Any:
            sandbox.apply(changed)
            LAYERS.clear()
            return work(Domain())

        return _json_of(run)

    rows = in_world(rich, lambda domain: list(class_rows(domain)))
    present = {**sandbox.DEFAULT_PACKAGES[kind], **rich["flags"]}
    switched: list[tuple[str, Any, World]] = [
        ("package", name, {**rich, "flags": {**rich["flags"], name: False}}) for name, on in present.items() if on
    ]
    for name, values in {**SWITCHES[kind], "VLLM_BATCH_INVARIANT": ("1",)}.items():
        for value in values if name not in NOT_FOR_CLASSES else ():
            env = {key: old for key, old in rich["env"].items() if key != name}
            switched.append(("env", [name, value], {**rich, "env": {**env, name: value} if value else env}))
    for what, name, changed in switched:
        stands = in_world(changed, lambda domain: standing(domain, rows))
        _note_switch(rows, what, name, stands)
    for row in rows:
        for entry in row["variants"]:
            entry.pop("base")
            _finish_env(entry, rich["env"])
    plain = {**rich, "env": {}}
    alike = json.dumps(in_world(plain, lambda domain: list(probe(plain, domain))))
    if alike not in _searched:
        _searched[alike] = in_world(plain, lambda domain: list(selection_rows(plain, domain)))
    return {
        "classes": rows,
        "select": _searched[alike],
        "names": in_world({**world, "env": {}}, lambda domain: method_names()),
        "limits": in_world({**world, "env": {}}, lambda domain: method_limits()),
        "rounding": in_world({**world, "env": {}}, rounding),
        "overrides": in_world(world, lambda domain: domain.overrides),
        "all2all": in_world(world, lambda domain: domain.all2all),
    }


def _note_switch(rows: list[dict[str, Any]], what: str, name: Any, stands: list[list[bool]]) -> None:
    for row, answers in zip(rows, stands, strict=True):
        for entry, stands_still in zip(row["variants"], answers, strict=True):
            if what == "package":
                entry.setdefault("packages", []).extend([] if stands_still else [name])
            elif name[0] == "VLLM_BATCH_INVARIANT":
                entry["batch_invariant"] = stands_still
            else:
                entry.setdefault("env", {}).setdefault(name[0], []).append([name[1], stands_still])


def _finish_env(entry: dict[str, Any], rich: Mapping[str, str]) -> None:
    """Variables that the variant depends on, each with the values that it stands with (None: unset)."""
    found = {}
    for name, answers in entry.pop("env", {}).items():
        if all(stands for _, stands in answers):
            continue
        found[name] = [rich.get(name), *(value for value, stands in answers if stands)]
    entry["env"] = found


# ------------------------------------------------------------------------------------------------ one version

# Fields of a variant that are left out at these values.
_USUAL: dict[str, Any] = {
    "routing": None,
    "fp32_logits": None,
    "limit": None,
    "max_experts": None,
    "intermediate_by": {},
    "packages": [],
    "env": {},
    "bias": True,
    "hidden": 1,
    "intermediate": 1,
    "min_top_k": 1,
    "hash_routing": True,
    "decomposed": True,
    "lora": False,
    "batch_invariant": False,
}


def _variant_row(entry: Mapping[str, Any], forms: list[str]) -> dict[str, Any]:
    row = {name: value for name, value in entry.items() if name not in _USUAL or value != _USUAL[name]}
    listed = set(entry["parallel"])
    refused = [name for name in forms if name not in listed]
    row["parallel"] = {"not": refused} if len(refused) <= len(listed) else {"only": entry["parallel"]}
    row["pairs"] = [f"{weight}|{activation}" for weight, activation in entry["pairs"]]
    return row


def _grouped(by_device: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Devices of the same value together."""
    groups: dict[str, dict[str, Any]] = {}
    for device, value in by_device.items():
        groups.setdefault(json.dumps(value, sort_keys=True), {"devices": [], name: value})["devices"].append(device)
    return list(groups.values())


def _by_override(by_device: Mapping[str, Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Requested backend -> its tables, each with the devices that it is for."""
    overrides = dict.fromkeys(name for tables in by_device.values() for name in tables)
    found = {}
    for override in overrides:
        tables = {device: rows[override] for device, rows in by_device.items() if override in rows}
        same = {
            device: {name: part for name, part in row.items() if part} if isinstance(row, dict) else row
            for device, row in tables.items()
        }
        found[override] = _grouped(same, "table")
    return found


def merge(version: str, digest: str, found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The data file of a version: every device's tables, those that are the same once."""
    first = next(iter(found.values()))
    forms = [name for name, _ in parallel_forms(tuple(first["all2all"]))]
    classes: dict[str, dict[str, Any]] = {}
    variants: dict[str, dict[str, Any]] = {}
    families: dict[str, dict[str, Any]] = {}
    for device, tables in found.items():
        for row in tables["classes"]:
            classes.setdefault(row["class"], {key: row[key] for key in ("format", "monolithic", "gemm_type")})
            made = [_variant_row(entry, forms) for entry in row["variants"]]
            variants.setdefault(row["class"], {})[device] = made
        for row in tables["select"]:
            families.setdefault(row["family"], {})[device] = row["tables"]
    return {
        "engine": "vllm",
        "version": version,
        "digest": digest,
        "devices": list(found),
        "overrides": first["overrides"],
        "all2all": first["all2all"],
        "forms": forms,
        "limits": first["limits"],
        "names": _grouped({device: tables["names"] for device, tables in found.items()}, "value"),
        "rounding": _grouped({device: tables["rounding"] for device, tables in found.items()}, "value"),
        "classes": {
            name: {**row, "blocks": _grouped(variants[name], "variants")} for name, row in sorted(classes.items())
        },
        "families": {name: _by_override(by_device) for name, by_device in families.items()},
    }


def extract(version: str, site: str) -> dict[str, Any]:
    """The tables of the version unpacked in `site` (the folder that holds `vllm/`), by executing it on every device.

    Raises:
        MoeqError: `environment.engine` where it cannot be imported on some device.
    """
    sandbox.preload()
    found: dict[str, dict[str, Any]] = {}
    for group in GROUPS:
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/rows"

            def run(group: dict[str, World] = group) -> Iterator[Any]:
                sandbox.install(site, next(iter(group.values())))
                inside.prepare()
                for device, world in group.items():
                    sandbox.change_device(world)
                    yield [device, device_tables(world)]

            if not inside.in_fork(run, path):
                names = ", ".join(group)
                raise MoeqError(
                    "environment.engine", f"vllm in {site} cannot be executed for {names}", "see the traceback above"
                )
            found.update(json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines())
    return merge(version, digest_of(site), {device: found[device] for device in DEVICES})


def digest_of(site: str) -> str:
    """BLAKE2 of the package's Python files, by path."""
    total = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(site, "vllm").rglob("*.py")):
        total.update(str(path.relative_to(site)).encode() + b"\0" + hashlib.blake2b(path.read_bytes()).digest())
    return f"blake2:{total.hexdigest()}"

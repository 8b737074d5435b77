"""Deployment options from the command line or a TOML file, and their defaults."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeq.deploy.deployment import Deployment, Gpu
from moeq.deploy.detect import detect_gpu
from moeq.deploy.gpus import default_dtype, parse_gpu
from moeq.errors import MoeqError
from moeq.spelling import option

#: Spelling of a dtype -> dtype of a deployment.
DTYPES = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "f16": "fp16",
    "float16": "fp16",
    "half": "fp16",
}
#: Options of a deployment, by the type of their values.
_COUNTS = ("tp", "ep", "dp", "pcp", "redundant_experts")
_SWITCHES = ("batched", "lora", "eplb")
_TEXTS = ("backend", "engine", "all2all", "quantization")
_TABLES = ("env", "packages")
_KEYS = ("gpu", "dtype", *_TABLES, *_COUNTS, *_SWITCHES, *_TEXTS)


def read_deploy_file(path: Path) -> dict[str, Any]:
    """Read a `--deploy` file: TOML with the option names as keys, `[env]` and `[packages]` as tables.

    Raises MoeqError `usage.deploy-file` if it is missing, is not TOML, or holds an unknown key.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MoeqError("usage.deploy-file", f"{path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MoeqError("usage.deploy-file", f"{path} is not TOML: {error}") from error
    unknown = sorted(set(table) - set(_KEYS))
    if unknown:
        raise MoeqError("usage.deploy-file", f"{path}: unknown keys {', '.join(unknown)}", f"known: {', '.join(_KEYS)}")
    return table


def make_deployment(options: Mapping[str, Any], file: Path | None = None, *, detect: bool = True) -> Deployment:
    """Build the deployment from options and a file. Options take precedence over the file, unless they are None.

    Args:
        options: any of `gpu`, `tp`, `ep`, `dp`, `pcp`, `batched`, `lora`, `eplb`, `redundant_experts`, `dtype`,
            `backend`, `engine`, `all2all`, `quantization`, `env`, `packages`.
        file: a `--deploy` file.
        detect: whether to look for a local GPU if none is named.

    Raises:
        MoeqError: `usage.no-gpu` if none is named or found, `usage.unknown-gpu`, `usage.deployment` for impossible
            values, `usage.deploy-file`.
    """
    given = {**(read_deploy_file(file) if file else {}), **{k: v for k, v in options.items() if v is not None}}
    kinds = ((_SWITCHES, bool, "true or false"), (_TEXTS, str, "text"), (_TABLES, Mapping, "a table"))
    for names, kind, wanted in kinds:
        for name in names:
            if name in given and not isinstance(given[name], kind):
                raise MoeqError("usage.deployment", f"{name} is {given[name]!r}, it has to be {wanted}")
    gpu = _gpu(given.get("gpu"), detect)
    fields: dict[str, Any] = {"gpu": gpu, "dtype": _dtype(given.get("dtype"), gpu)}
    for name in (*_COUNTS, *_SWITCHES, *_TEXTS):
        if name in given:
            fields[name] = given[name]
    if "backend" in fields:
        fields["backend"] = fields["backend"].lower().replace("-", "_")
    fields["env"] = tuple(sorted((str(key), str(value)) for key, value in given.get("env", {}).items()))
    fields["packages"] = tuple(sorted((str(key), bool(value)) for key, value in given.get("packages", {}).items()))
    return Deployment(**fields)


def _gpu(name: Any, detect: bool) -> Gpu:
    if isinstance(name, Gpu):
        return name
    if name is not None:
        return parse_gpu(str(name))
    found = detect_gpu() if detect else None
    if found is None:
        raise MoeqError(
            "usage.no-gpu",
            "no GPU was found here and none was named: a decision needs to know the device",
            "name one: " + ", ".join(option("gpu", name) for name in ("H100", "MI300X", "sm90", "gfx942", "cpu")),
        )
    return found


def _dtype(name: Any, gpu: Gpu) -> str:
    if name is None:
        return default_dtype(gpu)
    if str(name).lower() not in DTYPES:
        raise MoeqError("usage.deployment", f"dtype '{name}' is not known", "name bf16 or fp16")
    return DTYPES[str(name).lower()]

"""What a shell proposes for the values of options: known names, looked up when the shell asks."""

from __future__ import annotations


def gpus() -> list[str]:
    """Return the names of GPUs."""
    from moeq.deploy.gpus import known_gpus

    return [gpu.name for gpu in known_gpus().values()]


def engines() -> list[str]:
    """Return engines, bare and with the versions that have tables."""
    from moeq.oracle.versions import ENGINES, versions

    return [*ENGINES, "sglang", "moeq", *(f"{name}@{version}" for name in ENGINES for version in versions(name))]


def backends() -> list[str]:
    """Return the values of `--backend`."""
    from moeq.oracle.backends import backend_rows

    rows = [row for engine in ("vllm@0.33.0", "moeq") for row in backend_rows(engine)]
    return sorted({row["flag"] for row in rows if row["flag"]} | {"auto"})


def families() -> list[str]:
    """Return the families of backends."""
    from moeq.oracle.backends import backend_rows

    return list(dict.fromkeys(row["family"] for row in backend_rows("vllm@0.33.0")))


def layouts() -> list[str]:
    """Return the ids of layouts."""
    from moeq.layouts.registry import LAYOUTS

    return list(LAYOUTS)


def targets() -> list[str]:
    """Return the targets of `transcode`."""
    from moeq.transcode.target_formats import TARGETS

    return list(TARGETS)


def schemas() -> list[str]:
    """Return the names of documents."""
    from moeq.report.schemas import schema_names

    return list(schema_names())


def names() -> list[str]:
    """Return everything that `explain` knows."""
    from moeq.cli.explanations import everything

    return [entry.code for entry in everything()]

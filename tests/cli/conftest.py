"""Every JSON document that a command prints in these tests is held against its schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from moeq.cli.out import Output
from moeq.report.schemas import load_schema, schema_names


@pytest.fixture(scope="session")
def mixtral(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """GPTQ under Mixtral's own names, which vLLM loads; those of the small checkpoint it does not."""
    from moeq.transcode.transcode import transcode

    made = tmp_path_factory.mktemp("named") / "gptq-int4-g128-mixtral"
    transcode(checkpoints / made.name, made, "gptq", names="block-sparse-moe", workers=1)
    return str(made)


@pytest.fixture(autouse=True)
def documents_fit_their_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Output._document

    def checked(self: Output, document: Mapping[str, Any]) -> None:
        name = self.schema.partition("/")[0].removeprefix("moeq.")
        if name in schema_names():
            whole = json.loads(json.dumps({"schema": self.schema, **document}, default=str))
            errors = [error for error in Draft202012Validator(load_schema(name)).iter_errors(whole)]
            assert not errors, "\n".join(_lines(errors))
        plain(self, document)

    monkeypatch.setattr(Output, "_document", checked)


def _lines(errors: list[Any]) -> Iterator[str]:
    for error in errors:
        for inner in error.context or [error]:
            yield f"{'/'.join(map(str, inner.absolute_path))}: {inner.message[:200]}"

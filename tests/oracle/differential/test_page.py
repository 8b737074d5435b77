"""`docs/reference/oracle-accuracy.md` is what the results say, and every version with tables has results."""

from __future__ import annotations

from oracle.differential import agree
from oracle.differential.known import DIFFERENCES

from moeq.oracle.versions import versions


def test_the_page_is_up_to_date() -> None:
    assert agree.PAGE.read_text(encoding="utf-8") == agree.page(agree.load()), (
        "run: python tests/oracle/differential/agree.py VERSION"
    )


def test_every_version_was_compared() -> None:
    results = agree.load()
    assert set(results) == set(versions("vllm"))
    for version, row in results.items():
        cases, decision = (sum(counts[i] for counts in row["families"].values()) for i in (0, 1))
        assert cases > 2000, version
        assert decision >= 0.995 * cases, version


def test_every_difference_has_its_reason() -> None:
    for version, row in agree.load().items():
        assert {name for name, (_, reason) in row["differences"].items() if not reason} == set(), version
        assert all(DIFFERENCES.get(version, {}).get(name) == reason for name, (_, reason) in row["differences"].items())

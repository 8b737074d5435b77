"""A skip for a reason that is not listed fails a run."""

from __future__ import annotations

import pytest
import skips

TESTS = """
import pytest

def test_one(): pass

@pytest.mark.skipif(True, reason=REASON)
def test_two(): pass
"""
OF_A_MODULE = "import pytest\npytest.importorskip('a_package_that_nobody_has')\n"


def run(pytester: pytest.Pytester, text: str) -> pytest.RunResult:
    pytester.makeini("[pytest]\naddopts = -p no:unraisableexception")
    pytester.makepyfile(text)
    return pytester.inline_run(plugins=[skips.StrictSkips()])


def test_a_reason_that_is_listed_passes(pytester: pytest.Pytester) -> None:
    assert run(pytester, TESTS.replace("REASON", "'needs a GPU'")).ret == pytest.ExitCode.OK


def test_any_other_reason_fails(pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(pytester, TESTS.replace("REASON", "'not today'")).ret == pytest.ExitCode.TESTS_FAILED
    assert "::test_two: skipped for a reason that tests/skips.py does not list: not today" in capsys.readouterr().out


def test_a_module_that_is_not_collected_fails(pytester: pytest.Pytester) -> None:
    assert run(pytester, OF_A_MODULE).ret == pytest.ExitCode.TESTS_FAILED


def test_a_test_that_is_expected_to_fail_is_no_skip(pytester: pytest.Pytester) -> None:
    text = "import pytest\n@pytest.mark.xfail\ndef test_one(): assert False\n"
    assert run(pytester, text).ret == pytest.ExitCode.OK


def test_where_engines_are_nothing_is_skipped_for_want_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOEQ_ENGINES", raising=False)
    engines = ("vLLM is not installed", "SGLang is not installed")
    assert all(map(skips.is_allowed, engines))
    monkeypatch.setenv("MOEQ_ENGINES", "somewhere")
    assert not any(map(skips.is_allowed, engines))
    assert not skips.is_allowed("could not import 'gptqmodel.nn_modules.qlinear.torch': No module named 'gptqmodel'")


@pytest.mark.parametrize("reason", ["a GPU", "needs a GPUs and more", "could not import 'numba'"])
def test_a_reason_is_compared_whole(reason: str) -> None:
    assert not skips.is_allowed(reason)

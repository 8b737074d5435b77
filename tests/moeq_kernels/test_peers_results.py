"""The side-by-side benchmark's results: missing times, verdicts, merging of runs, tables."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from bench import shapes
from bench.peers import evaluate
from bench.peers.contenders import BY_FORMAT
from bench.peers.evaluate import TARGETS, gaps, judge, merge, scores, time_of
from bench.peers.report import markdown, missing
from bench.shapes import FORMATS, floor

ROOT = Path(__file__).parents[2]


def cell(fmt: str, shape: str, tokens: int, **times: float) -> dict[str, Any]:
    least = floor(FORMATS[fmt], shapes.SHAPES[shape], tokens, min(shapes.SHAPES[shape].experts, tokens * 2))
    rows: dict[str, Any] = {
        name.replace("_", "-"): {"status": "right", "cold": {"us": value}, "hot": {"us": 0.9 * value}}
        for name, value in times.items()
    }
    return {
        "format": fmt,
        "shape": shape,
        "tokens": tokens,
        "hit": 1,
        "floor_us": least.time,
        "memory_floor_us": least.memory,
        "compute_floor_us": least.compute,
        "peak_tflops": 800.0,
        "contenders": rows,
    }


def document(*cells: dict[str, Any]) -> dict[str, Any]:
    return {"device": "a GPU", "date": "2026-11-21", "cells": list(cells)}


def verdict(wanted: str, run: dict[str, Any], regime: str = "int4") -> evaluate.Verdict:
    return judge(
        next(target for target in TARGETS if target.wanted == wanted and target.regime.startswith(regime)), run
    )


class TestVerdicts:
    def test_every_cell(self) -> None:
        good = cell("int4", "mixtral-8x7b", 8, moeq=100, marlin=150, humming=120)
        bad = cell("int4", "mixtral-8x7b", 16, moeq=100, marlin=90, humming=130)
        target = "must: faster than Marlin in every cell"
        assert verdict(target, document(good)).reached is True
        found = verdict(target, document(good, bad))
        assert found.reached is False
        assert [miss.where for miss in found.misses] == ["int4 mixtral-8x7b M=16"]
        assert found.misses[0].value == pytest.approx(0.9)

    def test_a_share_of_the_cells(self) -> None:
        cells = [cell("int4", "mixtral-8x7b", 2**n, moeq=100, humming=90 if n == 0 else 110) for n in range(10)]
        assert verdict("must: faster than Humming in 90 % of the cells", document(*cells)).reached is True
        assert verdict("must: faster than Humming in 90 % of the cells", document(*cells[:9])).reached is False

    def test_geometric_mean(self) -> None:
        cells = [cell("int4", "mixtral-8x7b", n, moeq=100, humming=h) for n, h in ((1, 100), (8, 400))]
        found = verdict("aim: 1.4 x Humming in the geometric mean", document(*cells))
        assert found.reached is True
        assert "2.00" in found.said

    def test_peers_that_were_wrong_or_absent_do_not_count(self) -> None:
        one = cell("int4", "mixtral-8x7b", 8, moeq=100, marlin=50)
        one["contenders"]["marlin"]["status"] = "wrong"
        found = verdict("must: faster than Marlin in every cell", document(one))
        assert found.reached is None
        assert time_of(one, "marlin") is None

    def test_shares_of_floors_and_peaks(self) -> None:
        decode = cell("int4", "mixtral-8x7b", 16, moeq=200)
        assert verdict("must: 70 % of the byte floor", document(decode)).reached is True
        slow = cell("int4", "mixtral-8x7b", 16, moeq=250)
        assert verdict("must: 70 % of the byte floor", document(slow)).reached is False
        prefill = cell("int4", "mixtral-8x7b", 4096, moeq=3653 * 790 / 800 / 0.75)
        assert verdict("must: 70 % of the bf16 peak", document(prefill)).reached is True
        assert verdict("aim: 78 % of the bf16 peak", document(prefill)).reached is False
        assert verdict("must: 70 % of the bf16 peak", document({**prefill, "peak_tflops": None})).reached is None

    def test_both_ways_into_triton_kernels_count_as_one_peer(self) -> None:
        one = cell("mxfp4", "gpt-oss-20b", 8, moeq=100, triton_kernels_own_routing=90)
        one["contenders"]["triton_kernels"] = {"status": "right", "cold": {"us": 120.0}}
        one["contenders"]["triton_kernels-own-routing"] = one["contenders"].pop("triton-kernels-own-routing")
        found = verdict("must: faster than triton_kernels in 90 %", document(one), "MXFP4")
        assert found.misses[0].value == pytest.approx(0.9)

    def test_the_grid_has_known_and_held_out_layers_and_no_others(self) -> None:
        bad = [cell("mxfp4", shape, 8, moeq=100, humming=90) for shape in ("kimi-k2-tp8", "gpt-oss-20b")]
        other = cell("mxfp4", "mixtral-8x7b-tp8", 8, moeq=100, humming=50)
        found = verdict("must: faster than the best peer in 95 %", document(*bad, other), "MXFP4")
        assert found.reached is False
        assert {miss.where for miss in found.misses} == {"mxfp4 kimi-k2-tp8 M=8", "mxfp4 gpt-oss-20b M=8"}

    def test_the_best_peer_may_be_any(self) -> None:
        one = cell("fp8-block-w8a8", "kimi-k2-tp8", 8, moeq=100, humming=150, vllm_triton=140)
        one["contenders"]["deep_gemm"] = {"status": "right", "cold": {"us": 80.0}}
        found = verdict("aim: faster than the best peer in every cell", document(one), "NVFP4")
        assert [round(miss.value, 2) for miss in found.misses] == [0.8]

    @pytest.mark.parametrize(
        ("fmt", "regime", "wanted", "least"),
        [
            ("int4", "int4, known", "must: 1.35 x Humming in the geometric mean", 1.35),
            ("mxfp4", "MXFP4", "must: 1.25 x the best peer in the geometric mean", 1.25),
            ("w8a8", "W8A8", "must: 1.15 x the best peer in the geometric mean", 1.15),
        ],
    )
    def test_means_over_the_grid(self, fmt: str, regime: str, wanted: str, least: float) -> None:
        for factor in (0.99, 1.01):
            one = cell(fmt, "phi-3.5-moe", 8, moeq=100, humming=100 * least * factor)
            assert verdict(wanted, document(one), regime).reached is (factor > 1)

    def test_four_of_five_decode_cells_are_enough(self) -> None:
        target = "must: 70 % of the byte floor in 80 %"
        good = [cell("w8a8", "phi-3.5-moe", 2**n, moeq=1) for n in range(3, 7)]
        for row in good:
            row["contenders"]["moeq"]["cold"]["us"] = row["memory_floor_us"] / 0.75
        bad = cell("mxfp4", "phi-3.5-moe", 8, moeq=1e6)
        assert verdict(target, document(*good, bad), "decode").reached is True
        assert verdict(target, document(*good[:3], bad), "decode").reached is False
        prefill = cell("w8a8", "deepseek-v3-tp8", 4096, moeq=1e6)  # bytes take longer than products here
        assert prefill["memory_floor_us"] > prefill["compute_floor_us"]
        assert verdict(target, document(*good, prefill), "decode").cells == 4

    @pytest.mark.parametrize("status", ["failed", "wrong"])
    def test_a_cell_that_only_peers_have_is_lost(self, status: str) -> None:
        good = cell("int4", "mixtral-8x7b", 8, moeq=100, marlin=150, humming=300)
        ours = cell("int4", "mixtral-8x7b", 4096, marlin=150, humming=300)
        ours["contenders"]["moeq"] = {"status": status}
        for wanted in (
            "must: faster than Marlin in every cell",
            "must: faster than Humming in 90 % of the cells",
            "aim: 1.4 x Humming in the geometric mean",
        ):
            assert verdict(wanted, document(good)).reached is True
            assert verdict(wanted, document(good, ours)).reached is False
        assert verdict("must: 70 % of the bf16 peak", document(ours), "int4 prefill").reached is False
        good["contenders"]["moeq"] = {"status": status}
        assert verdict("must: 70 % of the byte floor in 80 %", document(good), "decode").reached is False
        good = cell("int4", "mixtral-8x7b", 8, moeq=100, marlin=150, humming=300)
        found = {score.peer: score for score in scores(document(good, ours))}
        assert (found["marlin"].cells, found["marlin"].won) == (2, 1)
        assert found["marlin"].mean == pytest.approx(1.5)
        assert scores(document(ours))[0].won == 0

    def test_without_us_nothing_is_lost(self) -> None:
        run = document(cell("int4", "mixtral-8x7b", 8, marlin=150))
        assert verdict("must: faster than Marlin in every cell", run).reached is None
        run["cells"][0]["contenders"]["moeq"] = {"status": "absent", "reason": "no triton"}
        assert verdict("must: faster than Marlin in every cell", run).reached is None

    def test_scores_name_every_peer_and_the_best(self) -> None:
        cells = [cell("w8a8", "mixtral-8x7b", n, moeq=100, humming=110, vllm_triton=200) for n in (1, 8)]
        found = {score.peer: score for score in scores(document(*cells))}
        assert found["humming"].won == 2
        assert found["vllm-triton"].mean == pytest.approx(2.0)
        assert found["best peer"].mean == pytest.approx(1.1)


class TestMerging:
    def test_a_cell_is_never_mixed(self) -> None:
        """A later run with fewer contenders does not replace a cell, nor lend it a time."""
        first = document(cell("int4", "mixtral-8x7b", 8, moeq=100, marlin=150))
        later = document(
            cell("int4", "mixtral-8x7b", 8, moeq=80), cell("int4", "mixtral-8x7b", 16, moeq=90, marlin=160)
        )
        merged = merge([first, later])
        assert [(row["tokens"], row["run"], time_of(row, "moeq")) for row in merged["cells"]] == [
            (8, 0, 100),
            (16, 1, 90),
        ]
        assert "not across cells" in merged["side_by_side"]
        assert merge([first])["side_by_side"] == "one run"

    def test_what_another_run_timed_is_not_left_out(self) -> None:
        def left(shape: str, *tokens: int) -> dict[str, Any]:
            return {"format": "int4", "shape": shape, "tokens": list(tokens), "reason": "time"}

        first = document(cell("int4", "mixtral-8x7b", 8, moeq=100)) | {"left_out": [left("qwen3-30b-a3b", 8, 16)]}
        gone = [left("mixtral-8x7b", 8, 16), left("qwen3-30b-a3b", 16, 32), left("gpt-oss-20b", 8)]
        later = document(cell("int4", "gpt-oss-20b", 8, moeq=90)) | {"left_out": gone}
        expected = [left("qwen3-30b-a3b", 8, 16, 32), left("mixtral-8x7b", 16)]
        assert merge([first, later])["left_out"] == expected

    def test_a_run_before_does_not_hide_that_we_failed(self) -> None:
        right = document(cell("int4", "mixtral-8x7b", 8, moeq=100, marlin=150))
        wrong = document(cell("int4", "mixtral-8x7b", 8, marlin=150))
        wrong["cells"][0]["contenders"]["moeq"] = {"status": "wrong"}
        assert [time_of(row, "moeq") for row in merge([right, wrong])["cells"]] == [None]
        assert [time_of(row, "moeq") for row in merge([wrong, right])["cells"]] == [100]
        mended = document(cell("int4", "mixtral-8x7b", 8, moeq=90))
        assert [time_of(row, "moeq") for row in merge([right, wrong, mended])["cells"]] == [90]

    def test_different_routing_is_refused(self) -> None:
        with pytest.raises(ValueError, match="uniform, zipf"):
            merge([document(), {**document(), "routing": "zipf"}])

    def test_different_gpus_are_refused(self) -> None:
        with pytest.raises(ValueError, match="different GPUs"):
            merge([document(), {**document(), "device": "another"}])


class TestMissing:
    BY_FORMAT: ClassVar = {"mxfp4": ("moeq", "marlin", "humming", "flashinfer"), "int4": ("moeq", "humming")}

    def run(self) -> dict[str, Any]:
        cells = [cell("mxfp4", "gpt-oss-20b", n, moeq=100, humming=110) for n in (1, 8, 128)]
        for one in cells:
            one["contenders"]["marlin"] = {"status": "wrong", "error": 1.33, "plain_error": 0.004, "right": False}
        cells[2]["contenders"]["humming"] = {"status": "failed", "reason": "a | b\nc"}
        return document(*cells, cell("int4", "mixtral-8x7b", 8, moeq=100, humming=120))

    def test_a_contender_without_a_time_in_any_cell_is_named_with_its_reason(self) -> None:
        found = {(one.format, one.contender): one for one in gaps(self.run(), self.BY_FORMAT)}
        assert list(found) == [("mxfp4", "marlin"), ("mxfp4", "humming"), ("mxfp4", "flashinfer")]
        wrong = found["mxfp4", "marlin"]
        assert (wrong.cells, wrong.of, wrong.why) == (3, 3, "wrong; its error is 1.3 to 1.3")
        assert (found["mxfp4", "humming"].cells, found["mxfp4", "humming"].of) == (1, 3)
        assert found["mxfp4", "flashinfer"].why == "took no part"

    def test_reasons_that_differ_are_counted(self) -> None:
        run = self.run()
        run["cells"][1]["contenders"]["humming"] = {"status": "failed", "reason": "no answer in 240 s"}
        found = {one.contender: one.why for one in gaps(run, self.BY_FORMAT)}
        assert found["humming"] == "1 x no answer in 240 s; 1 x a | b\nc"

    def test_ours_is_named_as_well(self) -> None:
        run = document(cell("int4", "mixtral-8x7b", 8, humming=120))
        run["cells"][0]["contenders"]["moeq"] = {"status": "absent", "reason": "no triton"}
        assert [(one.contender, one.why) for one in gaps(run, self.BY_FORMAT)] == [("moeq", "no triton")]

    def test_the_report_says_it_before_targets_and_scores(self) -> None:
        text = markdown(self.run())
        first = text.index("## Contenders without a time")
        assert first < text.index("## Targets") < text.index("## Against each peer")
        assert "| mxfp4 | marlin | 3 of 3 | wrong; its error is 1.3 to 1.3 |" in text
        assert "| mxfp4 | humming | 1 of 3 | a / b c |" in text

    def test_nothing_missing_is_said_too(self) -> None:
        assert gaps(document(cell("int4", "mixtral-8x7b", 8, moeq=100, humming=120)), self.BY_FORMAT) == []
        known = [name for name in BY_FORMAT["w8a8"] if name != "moeq"]
        times = {name.replace("-", "_"): 110.0 for name in known}
        run = document(cell("w8a8", "mixtral-8x7b", 8, moeq=100, **times))
        assert missing(run) == ["Every contender was right, and timed, in every cell."]


class TestReport:
    def run(self) -> dict[str, Any]:
        cells = [cell("int4", "mixtral-8x7b", n, moeq=200.0 + n, marlin=300.0 + n) for n in (1, 8, 128)]
        failed = copy.deepcopy(cells[0]) | {"tokens": 2}
        failed["contenders"]["marlin"] = {"status": "failed", "reason": "a <reason>"}
        return document(*cells, failed)

    def test_tables_show_times_and_what_was_not_timed(self) -> None:
        text = markdown(self.run())
        assert "| mixtral-8x7b | 8 |" in text
        assert "| failed |" in text
        assert text.count("| must: ") + text.count("| aim: ") == len(TARGETS)

    @pytest.mark.parametrize(
        "path", sorted((ROOT / "kernels" / "bench" / "results").glob("*peers*.md")), ids=lambda path: path.stem
    )
    def test_recorded_tables_are_those_of_the_recorded_times(self, path: Path) -> None:
        """`python -m bench.peers report NAME.json` writes them again."""
        assert path.read_text() == markdown(json.loads(path.with_suffix(".json").read_text()))

    def test_few_results_are_kept_and_each_is_named_with_its_command(self) -> None:
        folder = ROOT / "kernels" / "bench" / "results"
        names = {path.name for path in folder.iterdir()} - {"README.md"}
        assert len(names) <= 15
        table = (folder / "README.md").read_text()
        assert [
            name for name in names if f"`{name}`" not in table and f"`{Path(name).stem}.json`, `.md`" not in table
        ] == []

    @pytest.mark.slow
    def test_the_command_writes_both(self, tmp_path: Path) -> None:
        source = tmp_path / "run.json"
        source.write_text(json.dumps(self.run()))
        command = [sys.executable, "-m", "bench.peers", "report", str(source), "--out", str(tmp_path / "out")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run(command, check=True, env=environment, capture_output=True)
        assert {path.name for path in (tmp_path / "out").iterdir()} == {"peers.json", "peers.md"}

"""The page of backends by GPU, as text and in a real browser: what the filter shows, and what a click opens."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import moeq
from moeq.cli.app import run
from moeq.deploy.gpus import parse_gpu
from moeq.pipeline.plan.candidates import confirm_backends
from moeq.pipeline.plan.layer_verdict import judge_checkpoint
from moeq.report.oracle_page import render

NAME = "gptq-int4-g32-qwen3moe"
GPUS, SIZES = ("A100", "H100", "MI300X"), (1, 2)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--virtual-time-budget=3000"),
)

#: Clicks through the page and leaves what it saw where `--dump-dom` prints it.
CLICKS = """
<script>
const shown = (all) => [...all].filter((one) => one.checkVisibility()).length;
const cells = () => shown(document.querySelectorAll("thead tr:first-child th.gpu"));
const seen = { width: innerWidth, page: document.documentElement.scrollWidth, all: cells() };
document.querySelector("#gpu1").click();
seen.filtered = cells();
const heads = [...document.querySelectorAll("thead tr:first-child th.gpu")];
seen.name = heads.find((one) => one.checkVisibility()).innerText;
const cell = [...document.querySelectorAll("td.no.g1 details")][0];
seen.closed = shown([cell.querySelector("p")]);
cell.querySelector("summary").click();
seen.opened = shown([cell.querySelector("p")]);
seen.reason = cell.querySelector("p").innerText;
seen.after = document.documentElement.scrollWidth;
seen.height = document.querySelector("tbody td.name").offsetHeight;
document.querySelector("#all").click();
seen.again = cells();
parent.postMessage(JSON.stringify(seen), "*");
</script>
"""

#: Shows the page at a width below that of the narrowest window.
FRAME = """<!doctype html><script>
addEventListener("message", (one) => document.body.insertAdjacentHTML("beforeend", `<pre id=seen>${one.data}</pre>`));
</script><body style="margin: 0"><iframe src="page.html" style="border: 0; width: %dpx; height: 900px"></iframe></body>
"""


@pytest.fixture
def page(checkpoints: Path) -> str:
    where = moeq.Deployment(gpu=parse_gpu(GPUS[0]))
    return render(moeq.open(checkpoints / NAME), where, [parse_gpu(name) for name in GPUS], SIZES)


def test_every_backend_has_its_state_and_reason(page: str, checkpoints: Path) -> None:
    checkpoint = moeq.open(checkpoints / NAME)
    for number, name in enumerate(GPUS):
        for size in SIZES:
            where = moeq.Deployment(gpu=parse_gpu(name), tp=size)
            verdict = confirm_backends(checkpoint, judge_checkpoint(checkpoint, where, explain=False))
            for row in verdict.candidates:
                line = next(part for part in page.split("<tr>") if f'name">{row.backend}</td>' in part)
                states = re.findall(rf'gpu g{number} (\w+)">', line)
                chosen = verdict.chosen is not None and row.backend == verdict.chosen.backend
                assert states[SIZES.index(size)] == ("chosen" if chosen else "works" if row.supported else "no")
                if not row.supported:
                    assert row.reasons[0].text.split(" ")[0] in line
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_options_of_the_deployment_are_told_and_its_ranks_are_not(checkpoints: Path) -> None:
    where = moeq.Deployment(gpu=parse_gpu("H100"), tp=2, ep=2, dp=4, lora=True, dtype="fp16")
    page = render(moeq.open(checkpoints / NAME), where, [parse_gpu("A100")], (1,))
    told = re.search(r"<p[^>]*>([^<]*fp16[^<]*)<", page)
    assert told is not None, page[:3000]
    assert "lora, fp16" in told[1]
    assert not re.search(r"H100|\b(TP|EP|DP) \d", told[1])


def test_names_of_a_checkpoint_are_escaped(checkpoints: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(checkpoints / NAME, tmp_path / "<img src=x>"))
    page = render(moeq.open(source), moeq.Deployment(gpu=parse_gpu("A100")), [parse_gpu("A100")], (1,))
    assert "<img" not in page
    assert "&lt;img src=x&gt;" in page


@pytest.mark.parametrize("command", ["oracle", "inspect"])
def test_commands_write_it(command: str, checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert run([command, str(checkpoints / NAME), "--gpu", "L40S", "--html", str(out)]) == 0
    assert "L40S" in out.read_text(encoding="utf-8")
    assert run([command, str(checkpoints / NAME), "--gpu", "L40S", "--html", str(tmp_path / "no" / "page.html")]) == 3
    assert "its folder does not exist" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt-get install chromium)")
@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_browser(width: int, page: str, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    (tmp_path / "page.html").write_text(page.replace("</body>", f"{CLICKS}</body>"), encoding="utf-8")
    path = tmp_path / "frame.html"
    path.write_text(FRAME % width, encoding="utf-8")
    argv = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,1000", "--dump-dom"]
    done = subprocess.run([*argv, path.as_uri()], capture_output=True, text=True, check=True, timeout=120)
    seen: dict[str, Any] = json.loads(re.findall(r"<pre id=\"seen\">(.*?)</pre>", done.stdout, re.DOTALL)[0])
    columns = len(GPUS) * len(SIZES)
    assert (seen["width"], seen["all"], seen["filtered"], seen["again"]) == (width, columns, len(SIZES), columns)
    assert seen["name"].startswith(GPUS[1])
    assert (seen["closed"], seen["opened"]) == (0, 1)
    assert len(seen["reason"]) > 10
    assert max(seen["page"], seen["after"]) <= width, "the page itself never scrolls sideways, only its table"
    assert seen["height"] < 60, "a name is not broken into letters"

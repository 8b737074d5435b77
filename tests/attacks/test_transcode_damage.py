"""`moeq transcode` on randomly damaged checkpoints and odd destinations: a clear no, or a whole, right result."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from attacks import damaged_sources
from attacks.conftest import tree

from moeq.cli.app import run

SEEDS = int(os.environ.get("MOEQ_FUZZ_EXAMPLES", "10"))
TARGETS = ("compressed-tensors", "gptq", "gptq_v2", "fp8", "modelopt", "nvfp4", "bf16", "mxfp4", "deepseek-v4")
OPTIONS = ([], ["--allow-lossy"], ["--names", "per-expert"], ["--names", "block-sparse-moe"], ["--regroup", "16"])
OPTIONS += (["--names", "stacked"], ["--sort-act-order"])


@pytest.mark.cover
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("kind", damaged_sources.KINDS, ids=lambda kind: kind.__name__)
def test_damage_is_named_or_harmless(kind, seed: int, checkpoints: Path, tmp_path: Path, capsys) -> None:
    rng = random.Random(f"{kind.__name__} {seed}")
    name = rng.choice(sorted(path.name for path in checkpoints.iterdir() if path.is_dir()))
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(checkpoints / name, source)
    kind(source, rng)
    options = rng.choice(OPTIONS)
    code = run(["transcode", str(source), str(out), "--to", rng.choice(TARGETS), *options])
    said = capsys.readouterr().err
    assert code in (0, 1, 2, 4), said
    if code:
        assert not out.exists()
        assert said.count("error: ") == 1
        assert "Traceback" not in said
        assert "\x1b[2J" not in said
        return
    lossy = {"--allow-lossy", "--sort-act-order"} & {*options}
    assert run(["inspect", str(out)] if lossy else ["diff", str(source), str(out)]) == 0


# Destination, and what is there before; `{x}` is the folder of the test.
PLACES = {
    "source": "is, or holds, the source itself",
    "source/.": "is, or holds, the source itself",
    ".": "is, or holds, the source itself",
    "link": "is, or holds, the source itself",
    "source/out": "is in the source",
    "source/a/b/out": "is in the source",
    "link/out": "is in the source",
    "file": "is a link or a file",
    "dangling": "is a link or a file",
    "file/out": "name a folder that is there",
    "full": "--force replaces only what moeq itself wrote",
    "a b/c/out": "mkdir -p '",
    "/dev/null": "is a link or a file",
    "n" * 300: "name a new folder",
}


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("force", [[], ["--force"]], ids=["plain", "force"])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[:20])
def test_destinations_that_would_lose_data(place: str, force: list[str], checkpoints: Path, tmp_path: Path, capsys):
    shutil.copytree(checkpoints / "ct-int4-g128-qwen3moe", tmp_path / "source")
    (tmp_path / "link").symlink_to(tmp_path / "source")
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("{}")
    before = tree(tmp_path)
    argv = ["transcode", str(tmp_path / "source"), f"{tmp_path}/{place}" if place[0] != "/" else place]
    assert run([*argv, "--to", "gptq", *force]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("error: ") == 1
    assert PLACES[place] in said
    assert tree(tmp_path) == before

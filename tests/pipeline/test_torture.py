"""Deaths of every kind, each followed by the same command, and the bytes compared with an undisturbed run.

`examples/bench/torture.py` kills forks of one loaded process; here it runs for seconds, by hand as long as one likes.
Below it, whole `moeq convert` processes are interrupted, terminated, killed, and given a disk that fills up.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_scripts import FOLDER, make_checkpoint
from pipeline.interrupts import default_interrupts

pytestmark = pytest.mark.slow

MIB = 1 << 20
F_SETPIPE_SZ = 1031
TORTURE = [sys.executable, str(FOLDER / "torture.py")]
COMMAND = [sys.executable, "-c", "from moeq.__main__ import main; main()"]

INTERRUPTED = "error: interrupted\n"


def kept(partial: Path) -> str:
    """Return what an interrupted command says that leaves unfinished work."""
    hint = "hint: run the same command again: it continues where it stopped\n"
    return f"error: interrupted; {partial} keeps what was finished\n{hint}"


def tortured(options: dict[str, object]) -> dict[str, Any]:
    none = {"--kills": 0, "--power-cuts": 0, "--shard-kills": 0, "--step": 0}
    words = [str(word) for pair in {**none, **options}.items() for word in pair]
    done = subprocess.run([*TORTURE, *words], capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_fifty_deaths_at_random_instants() -> None:
    found = tortured({"--kills": 50, "--layers": 3})
    assert found["kills"] >= 50
    assert found["rounds"] >= 1


def test_power_cuts() -> None:
    found = tortured({"--power-cuts": 25, "--layers": 10, "--seed": 1})
    assert found["kills"] >= 25


def test_deaths_before_changes_of_the_file_system() -> None:
    model = {"--model": "tiny-oss", "--format": "mxfp4", "--layout": "marlin-mxfp4/1"}
    found = tortured({"--step": 3, "--layers": 1, **model})
    assert found["points"] > 12, "of the conversion and of finalize"
    assert found["kills"] == found["points"]


def test_deaths_of_shards_and_of_finalize() -> None:
    found = tortured({"--shard-kills": 8, "--layers": 2, "--seed": 3})
    assert found["kills"] >= 8
    assert found["rounds"] >= 1


def test_the_torture_notices_a_conversion_that_believes_its_journal() -> None:
    """Without reading finished units again, a power cut goes unnoticed: the script has to fail then."""
    blind = "import moeq.pipeline.run.execution as run; run.is_intact = lambda *a, **k: True; import torture, sys; "
    options = ["--kills", "0", "--power-cuts", "20", "--shard-kills", "0", "--step", "0", "--layers", "3"]
    for seed in range(4):  # on a busy machine all cuts of a run may come before the first unit is finished
        given = [*options, "--seed", str(seed)]
        program = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); {blind} sys.argv[1:] = {given!r}; torture.main()"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=200)
        if done.returncode:
            break
    assert done.returncode == 1
    assert "not what an undisturbed run writes" in done.stderr or "and is not complete" in done.stderr


#: Commands that write, and what they are given beside source and destination.
COMMANDS = {"convert": ("--gpu", "a100"), "transcode": ("--to", "compressed-tensors")}


class Job:
    """`moeq convert` or `moeq transcode` of one small checkpoint, as processes."""

    def __init__(self, folder: Path, command: str, layers: int = 12) -> None:
        self.command = command
        self.folder, self.source, self.out = folder, folder / "source", folder / "disk" / "out"
        self.out.parent.mkdir()
        self.partial = self.out.with_name("out.moeq-partial")
        make_checkpoint.write_checkpoint(
            self.source, make_checkpoint.MODELS["small"], "gptq", make_checkpoint.Size(layers, experts=2, vocab=64)
        )

    def argv(self, *more: object) -> list[str]:
        return [*COMMAND, self.command, str(self.source), str(self.out), *COMMANDS[self.command], *map(str, more)]

    def run(self, *more: object, **settings: Any) -> tuple[int, dict[str, Any]]:
        done = subprocess.run(
            self.argv("--json", *more), capture_output=True, text=True, check=False, timeout=120, **settings
        )
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    def content(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.out.iterdir()}

    def undisturbed(self) -> dict[str, bytes]:
        """What a run without any disturbance writes."""
        code, _ = self.run()
        assert code == 0
        wanted = self.content()
        for path in self.out.iterdir():
            path.unlink()
        self.out.rmdir()
        return wanted

    def die(self, kill: Callable[[subprocess.Popen[str]], None]) -> tuple[int, str]:
        """Start, hold it in the middle by not reading its events, kill; exit code and stderr.

        Events go to a pipe that holds a few of them, so the process stands still after the first finished units.
        """
        pipe = self.folder / "events"
        os.mkfifo(pipe)
        process = subprocess.Popen(
            self.argv("--events", pipe, "-q"), stderr=subprocess.PIPE, text=True, preexec_fn=default_interrupts
        )
        with pipe.open(encoding="utf-8") as events:
            fcntl.fcntl(events.fileno(), F_SETPIPE_SZ, 4096)
            for line in events:
                if json.loads(line)["event"] == "unit_finished":
                    break
            kill(process)
            for _ in events:
                pass
        _, stderr = process.communicate(timeout=60)
        pipe.unlink()
        return process.returncode, stderr


@pytest.fixture(scope="module", params=COMMANDS)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("job"), request.param)


@pytest.fixture(scope="module")
def wanted(job: Job) -> dict[str, bytes]:
    return job.undisturbed()


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "job" in request.fixturenames:
        job = request.getfixturevalue("job")
        for folder in (job.out, job.partial):
            subprocess.run(["rm", "-rf", str(folder)], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="pipes of a chosen size")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_process_that_is_ended_goes_on_where_it_was(
    job: Job, wanted: dict[str, bytes], number: signal.Signals, code: int
) -> None:
    ended, stderr = job.die(lambda process: process.send_signal(number))
    assert ended == code
    assert "Traceback" not in stderr
    if code == 130:
        assert stderr == kept(job.partial)
    assert not job.out.exists()
    assert not [name for name in ("moeq.json", "moeq-transcode.json") if (job.partial / name).exists()]
    assert list(job.partial.glob("moeq-journal*"))
    again, document = job.run()
    assert again == 0
    assert document["resumed_units"] > 0
    assert job.content() == wanted
    assert not job.partial.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="pipes of a chosen size")
def test_a_source_that_changed_in_between_is_refused(job: Job, wanted: dict[str, bytes]) -> None:
    job.die(lambda process: process.kill())
    path = max(job.source.glob("*.safetensors"))
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    code, document = job.run()
    assert (code, document["error"]["code"]) == (4, "source.changed")
    assert path.name in document["error"]["message"]
    assert not job.out.exists()
    path.write_bytes(data)
    code, document = job.run("--force")
    assert (code, document["resumed_units"]) == (0, 0), "started over"
    assert job.content() == wanted


def test_files_that_may_not_grow(job: Job, wanted: dict[str, bytes]) -> None:
    """RLIMIT_FSIZE stands in for a full disk where nothing can be mounted."""
    limit = max(len(data) for data in wanted.values()) - 1
    code, document = job.run(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert (code, document["error"]["code"]) == (5, "resources.disk-full")
    assert not job.out.exists()
    assert job.run()[0] == 0
    assert job.content() == wanted


@pytest.mark.slow
def test_signals_at_random_instants(job: Job, wanted: dict[str, bytes]) -> None:
    """Interrupted, ended and killed, again and again: the same command goes on, and nothing is lost."""
    dice, ended, done = random.Random(5), Counter[int](), 0
    for _ in range(30):
        process = subprocess.Popen(
            job.argv("-q"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=default_interrupts
        )
        time.sleep(dice.uniform(0.1, 1.5))
        process.send_signal(dice.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL]))
        _, stderr = process.communicate(timeout=60)
        ended[process.returncode] += 1
        # While Python itself begins there is nobody to catch an interrupt.
        if "KeyboardInterrupt" not in stderr or "app.py" in stderr:
            assert process.returncode in (0, 130, -signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL), stderr
            assert stderr in ((INTERRUPTED, kept(job.partial)) if process.returncode == 130 else ("",))
        if job.out.exists():
            assert job.content() == wanted
            subprocess.run(["rm", "-rf", str(job.out)], check=True)
            done += 1
    assert ended[130]
    assert ended[-signal.SIGKILL]
    assert job.run()[0] == 0
    assert job.content() == wanted
    assert not job.partial.exists()


@pytest.mark.slow
def test_shards_at_the_same_time(job: Job, wanted: dict[str, bytes]) -> None:
    """Each says what is left to do; the command without a shard then publishes."""
    shards = [
        subprocess.Popen(job.argv("--json", "--shard", f"{number}/2"), stdout=subprocess.PIPE, text=True)
        for number in range(2)
    ]
    for process in shards:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert json.loads(output)["shard"]
        assert not job.out.exists()
    code, document = job.run()
    assert code == 0
    assert document["resumed_units"] > 12, "every unit was there"
    assert job.content() == wanted


@contextlib.contextmanager
def small_disk(place: Path, size: int) -> Iterator[Callable[[int], None]]:
    """A file system of `size` bytes in memory; call what it gives to make it larger."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")

    def resize(to: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={to}", str(place)], check=True)

    try:
        yield resize
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may mount a small disk")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_disk_that_is_full(tmp_path: Path, command: str) -> None:
    """On a file system that is not the source's."""
    job = Job(tmp_path, command, layers=3)
    ballast = job.source / "tokenizer.json"
    ballast.write_bytes(bytes(4 * MIB))
    wanted = job.undisturbed()
    weights = sum(len(data) for name, data in wanted.items() if name.endswith(".safetensors"))
    with small_disk(job.out.parent, weights // 2) as resize:
        code, document = job.run()
        assert (code, document["error"]["code"]) == (5, "resources.disk-full"), "at once: files are allocated whole"
        assert "free some space" in document["error"]["hint"]
        assert not job.out.exists()
        # Region for the weights, not for the tokenizer after them: the disk fills up when the units are done.
        resize(weights + 2 * MIB)
        code, document = job.run()
        assert (code, document["error"]["code"]) == (5, "resources.disk-full")
        assert not job.out.exists()
        assert not (job.partial / "moeq.json").exists()
        resize(weights + 8 * MIB)
        code, document = job.run()
        assert code == 0
        assert document["resumed_units"] > 6, "all units were there"
        assert job.content() == wanted

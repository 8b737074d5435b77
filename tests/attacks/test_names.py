"""Names that come out of files: none leads out of the folder that is written to, none takes the place of moeq's own."""

from __future__ import annotations

import json
import os
import shutil
import unicodedata
from pathlib import Path

import pytest
from attacks.conftest import Place, command, contents, tree, write_safetensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

#: Names that are no plain relative paths. `{home}` is a folder outside.
HOSTILE = [
    "../profile.sh",
    "../../profile.sh",
    "sub/../../profile.sh",
    "../theirs/victim.txt",
    "{home}/theirs/victim.txt",
    "{home}/new.txt",
    "/etc/moeq-was-here",
    "//etc/moeq-was-here",
    "./config.json",
    "a/./b",
    "a//b",
    "a/",
    "/",
    ".",
    "..",
    "",
    "...",
    "a/../b",
    "..\\victim.txt",
    "C:\\victim.txt",
    "C:victim.txt",
    "\\\\host\\share\\x",
    "config.json\x00.safetensors",
    "new\nline",
    "esc\x1b[2J",
    "bell\x07",
    "\u202egnp.exe",
    "\u2028line",
    "del\x7f",
    "NUL",
    "con.txt",
    "aux.json",
    "COM1.safetensors",
    "sub/lpt9",
    "x" * 256,
    "é" * 128,
    "/".join(["d"] * 600),
    "trailing.",
    "trailing ",
    "stream.txt:hidden",
    "moeq-work.json",
    "moeq-journal.jsonl",
    "moeq.json/inside",
]


def restore_data(out: Path, extra: dict[str, bytes]) -> None:
    """Rewrite a conversion's restore data with more entries."""
    path = out / "moeq-restore.data"
    with safe_open(path, "numpy") as file:
        tensors = {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    write_safetensors(path, tensors | extra, metadata)


def parcel(prefix: str) -> bytes:
    """What is stored under a name: a text, or the header of an empty weight file."""
    header = b'{"__metadata__":{"format":"pt"}}'
    return b"{}" if prefix == "text" else len(header).to_bytes(8, "little") + header


@pytest.mark.cover(every=15)
@pytest.mark.parametrize("prefix", ["text", "header"])
@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_restore_writes_nowhere_else(converted_place: Place, prefix: str, name: str) -> None:
    place = converted_place
    name = name.format(home=place.home) if name.startswith("{home}") else name
    restore_data(place.out, {f"{prefix}/{name}": parcel(prefix)})
    before = tree(place.home)
    answer = command("restore", place.out, place.home / "back")
    assert answer.code == 4, answer
    assert tree(place.home) == before
    assert not Path("/etc/moeq-was-here").exists()


PARTS = st.sampled_from(
    ["..", ".", "", "a", "theirs", "victim.txt", "~", "C:", "\\", "\x00", "\x1b[0m", "nul", "x" * 300]
)
SEPARATORS = st.sampled_from(["/", "//", "\\", "/./"])


@st.composite
def hostile_names(draw: st.DrawFn) -> str:
    """A path of which one part at least is hostile."""
    parts = draw(st.lists(PARTS, min_size=1, max_size=6))
    bad = draw(st.sampled_from(["..", "", "\x00", "a\nb", "C:x", "a\\b", "AUX", "x" * 300, "a\u202eb", "\ud800"]))
    parts.insert(draw(st.integers(0, len(parts))), bad)
    return draw(SEPARATORS).join(parts)


@given(hostile_names())
def test_the_gate_takes_no_hostile_name(name: str) -> None:
    from moeq.checkpoint.paths import safe_name
    from moeq.errors import MoeqError

    with pytest.raises(MoeqError) as caught:
        safe_name(name, "somewhere")
    assert caught.value.exit_code == 4
    assert caught.value.message.isprintable(), "a message is a line of a log"


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_what_the_gate_takes_stays_inside(name: str) -> None:
    """Whatever it takes, joined to a folder, is below that folder, and can be a name on every system."""
    from moeq.checkpoint.paths import safe_name
    from moeq.errors import MoeqError

    try:
        found = safe_name(name, "somewhere")
    except MoeqError:
        return
    assert os.path.normpath(os.path.join("/root/folder", found)) == f"/root/folder/{found}"
    assert found.isprintable()
    assert len(os.fsencode(found)) <= 1024


@pytest.mark.cover(every=9)
@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_an_index_leads_nowhere_else(place: Place, name: str) -> None:
    """Every tensor of the source in a file of that name."""
    name = name.format(home=place.home) if name.startswith("{home}") else name
    with safe_open(place.source / "model.safetensors", "pt") as file:
        names = list(file.keys())
    weight_map = {tensor: "model.safetensors" for tensor in names} | {names[0]: name}
    (place.source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    before = tree(place.home)
    answer = place.convert()
    assert answer.code == 4, answer
    assert answer.error in ("source.unsafe-path", "source.reserved-name")
    assert tree(place.home) == before


MANIFEST_PLACES = ["file", "files", "missing", "kept"]


@pytest.mark.cover(every=19)
@pytest.mark.parametrize("where", MANIFEST_PLACES)
@pytest.mark.parametrize("name", HOSTILE[:14], ids=range(14))
def test_a_manifest_leads_nowhere_else(converted_place: Place, where: str, name: str) -> None:
    place = converted_place
    name = name.format(home=place.home) if name.startswith("{home}") else name
    manifest = json.loads((place.out / "moeq.json").read_text())
    manifest["restore"][where] = name if where == "file" else [name]
    (place.out / "moeq.json").write_text(json.dumps(manifest))
    (place.home / "profile.sh").write_bytes(b"x")
    before = tree(place.home)
    for argv in (["restore", place.out, place.home / "back"], ["verify", place.out, "--source", place.source]):
        answer = command(*argv)
        assert answer.code in (0, 1, 4), answer
        if answer.code == 0 and argv[0] == "restore":
            assert contents(place.home / "back") == contents(place.source)
            shutil.rmtree(place.home / "back")
        assert tree(place.home) == before


#: What moeq puts there for a while, and what makes a folder a conversion, as file systems compare names.
RESERVED = [
    "moeq-journal.jsonl",
    "moeq-journal.0-of-2.jsonl",
    "moeq-work.json",
    "moeq-work.source",
    "Moeq-Journal.jsonl",
    "MOEQ.JSON",
    "ｍoeq.json",
]

#: What moeq writes beside weights, and what looks like it.
OWN = [
    "moeq-restore.data",
    "moeq-restore.data.partial",
    "moeq-anything",
    "MOEQ-RESTORE.DATA",
    unicodedata.normalize("NFKD", "ｍoeq-restore.data"),
    "README.source.md",
    "readme.md",
    "model.safetensors.index.json.bak",
    "config.json.moeq",
    ".gitattributes",
    "tokenizer.json.partial",
    "out.moeq-partial",
    "moeq.json.sig",
]


@pytest.mark.cover(every=7)
@pytest.mark.parametrize("name", RESERVED)
@pytest.mark.parametrize("content", [b"", b"theirs", b'{"schema":"moeq.journal/1","job":"x"}\n'])
def test_reserved_names_are_refused(place: Place, name: str, content: bytes) -> None:
    (place.source / name).write_bytes(content)
    before = tree(place.home)
    answer = place.convert()
    assert (answer.code, answer.error) == (4, "source.reserved-name"), answer
    assert tree(place.home) == before


@pytest.mark.cover(every=39)
@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("content", [b"", b"theirs", b'{"schema":"moeq.journal/1","job":"x"}\n'])
def test_a_source_may_hold_moeqs_names(place: Place, name: str, content: bytes) -> None:
    """Files of such names are neither lost nor taken for moeq's own: they come back, byte for byte."""
    (place.source / name).write_bytes(content)
    before = contents(place.source)
    answer = place.convert()
    assert answer.code == 0, answer
    assert command("verify", place.out, "--source", place.source).code == 0
    answer = command("restore", place.out, place.home / "back")
    assert answer.code == 0, answer
    assert contents(place.home / "back") == before
    assert contents(place.source) == before


@pytest.mark.cover(every=4)
@pytest.mark.parametrize(
    "name",
    [
        "Model-00001-of-00003.SAFETENSORS",
        "MODEL.SAFETENSORS.INDEX.JSON",
        "CONFIG.JSON",
        "ｃonfig.json",
        "Quantize_Config.json",
    ],
)
def test_names_that_are_one_where_case_does_not_count(place: Place, name: str) -> None:
    """With a file of the source, or with one that a conversion makes."""
    (place.source / name).write_bytes(b"{}")
    before = tree(place.home)
    answer = place.convert()
    assert (answer.code, answer.error) == (4, "source.unsafe-path"), answer
    assert tree(place.home) == before


@pytest.mark.cover(every=12)
@pytest.mark.parametrize(
    "card",
    [
        "---\nlibrary_name: moeq\n---\n# mine\n",
        "library_name: moeq",
        "# plain\n",
        "---\r\nlibrary_name: moeq\r\n---\r\n",
    ],
)
@pytest.mark.parametrize("second", [None, "# of a source before\n", "---\nlibrary_name: moeq\n---\n"])
def test_cards_come_back(place: Place, card: str, second: str | None) -> None:
    """Whatever a source's cards say: also that they are moeq's."""
    (place.source / "README.md").write_bytes(card.encode())
    if second is not None:
        (place.source / "README.source.md").write_bytes(second.encode())
    assert place.convert().code == 0
    answer = command("verify", place.out, "--source", place.source)
    assert answer.code == 0, answer.out
    assert command("restore", place.out, place.home / "back").code == 0
    assert contents(place.home / "back") == contents(place.source)

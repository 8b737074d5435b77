"""Files of a conversion that hold no weights, under their names in the source.

`moeq push` puts a card of its own in the place of the source's and keeps that one beside it; the Hub adds a file.
A pushed conversion can be downloaded, verified and restored like any other.
"""

from __future__ import annotations

from moeq.checkpoint.manifest import MANIFEST_NAME
from moeq.checkpoint.source import CONFIG_NAME, Source
from moeq.pipeline.state.publish import INDEX_NAME
from moeq.pipeline.state.restore_data import OTHER_WEIGHTS, RESTORE_DATA_NAME
from moeq.pipeline.state.signature import SIGNATURE_NAME

CARD = "README.md"
#: What the source's own card is called in a pushed repository.
SOURCE_CARD = "README.source.md"
#: In the front matter of every card that moeq writes.
CARD_MARK = "library_name: moeq"

#: The Hub's own settings, which a repository gets when it is created.
HUB_SETTINGS = ".gitattributes"


def copied_files(converted: Source) -> dict[str, str]:
    """Side files that came with the source: their name there, and their name in the conversion."""
    own = {MANIFEST_NAME, SIGNATURE_NAME, CONFIG_NAME, INDEX_NAME, RESTORE_DATA_NAME}
    found = {name: name for name in converted.side_files() if name not in own and not name.endswith(OTHER_WEIGHTS)}
    if SOURCE_CARD in found:
        found[CARD] = found.pop(SOURCE_CARD)
    elif CARD in found and CARD_MARK in converted.path(CARD).read_text(encoding="utf-8", errors="replace").splitlines():
        del found[CARD]
    return found

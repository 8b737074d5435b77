"""Print a hash of every kernel build, to show that a change leaves the machine code as it is.

    export TRITON_DISABLE_LINE_INFO=1
    TRITON_CACHE_DIR=/tmp/before make compile-matrix  # the same with /tmp/after after the change
    diff <(python tools/machine_code.py /tmp/before) <(python tools/machine_code.py /tmp/after)

A build that nothing refers to by line is hashed as its assembly (PTX, or AMD's), which determines the machine code.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path


def main() -> None:
    """Print target, kernel and hash of each build in triton's cache folder, sorted."""
    lines = []
    for kind in ("ptx", "amdgcn"):
        for path in Path(sys.argv[1]).glob(f"*/*.{kind}"):
            text = path.read_text()
            if "\t.loc\t" in text:
                raise SystemExit(f"{path} holds line numbers; build with TRITON_DISABLE_LINE_INFO=1")
            target = re.search(r"\.(?:amdgcn_)?target\s+(\S+)", text)
            name = f"{target[1] if target else kind} {path.stem}"
            lines.append(f"{name} {hashlib.sha256(text.encode()).hexdigest()[:16]}")
    print("\n".join(sorted(lines)))


if __name__ == "__main__":
    main()

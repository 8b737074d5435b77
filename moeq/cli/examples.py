"""Examples that a command's help ends with; tests run them."""

from __future__ import annotations

#: Command to what follows its name.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "inspect": ("org/name", "./checkpoint --gpu H100 --tp 4", "./checkpoint --gpu H100 --json"),
    "oracle": (
        "./checkpoint --gpu H100 --tp 8",
        "./checkpoint --gpu a100,h100,mi300x --tp 1,2,4,8",
        "./checkpoint --gpu a100,h100 --tp 1,2 --require H100/tp2",
    ),
    "plan": ("./checkpoint --gpu H100 --tp 2", "./checkpoint --gpu H100 -o plan.json"),
    "convert": (
        "./checkpoint ./converted --gpu H100 --tp 2",
        "./checkpoint ./converted --gpu A100 --dry-run",
        "./checkpoint ./converted --plan plan.json",
    ),
    "finalize": ("./converted",),
    "push": ("./converted org/name",),
    "verify": ("./converted", "./converted --source ./checkpoint"),
    "restore": ("./converted ./restored",),
    "diff": ("./checkpoint ./converted",),
    "parity": ("./checkpoint --layout marlin-wna16/1",),
    "run-check": ("./converted", "./converted --layers 0 --tokens 1,7 --html report.html"),
    "selftest": ("./converted",),
    "warmup": ("./converted", "./converted --gpu H100 --tp 2"),
    "backends": ("", "wna16"),
    "gpus": ("", "'NVIDIA H100 80GB HBM3'"),
    "doctor": ("", "./checkpoint --gpu H100 --tp 2"),
    "schema": ("", "inspect"),
    "explain": ("", "P04_SCHEME", "usage.tp"),
    "transcode": ("./checkpoint ./transcoded --to compressed-tensors",),
}

"""Differences that are known and stay, by version: the look of the difference -> why."""

from __future__ import annotations

DIFFERENCES: dict[str, dict[str, str]] = {}

"""Checkpoints in other formats: the same values as another tool's files, proven."""

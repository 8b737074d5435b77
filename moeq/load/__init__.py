"""Read a converted checkpoint: the bytes of a rank, and kernel records on them. Imports no engine and no torch."""

"""Loaders: what runs a converted checkpoint, one module per engine. Importing this imports no engine and no torch."""

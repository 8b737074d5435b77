"""The version of moeq, which manifests, journals and reports carry."""

__version__ = "0.1.0"

"""What `import moeq` offers: the commands as functions, with their options by the same names and records as results."""

"""Places where units are executed other than the threads of this process."""

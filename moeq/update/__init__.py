"""Write new weights of experts into the tensors that a kernel reads, while an engine serves them. Imports no torch."""

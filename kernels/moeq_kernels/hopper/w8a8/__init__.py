"""int8 weights and activations, on int8 tensor cores."""

"""GGUF files as checkpoints: header, names, config, tokenizer, and tensors in Hugging Face's arrangement."""

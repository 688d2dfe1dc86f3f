"""The GGUF file format: header, configuration, tokenizer, weights."""

"""LoRA adapters: which pods have which, and who is to read its list again."""

"""Images in prompts: from bytes to what a model's encoder reads. No torch; Pillow is imported where it is needed."""

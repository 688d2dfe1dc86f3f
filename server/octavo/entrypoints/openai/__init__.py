"""OpenAI's API: request and response models, and the routes."""

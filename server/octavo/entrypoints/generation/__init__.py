"""From requests to generated output, for every dialect: nothing here knows OpenAI's models."""

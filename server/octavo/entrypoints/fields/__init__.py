"""Fields of requests in every dialect: content blocks, their JSON schemas, fields that are refused by name."""

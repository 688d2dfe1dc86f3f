"""Finding a model's files: hubs, web servers, Python packages, folders; their caches and config.json. No torch."""

"""HTTP and ASGI: connections, middleware, bodies and responses as bytes."""

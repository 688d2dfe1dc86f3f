"""The router: a stock Envoy in front of the engine's pods, which sends a conversation to the replica that knows it.
envoy.py is its configuration, objects.py are the objects around it."""

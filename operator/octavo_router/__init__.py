"""The router's picker: names the replica for each request that Envoy asks about. Knows neither operator nor engine."""

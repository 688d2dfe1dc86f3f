"""Plain data that several packages share: configurations, requests, a step, outputs. Imports nothing above."""

"""The release: part of answers' fingerprints, /version and `octavo --version`."""

__version__ = "0.1.0"

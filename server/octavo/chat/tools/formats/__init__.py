"""Formats of tool calls as rows of data."""

"""Speculative decoding, the scheduler's side: drafts that wait to be verified, how many, for whom."""

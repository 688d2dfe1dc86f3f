"""Drafters: what guesses the tokens that come next, to be verified several at a time."""

"""Text to tokens and back: tokenizer, chat template, detokenizer, cache of tokenised prefixes."""

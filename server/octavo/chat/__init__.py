"""Chats: from a conversation to token ids, and from generated text to answers; pure, for HTTP and for `octavo.LLM`."""

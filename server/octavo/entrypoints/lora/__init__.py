"""LoRA adapters that a server has: those it serves, and the list that an operator keeps for it."""

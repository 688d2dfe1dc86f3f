"""`octavo plan`: what a model takes of a device's memory, and how many sequences fit, before anything is bought,
fetched or loaded. The ledger is the engine's own (`octavo.memory.plan`)."""

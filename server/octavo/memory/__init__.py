"""Memory of a device before anything is allocated: the ledger, what fits, what is captured, advice. No torch."""

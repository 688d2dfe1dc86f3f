"""Command lines of other servers: what each of their flags becomes here."""

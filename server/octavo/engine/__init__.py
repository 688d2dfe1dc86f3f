"""The engine: its arguments, the core (scheduler and executor), the core's process, and the clients of both."""

"""tailscope while a fleet runs: receives spans, scrapes engines, keeps the trace, and says what it sees."""

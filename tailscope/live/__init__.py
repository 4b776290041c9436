"""tailscope while a fleet runs: receives spans, scrapes engines, keeps the trace, and says what it sees."""

import os

# Set before grpc is imported: our child processes never call it, and its fork handlers would warn at each.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

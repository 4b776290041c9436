"""`python -m tailscope.examples.live`."""

from __future__ import annotations

import sys

from tailscope.__main__ import main

sys.argv[1:1] = ["demo", "--live"]
main()

"""Rules: `x.py` with a value `RULE` beside `x.sql`, its query (see `tailscope.model.Rule`).

A rule looks for one pattern in the ledger's views. Adding one edits no other file.
"""

"""Captures that ship with tailscope; `mixed-load/` is what `tailscope demo` diagnoses."""

"""Captures that ship with tailscope and that `tailscope demo` diagnoses, one folder each."""

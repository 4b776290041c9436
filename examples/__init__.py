"""Captures that ship with tailscope."""

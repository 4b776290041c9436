"""A try-out of `tailscope serve`: a simulated fleet played against the clock, one tenant of which becomes a noisy neighbour.

`tailscope demo --live`, or `python -m tailscope.examples.live`.
"""

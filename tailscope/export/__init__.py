"""A trace as a timeline for Perfetto, in its own format or as Chrome's JSON.

`timeline` says what is on which track, from tables that `engine.diagnose` fills; `perfetto` and `chrome` write it. Neither knows of the
other, and none makes an object a slice: a batch of slices is a few arrays.
"""

"""Ranks against each other: windows profiled together, their collectives matched, clocks aligned, waits measured."""

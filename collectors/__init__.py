"""Collectors: one module a kind of file, each with a value `COLLECTOR` (see `tailscope.model.Collector`).

A collector parses, maps and yields rows; judgement belongs to rules. Modules whose name begins with
an underscore hold what several collectors share.
"""

"""Dashboards for Grafana: what is shown on them, and how Grafana is told. `python -m tailscope.grafana` writes them."""

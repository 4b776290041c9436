"""Dashboards for Grafana, made by `python -m tailscope.grafana`, and how Grafana is told to load them."""

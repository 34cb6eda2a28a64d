"""The Grafana dashboard, from which config/grafana/ is generated."""

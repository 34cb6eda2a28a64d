"""Other programs that tests run or stand in for: Prometheus, a trace collector, systemd."""

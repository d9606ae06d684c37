"""Show a training to people and monitoring: metrics, health, run log, loggers, terminal, traces."""

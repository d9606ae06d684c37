"""Show a training to people and monitoring: metrics, health, the run's log, loggers, the terminal, traces."""

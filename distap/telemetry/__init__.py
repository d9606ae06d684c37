"""What people and monitoring see of a training: metrics, the run's log, the terminal, the report page."""

"""Show a training to people and monitoring: metrics, health, run log, loggers, terminal, traces."""

import os

# Each process answers with its own metrics. With this variable, which prometheus_client reads when
# it is imported, it would keep them in files of that folder, for the server of some other program.
os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)

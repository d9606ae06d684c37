"""Send figures to TensorBoard or Weights & Biases, next to Prometheus and the run's own log."""

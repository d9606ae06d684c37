"""Send figures to TensorBoard, Weights & Biases or MLflow, next to Prometheus and the run's own log."""

"""Send figures to TensorBoard, Weights & Biases or MLflow, beside Prometheus and the run's own log."""

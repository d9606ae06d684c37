"""`distap k8s`: write the Kubernetes manifests of a training, and rules for Prometheus."""

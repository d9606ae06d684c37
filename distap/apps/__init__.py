"""Programs around a trained network: export, search, serve, plan, Kubernetes manifests."""

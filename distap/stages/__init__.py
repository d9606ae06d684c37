"""What the three stages lean on: micro-batches and their sizes, device copies, the replay drift."""

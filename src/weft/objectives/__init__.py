"""Training objectives: how rows become samples, the weight of each token in the loss, and metrics."""

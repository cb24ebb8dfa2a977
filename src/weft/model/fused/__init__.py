"""The fast path: a hand-written forward and backward of llama-like models over the kernels."""

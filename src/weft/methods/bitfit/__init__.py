"""BitFit: the biases of frozen linears."""

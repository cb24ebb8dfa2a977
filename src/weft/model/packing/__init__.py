"""How transformers' own modules are made to run on packed samples, and the check that they do."""

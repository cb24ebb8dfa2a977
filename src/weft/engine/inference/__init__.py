"""Uses trained adapters: puts stored ones on a backbone, generates, scores answers, merges."""

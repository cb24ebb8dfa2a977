"""What a worker puts into the file store: the results of jobs, and checkpoints for the workers that come after it."""

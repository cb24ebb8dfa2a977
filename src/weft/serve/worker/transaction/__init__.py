"""What a worker writes in one transaction: the story of its jobs, how they end, its claims and its own row."""

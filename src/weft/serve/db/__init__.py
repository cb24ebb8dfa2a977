"""What must survive everything: tenants, keys, files, jobs, events, checkpoints, models, usage."""

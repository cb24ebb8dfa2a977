"""What a sweep tries and when it stops a trial: samplers, objectives, early stopping."""

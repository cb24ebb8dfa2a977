"""Pure planning: which samples share a microbatch, and when each job steps. No torch."""

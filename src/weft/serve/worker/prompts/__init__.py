"""Answers prompts on the backbone that trains: the HTTP server, the scheduler between microbatches, the adapters."""

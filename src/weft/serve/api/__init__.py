"""The HTTP API: OpenAI's routes, words and shapes at the edge; thin over `records` and `jobs`."""

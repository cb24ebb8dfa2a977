"""The HTTP API: OpenAI's routes, names and objects, as a thin layer over `weft.serve.db`."""

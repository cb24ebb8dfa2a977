"""Everything that needs more than one process: stages, shards, tensor parallel, replicas, Ray."""

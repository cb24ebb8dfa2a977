"""Many replicas of the backbone, each an engine in a process of its own; one controller places jobs over them."""

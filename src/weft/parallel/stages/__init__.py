"""One replica whose layers are divided into stages: each runs its own list of a program's instructions."""

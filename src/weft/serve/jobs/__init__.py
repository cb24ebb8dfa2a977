"""The life of a job: its states, the worker that holds it, its settings, its files and its quota."""

"""Verbs that use trained adapters: chat, generate, eval, export and merge."""

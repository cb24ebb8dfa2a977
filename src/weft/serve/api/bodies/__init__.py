"""The bodies that requests send: their types, how they are read, and what is said about a wrong one."""

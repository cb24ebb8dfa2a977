"""How settings are declared, read and checked."""

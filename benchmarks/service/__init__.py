"""The service under load: clients, a real server process, what its worker trained."""

"""Reads and writes the database, with one file for each table; the tenant is always the second argument."""

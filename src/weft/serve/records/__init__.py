"""What is read from and written to the database, one file per table; the tenant is always the second argument."""

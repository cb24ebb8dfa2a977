"""The database, which holds everything that must survive: tenants, keys, files, jobs, events, models, usage."""

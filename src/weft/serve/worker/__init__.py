"""The process that trains: it claims jobs from the database, trains them on one backbone, and answers prompts."""

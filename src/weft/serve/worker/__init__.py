"""The process that trains: takes jobs from the database, trains them together on one backbone, answers prompts."""

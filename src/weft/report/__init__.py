"""What a person looks at: the live table, report.html, and experiment trackers."""

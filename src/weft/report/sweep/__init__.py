"""The report of a sweep: its leaderboard in the terminal, and report.html."""

"""What a sweep knows of its trials and writes down: the trials, their file, the leaderboard, an earlier sweep."""

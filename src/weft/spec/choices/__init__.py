"""What jobs can choose from, with the names and rules that people know from elsewhere."""

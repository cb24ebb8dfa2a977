"""What more replicas of the backbone add, and what placing jobs over them costs."""

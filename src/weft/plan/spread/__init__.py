"""Programs for several whole replicas: which job is at home where, and which samples of the others go where."""

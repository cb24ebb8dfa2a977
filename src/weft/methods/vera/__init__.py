"""VeRA: learned scales around two random matrices that all modules share."""

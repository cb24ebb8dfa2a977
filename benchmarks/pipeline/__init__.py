"""What stages of one replica do beside what is planned for them, and how long they idle."""

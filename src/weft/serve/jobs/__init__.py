"""The life of a job: its states, who works on it, and what it is trained with."""

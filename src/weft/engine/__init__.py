"""The engine executes programs, and lets jobs come and go at step boundaries."""

"""Executes programs: the step loop, jobs that come and go, evaluation, decoding."""

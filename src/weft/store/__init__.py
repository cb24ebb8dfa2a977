"""Durable files: checkpoints, PEFT adapter files and run directories, which survive kill -9."""

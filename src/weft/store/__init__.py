"""What must survive kill -9: checkpoints, PEFT adapter files and run directories."""

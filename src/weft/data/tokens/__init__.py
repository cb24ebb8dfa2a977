"""From text to tokens, and what each of them counts in the loss."""

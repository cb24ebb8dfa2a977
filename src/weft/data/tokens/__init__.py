"""From text to tokens and their weights in the loss."""

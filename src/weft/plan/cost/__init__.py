"""Time and memory of training steps: models, what they are fitted from, and the hardware they start from. No torch."""

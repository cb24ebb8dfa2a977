"""What a job learns by: how its rows become samples, what each token counts in the loss, and what is measured."""

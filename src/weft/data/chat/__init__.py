"""From conversations to text: chat templates, and which characters of what they render an assistant has to write."""

"""From conversations to text: chat templates, and which characters of the rendered text are the assistant's."""

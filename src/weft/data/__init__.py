"""From data as people have it to samples: sources, formats, chat templates, token ids, loss masks and order."""

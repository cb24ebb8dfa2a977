"""Jobs that people have elsewhere, brought here: read, checked, and written as a jobs file or sent to a service."""

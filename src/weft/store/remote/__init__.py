"""Runs behind a URL: trained in a local directory that is kept equal to what lies there."""

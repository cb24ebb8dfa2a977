"""Runs at a URL: trained in a local directory that is synchronised with the URL."""

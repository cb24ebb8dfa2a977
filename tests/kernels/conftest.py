"""Lets tests in the folders below share what is in this one."""

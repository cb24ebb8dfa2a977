"""Rows from files, tables and Hub data sets, read with the location of every row."""

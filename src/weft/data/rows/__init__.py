"""Rows as people have them: files, tables and Hub data sets, read with the place of every row."""

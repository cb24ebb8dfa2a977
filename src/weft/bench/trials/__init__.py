"""Short trials of a run, to find the capacity and the layout that suit it here."""

"""The experiments of five papers: their figures beside ours."""

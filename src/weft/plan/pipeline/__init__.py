"""Programs for several stages: built from one stream of microbatches, checked by one validator."""

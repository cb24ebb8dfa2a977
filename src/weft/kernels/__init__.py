"""Operations that are fast on a GPU: one per file, each with a reference implementation in plain torch that runs
anywhere."""

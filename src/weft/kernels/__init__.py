"""Operations that are fast on a GPU: one per file, each with a plain torch twin that runs anywhere."""

"""The page's sections, each a function from a run to a section, or to nothing where the run lacks its tables."""

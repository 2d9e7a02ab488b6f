"""`sluice audit`: prove from the files of a run that every trajectory was trained once, or dropped for a reason."""

"""The journal of a run: facts on disk (`store`), and the state that follows from them (`ledger`)."""

DATABASE = "journal.sqlite"
"""The file of the facts, in the directory of the run."""

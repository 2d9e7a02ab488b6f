"""The journal of a run: facts on disk (`store`), and the state that follows from them (`ledger`)."""

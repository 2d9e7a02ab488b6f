"""Several processes that train one model: who holds what, and how their results add up."""

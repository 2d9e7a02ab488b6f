"""Several processes that train one model: who holds what, and how their shares add up."""

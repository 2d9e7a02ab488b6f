"""The service: takes versions in, keeps them, gives them out."""

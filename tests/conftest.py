"""Lies here so that modules beside it, such as `small_models`, can be imported by the tests of every folder."""

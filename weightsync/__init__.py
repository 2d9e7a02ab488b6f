"""The path of the weights from the trainer to the engines."""
